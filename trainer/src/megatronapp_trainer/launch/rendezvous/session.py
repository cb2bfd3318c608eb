"""The gang after it has gathered: what the others tell, and how to tell them."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_status import Board
from megatronapp_trainer.launch.rendezvous.messages import News, Notice


class Gang(Protocol):
    """A worker's ties to the others."""

    briefing: Briefing
    news: "asyncio.Queue[News]"
    """What happened to other workers, in order of arrival."""

    def tell(self, news: News) -> None:
        """Tell all others."""

    def report(self, page: Mapping[str, Any]) -> None:
        """Give worker 0 this worker's progress page."""

    async def close(self) -> None:
        """Send what was told, and part. The others take a parting without an orderly notice for a loss."""


class Alone:
    """A gang of one worker."""

    def __init__(self, briefing: Briefing, board: Board | None = None) -> None:
        self.briefing = briefing
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self._board = board

    def tell(self, news: News) -> None:
        """Nobody listens."""

    def report(self, page: Mapping[str, Any]) -> None:
        """This is worker 0."""
        if self._board is not None:
            self._board.progress = page

    async def close(self) -> None:
        """Nothing to part from."""


def gone(worker: int) -> Notice:
    """What stands for the notice of a launcher that vanished."""
    message = f"the connection to the launcher of worker {worker} has ended"
    return Notice(worker=worker, code=ExitCode.OWN_FAILURE, message=message)
