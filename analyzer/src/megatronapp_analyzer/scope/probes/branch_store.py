"""Comparisons and sweeps of the hub: started on rank 0, followed until they end, the newest ones stored.

Rank 0 may have some that the hub does not know: after a restart of the hub, or where its answer was late. They are
adopted when a page lists them or requests them by name.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_common.frames import Frame
from megatronapp_common.web.problems import HttpError

MAX_STORED = 16
"""Comparisons, and sweeps, that are stored; beyond, the oldest one that has ended is removed first."""
POLL_S = 0.3
REFRESH_S = 2.0
"""Seconds for which a list of rank 0 is used."""
LOST_S = 60.0
"""Seconds without an answer of rank 0 after which what it computes is lost."""
OPEN = frozenset({"queued", "running"})
_NAME = re.compile("[0-9a-f]{12}")
"""Names that rank 0 gives; others are no part of a path there."""


class BranchStore:
    """Comparisons or sweeps by their names, oldest first. `kind`: `comparisons` or `sweeps`, as in paths."""

    def __init__(self, kind: str, probe_client: ProbeClient) -> None:
        self._kind = kind
        self._singular = kind.removesuffix("s")
        self._probe_client = probe_client
        self._frames: dict[str, Frame] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refreshing = asyncio.Lock()
        self._refreshed: float | None = None
        """Time of the last list of rank 0."""
        self._unanswered: set[str] = set()
        """Names that have failed here because rank 0 did not answer, and that it may compute all the same."""

    async def start(self, body: Mapping[str, Any], who: str) -> str:
        """Start one on rank 0; return its name. Raises HttpError."""
        name = (await self._probe_client.serving.start_branches(self._kind, body)).get(self._singular)
        if not isinstance(name, str):
            raise HttpError(503, "model-failed", f"the model named no {self._singular}", "See the log of rank 0.")
        self._probe_client.actions.note(who, f"started {self._singular} {name[:64]}")
        try:
            await self._adopt(name)
        except HttpError:
            with contextlib.suppress(HttpError):  # the caller does not get its name
                await self._probe_client.serving.cancel_branches(self._kind, name)
            raise
        return name

    async def cancel(self, name: str, who: str) -> None:
        """Cancel one on rank 0; one that has ended is unchanged. Raises HttpError."""
        if (await self.get(name)).header["state"] in OPEN or name in self._unanswered:
            await self._probe_client.serving.cancel_branches(self._kind, name)
            self._probe_client.actions.note(who, f"cancelled {self._singular} {name}")

    async def get(self, name: str) -> Frame:
        """Return the newest frame of one. Raises HttpError: 404, or why rank 0 does not answer."""
        if name not in self._frames and self._probe_client.client is not None and _NAME.fullmatch(name) is not None:
            try:
                await self._adopt(name)
            except HttpError as error:
                if error.status != 404:
                    raise
        if name not in self._frames:
            hint = f"Take one that GET /api/v1/scope/{self._kind} lists."
            raise HttpError(404, f"no-such-{self._singular}", f"there is no {self._singular} {name[:64]!r}", hint)
        return self._frames[name]

    async def newest_first(self) -> list[Frame]:
        """Return the newest frame of each, newest first, those included that rank 0 alone knew so far."""
        if self._probe_client.client is not None:
            async with self._refreshing:
                await self._refresh()
        return sorted(reversed(self._frames.values()), key=_started_at, reverse=True)

    async def close(self) -> None:
        """Follow none any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _refresh(self) -> None:
        """Adopt those that rank 0 lists, as far as it answers."""
        now = asyncio.get_running_loop().time()
        if self._refreshed is not None and now - self._refreshed < REFRESH_S:
            return
        self._refreshed = now
        with contextlib.suppress(HttpError):
            listed = await self._probe_client.serving.list_branches(self._kind)
            names = [name for name in listed[:MAX_STORED] if _NAME.fullmatch(name) is not None]
            for name in reversed(names):  # those that have ended are removed in the order in which they are stored
                if name not in self._frames or name in self._unanswered:
                    await self._adopt(name)

    async def _adopt(self, name: str) -> None:
        """Store one of rank 0, and follow it until it ends. Raises HttpError."""
        frame = await self._probe_client.serving.branches(self._kind, name)
        if name in self._frames and name not in self._unanswered:
            return
        self._frames[name] = frame
        self._unanswered.discard(name)
        oldest_first = sorted(self._frames, key=lambda known: _started_at(self._frames[known]))
        ended = [known for known in oldest_first if self._frames[known].header["state"] not in OPEN]
        for known in ended[: max(0, len(self._frames) - MAX_STORED)]:
            del self._frames[known]
        self._unanswered &= self._frames.keys()
        self._tasks = {known: task for known, task in self._tasks.items() if not task.done()}
        if name in self._frames and frame.header["state"] in OPEN:
            self._tasks[name] = asyncio.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while self._frames[name].header["state"] in OPEN:
            await asyncio.sleep(POLL_S)
            problem: HttpError | None = None
            try:
                self._frames[name] = await self._probe_client.serving.branches(self._kind, name)
                answered = loop.time()
            except HttpError as error:
                problem = error
            if problem is not None and problem.status == 404:
                self._fail(name, problem)
            elif problem is not None and loop.time() - answered > LOST_S:
                self._fail(name, problem)
                self._unanswered.add(name)

    def _fail(self, name: str, problem: HttpError) -> None:
        """Store that rank 0 does not know it any more, with what it had reported."""
        error = {"code": "engine-lost", "message": f"rank 0 lost it: {problem}", "hint": "Start it again."}
        frame = self._frames[name]
        with contextlib.suppress(KeyError):
            self._frames[name] = Frame(frame.type, {**frame.header, "state": "failed", "error": error}, frame.body)


def _started_at(frame: Frame) -> str:
    return str(frame.header.get("startedAt", ""))
