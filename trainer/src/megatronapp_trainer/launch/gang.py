"""The gang after it has gathered: what the others tell, and how to tell them."""

import asyncio
from typing import Protocol

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.messages import Notice
from megatronapp_trainer.launch.table import RankTable


class Gang(Protocol):
    """A worker's ties to the others."""

    table: RankTable
    notices: "asyncio.Queue[Notice]"
    """What happened to other workers, in order of arrival."""

    def tell(self, notice: Notice) -> None:
        """Tell all others."""

    async def close(self) -> None:
        """Send what was told, and part. The others take a parting without an orderly notice for a loss."""


class Alone:
    """A gang of one worker."""

    def __init__(self, table: RankTable) -> None:
        self.table = table
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()

    def tell(self, notice: Notice) -> None:
        """Nobody listens."""

    async def close(self) -> None:
        """Nothing to part from."""


def gone(worker: int) -> Notice:
    """What stands for the notice of a launcher that vanished."""
    message = f"the connection to the launcher of worker {worker} has ended"
    return Notice(worker=worker, code=ExitCode.OWN_FAILURE, message=message)
