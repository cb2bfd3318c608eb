"""Comparisons and sweeps of the hub: started on rank 0, followed until they end, the newest ones stored."""

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

    async def start(self, body: Mapping[str, Any], who: str) -> str:
        """Start one on rank 0; return its name. Raises HttpError."""
        name = (await self._probe_client.serving.start_branches(self._kind, body)).get(self._singular)
        if not isinstance(name, str):
            raise HttpError(503, "model-failed", f"the model named no {self._singular}", "See the log of rank 0.")
        self._probe_client.actions.note(who, f"started {self._singular} {name[:64]}")
        try:
            self._frames[name] = await self._probe_client.serving.branches(self._kind, name)
        except HttpError:
            with contextlib.suppress(HttpError):  # nobody could cancel one that the hub does not know
                await self._probe_client.serving.cancel_branches(self._kind, name)
            raise
        ended = [known for known, frame in self._frames.items() if frame.header["state"] not in OPEN]
        for known in ended[: max(0, len(self._frames) - MAX_STORED)]:
            del self._frames[known]
        self._tasks = {known: task for known, task in self._tasks.items() if not task.done()}
        self._tasks[name] = asyncio.create_task(self._follow(name))
        return name

    async def cancel(self, name: str, who: str) -> None:
        """Cancel one on rank 0; one that has ended is unchanged. Raises HttpError.

        Rank 0 may know one that this hub does not, as after a restart of the hub.
        """
        is_unknown = name not in self._frames and _NAME.fullmatch(name) is not None
        if is_unknown or self.get(name).header["state"] in OPEN:
            await self._probe_client.serving.cancel_branches(self._kind, name)
            self._probe_client.actions.note(who, f"cancelled {self._singular} {name}")

    def get(self, name: str) -> Frame:
        """Return the newest frame of one. Raises HttpError 404."""
        if name not in self._frames:
            hint = f"Take one that GET /api/v1/scope/{self._kind} lists."
            raise HttpError(404, f"no-such-{self._singular}", f"there is no {self._singular} {name[:64]!r}", hint)
        return self._frames[name]

    def newest_first(self) -> list[Frame]:
        """Return the newest frame of each, newest first."""
        return list(reversed(self._frames.values()))

    async def close(self) -> None:
        """Follow none any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

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
            if problem is not None and (problem.status == 404 or loop.time() - answered > LOST_S):
                self._fail(name, problem)

    def _fail(self, name: str, problem: HttpError) -> None:
        """Store that rank 0 does not know it any more, with what it had reported."""
        error = {"code": "engine-lost", "message": f"rank 0 lost it: {problem}", "hint": "Start it again."}
        frame = self._frames[name]
        with contextlib.suppress(KeyError):
            self._frames[name] = Frame(frame.type, {**frame.header, "state": "failed", "error": error}, frame.body)
