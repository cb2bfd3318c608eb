"""The gang after it has gathered: notices from and to the other workers."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, Notices


class GangConnection(Protocol):
    """Connection of a worker to the others."""

    briefing: Briefing
    notices: "asyncio.Queue[Notices]"
    """Events of other workers, in the order in which they were received."""

    def broadcast(self, notice: Notices) -> None:
        """Send a notice to all others."""

    def report(self, progress: Mapping[str, Any]) -> None:
        """Send this worker's progress document to worker 0."""

    async def await_ends(self, limit_s: float) -> bool:
        """On worker 0, wait until the others have reported how their ranks ended, elsewhere until worker 0 has.

        Waits for at most `limit_s` seconds. Returns False if worker 0 has ended with success: then its launcher
        ends, and serves the end of this worker no longer.
        """

    async def close(self) -> None:
        """Send what is queued, and close. The others take a close without an orderly notice for a loss."""


class SingleWorkerGang:
    """Connection of a gang of one worker."""

    def __init__(self, briefing: Briefing, status: GangStatus | None = None) -> None:
        self.briefing = briefing
        self.notices: asyncio.Queue[Notices] = asyncio.Queue()
        self._status = status

    def broadcast(self, notice: Notices) -> None:
        """Drop the notice: there is no other worker."""

    def report(self, progress: Mapping[str, Any]) -> None:
        """Publish the document here: this is worker 0."""
        if self._status is not None:
            self._status.progress = progress

    async def await_ends(self, limit_s: float) -> bool:
        """Return True at once: there is no other worker."""
        return True

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def connection_lost_notice(worker: int) -> EndNotice:
    """Return the notice that replaces the one of a launcher that vanished."""
    message = f"the connection to the launcher of worker {worker} has ended"
    return EndNotice(worker=worker, code=ExitCode.OWN_FAILURE, message=message)
