"""Fetches tokens from rank 0 that the hub missed because it was not running.

A text with holes is another text: a probe would return numbers of a text that was never generated. So a run is refused
until it is whole again.

When rank 0 reconnects, its state of each open run is fetched, too: the frame with the end of a run may have been lost.
"""

import asyncio
import functools
import logging

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.wire_models import StoredRun, read
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.store.run import ScopeRun, lost_run
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import ENDED_STATES
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
RETRY_S = 1
TRIES = 60
"""Attempts to reach a rank 0 that reconnected, because its server may start later."""


class TokenBackfill:
    """Fetches the tokens of runs with holes; each run once at a time."""

    def __init__(self, probe_client: ProbeClient) -> None:
        self._probe_client = probe_client
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()
        """Runs that rank 0 no longer knows."""
        self._looks: dict[str, asyncio.Task[None]] = {}
        """Requests for the state of runs after rank 0 has reconnected."""

    async def close(self) -> None:
        """Cancel all requests that are running."""
        tasks = [*self._tasks.values(), *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self, run: ScopeRun) -> None:
        """Raise HttpError for a run with holes: 503 while rank 0 is asked, 409 if it no longer has the tokens."""
        if run.whole:
            return
        self.want(run)
        if run.id in self._tasks:
            text = "the hub missed tokens of this run, and is fetching them from the model"
            raise HttpError(503, "refilling", text, "Try again in a moment.", retry_s=RETRY_S)
        text = "the hub missed tokens of this run, and rank 0 no longer stores them"
        raise HttpError(409, "run-incomplete", text, "Start the run again.")

    def want(self, run: ScopeRun) -> None:
        """Fetch the missing tokens of a run, if rank 0 may have them."""
        if run.whole or self._probe_client.client is None or run.id in self._tasks or run.id in self._lost:
            return
        self._tasks[run.id] = task = asyncio.ensure_future(self._fill(run))
        task.add_done_callback(lambda _: self._ended(run, task))

    def _ended(self, run: ScopeRun, task: asyncio.Task[None]) -> None:
        self._tasks.pop(run.id, None)
        self._lost &= set(self._probe_client.core.runs)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("run %s is not whole: %s", run.id, error)
            if isinstance(error, ProtocolError) or (isinstance(error, HttpError) and error.status == 404):
                self._lost.add(run.id)

    async def _fill(self, run: ScopeRun) -> None:
        said = read(StoredRun, "answer of rank 0: run", await self._probe_client.serving.run(run.id))
        if self._probe_client.core.runs.holds(run):
            for entry in run.fill(said.samples):
                self._probe_client.core.feed.publish(entry)

    # ---- a rank 0 that came back

    def refresh_runs(self) -> None:
        """Fetch the state of all open runs from rank 0; each once at a time."""
        for run in self._probe_client.core.runs.values():
            if not run.ended and self._probe_client.client is not None and run.id not in self._looks:
                self._looks[run.id] = task = asyncio.ensure_future(self._refresh(run))
                task.add_done_callback(functools.partial(self._refreshed, run))

    def _refreshed(self, run: ScopeRun, task: asyncio.Task[None]) -> None:
        self._looks.pop(run.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("the state of run %s is not known: %s", run.id, error)

    async def _refresh(self, run: ScopeRun) -> None:
        before = run.header
        frame = await self._fetch_state(run)
        still_open = self._probe_client.core.runs.holds(run) and not run.ended
        if still_open and (run.header is before or frame.header.get("state") in ENDED_STATES):
            self._probe_client.core.ingest.take_run_state(frame)

    async def _fetch_state(self, run: ScopeRun) -> Frame:
        """Return the state of a run at rank 0; failed if it is unknown there. Raises HttpError and ProtocolError."""
        for _ in range(TRIES):
            try:
                said = read(StoredRun, "answer of rank 0: run", await self._probe_client.serving.run(run.id))
                return Frame(FrameType.SCOPE_RUN_STATE, {**said.header, "run": run.id})
            except HttpError as error:
                if error.status == 404:
                    return lost_run(run.header)
                if error.status not in {429, 503}:
                    raise
            await asyncio.sleep(RETRY_S)
        raise HttpError(503, "restarting", "the model does not answer", "Check the log of rank 0.")
