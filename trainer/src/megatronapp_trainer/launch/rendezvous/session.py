"""The gang after it has gathered: what the others tell, and how to tell them."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, Notices


class GangConnection(Protocol):
    """A worker's ties to the others."""

    briefing: Briefing
    notices: "asyncio.Queue[Notices]"
    """What happened to other workers, in order of arrival."""

    def broadcast(self, news: Notices) -> None:
        """Tell all others."""

    def report(self, page: Mapping[str, Any]) -> None:
        """Give worker 0 this worker's progress page."""

    async def close(self) -> None:
        """Send what was told, and part. The others take a parting without an orderly notice for a loss."""


class SingleWorkerGang:
    """A gang of one worker."""

    def __init__(self, briefing: Briefing, board: GangStatus | None = None) -> None:
        self.briefing = briefing
        self.notices: asyncio.Queue[Notices] = asyncio.Queue()
        self._board = board

    def broadcast(self, news: Notices) -> None:
        """Nobody listens."""

    def report(self, page: Mapping[str, Any]) -> None:
        """This is worker 0."""
        if self._board is not None:
            self._board.progress = page

    async def close(self) -> None:
        """Nothing to part from."""


def connection_lost_notice(worker: int) -> EndNotice:
    """What stands for the notice of a launcher that vanished."""
    message = f"the connection to the launcher of worker {worker} has ended"
    return EndNotice(worker=worker, code=ExitCode.OWN_FAILURE, message=message)
