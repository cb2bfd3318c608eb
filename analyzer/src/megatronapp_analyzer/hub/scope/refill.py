"""Tokens that this hub has not seen, because it was not there: rank 0 still has them.

A text with holes is another text: what a probe of it found would be numbers of something that nobody generated. So a
run is refused until it is whole again.
"""

import asyncio
import logging

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.problems import ApiError
from megatronapp_analyzer.hub.scope.asking import Asker
from megatronapp_analyzer.hub.scope.headers import StoredRun, read
from megatronapp_analyzer.hub.scope.run import Run

LOG = logging.getLogger(__name__)
RETRY_S = 1


class Refiller:
    """Asks rank 0 for tokens of runs that have holes; each run once at a time."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._asker.desk.on_hole = self.want
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()
        """Runs that rank 0 does not know any more."""

    async def close(self) -> None:
        """End what goes on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self, run: Run) -> None:
        """Raises ApiError for a run with holes: 503 while rank 0 is asked, 409 where nobody has its tokens."""
        if run.whole:
            return
        self.want(run)
        if run.id in self._tasks:
            text = "the hub has not seen all tokens of this run, and asks the model for them"
            raise ApiError(503, "refilling", text, "Ask again in a moment.", retry_s=RETRY_S)
        text = "tokens of this run came while the hub was away, and nobody has them any more"
        raise ApiError(409, "run-incomplete", text, "Its numbers cannot be told; start the run again.")

    def want(self, run: Run) -> None:
        """Ask, if that may help."""
        if run.whole or self._asker.client is None or run.id in self._tasks or run.id in self._lost:
            return
        self._tasks[run.id] = task = asyncio.ensure_future(self._fill(run))
        task.add_done_callback(lambda _: self._ended(run, task))

    def _ended(self, run: Run, task: asyncio.Task[None]) -> None:
        self._tasks.pop(run.id, None)
        self._lost &= set(self._asker.desk.runs)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("run %s is not whole: %s", run.id, error)
            if isinstance(error, ProtocolError) or (isinstance(error, ApiError) and error.status == 404):
                self._lost.add(run.id)

    async def _fill(self, run: Run) -> None:
        said = read(StoredRun, "answer of rank 0: run", await self._asker.serving.run(run.id))
        desk = self._asker.desk
        if desk.runs.get(run.id) is run:
            for entry in run.fill(said.samples):
                desk.publish(entry)
