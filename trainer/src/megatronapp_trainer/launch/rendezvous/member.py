"""Gathering of the gang: the side of every worker but worker 0."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from megatronapp_common.names import ExitCode
from megatronapp_trainer.errors import MessageError, RefusedError, RendezvousError
from megatronapp_trainer.launch.config.address import resolve_ipv4
from megatronapp_trainer.launch.config.settings import Endpoint
from megatronapp_trainer.launch.rendezvous import messages
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_connection import connection_lost_notice
from megatronapp_trainer.launch.rendezvous.messages import COORDINATOR, EndNotice, JoinRequest, Notices, StopNotice
from megatronapp_trainer.launch.rendezvous.secure_channel import SecureChannel

log = logging.getLogger(__name__)

CONNECT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class GangMember:
    """Connection of a worker that has its table. Implements `GangConnection`."""

    def __init__(self, wire: SecureChannel, briefing: Briefing) -> None:
        self.briefing = briefing
        self.notices: asyncio.Queue[Notices] = asyncio.Queue()
        self._wire = wire
        self._coordinator_end: EndNotice | None = None
        self._coordinator_left = asyncio.Event()
        """Set once worker 0 has reported its end, or its connection is lost."""
        self._task = asyncio.create_task(self._listen())

    def broadcast(self, notice: Notices) -> None:
        """Send the notice to worker 0, which forwards it."""
        self._wire.send(messages.notice_to_json(notice))

    def report(self, progress: Mapping[str, Any]) -> None:
        """Send the document, if worker 0 wants it."""
        if self.briefing.report:
            self._wire.send(messages.progress_to_json(progress))

    async def await_ends(self, limit_s: float) -> bool:
        """Wait until worker 0 has reported its end; return False if it was a success, with which its launcher ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._coordinator_left.wait()
        return self._coordinator_end is None or self._coordinator_end.code != ExitCode.OK

    async def close(self) -> None:
        """Send what is queued, and close the connection."""
        await self._wire.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                notice = messages.notice_from_json(await self._wire.receive())
                if isinstance(notice, EndNotice) and notice.worker == COORDINATOR:
                    self._coordinator_end = notice
                    self._coordinator_left.set()
                self.notices.put_nowait(notice)
        except (OSError, EOFError, MessageError, RefusedError):
            if self._coordinator_end is None:
                self.notices.put_nowait(connection_lost_notice(COORDINATOR))
            self._coordinator_left.set()


async def join_gang(endpoint: Endpoint, *, token: str, own: JoinRequest, timeout_s: float) -> GangMember:
    """Connect until worker 0 has sent the table; if cancelled before, report to worker 0 that the gang is to stop.

    Raises:
        RendezvousError: worker 0 refused this worker for good, or `timeout_s` seconds are over; with the last reason.
        StoppedError: another worker was asked to stop.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    reason = ""
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _try_once(endpoint, token=token, own=own, deadline=deadline)
        except RefusedError as error:
            if error.final:
                raise RendezvousError(f"worker 0 refused this worker: {error.reason}") from error
            found = f"worker 0 refused this worker: {error.reason}"
        except (OSError, EOFError, MessageError) as error:
            found = str(error) or "no answer in time"
        if time.monotonic() + pause_s >= deadline:
            where = f"{endpoint.host}:{endpoint.port}"
            raise RendezvousError(f"no rank table from {where} within {timeout_s:g} s; last: {found}")
        if found != reason:
            log.info("waiting for worker 0: %s", found)
            reason = found
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _try_once(endpoint: Endpoint, *, token: str, own: JoinRequest, deadline: float) -> GangMember:
    address = await asyncio.to_thread(resolve_ipv4, endpoint.host)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(address, endpoint.port, limit=messages.MAX_LINE_BYTES)
    wire = SecureChannel(reader, writer)
    try:
        wire = await SecureChannel.greet(reader, writer, token=token, side="worker")
        wire.send(messages.join_to_json(own))
        briefing = Briefing.from_json(await wire.receive(), own)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and wire.greeted and time.monotonic() < deadline:
            wire.send(messages.notice_to_json(StopNotice(worker=own.index)))
        await wire.close()
        raise
    return GangMember(wire, briefing)
