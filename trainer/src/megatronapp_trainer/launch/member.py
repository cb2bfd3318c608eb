"""Gathering at worker 0: the side of every other worker."""

import asyncio
import logging
import time

from megatronapp_trainer.errors import MessageError, RefusedError, RendezvousError
from megatronapp_trainer.launch import messages
from megatronapp_trainer.launch.address import resolve_ipv4
from megatronapp_trainer.launch.gang import gone
from megatronapp_trainer.launch.messages import COORDINATOR, Join, Notice
from megatronapp_trainer.launch.settings import Endpoint
from megatronapp_trainer.launch.table import RankTable
from megatronapp_trainer.launch.wire import Wire

log = logging.getLogger(__name__)

CONNECT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Member:
    """A worker that has its table. Fulfils `Gang`."""

    def __init__(self, wire: Wire, table: RankTable) -> None:
        self.table = table
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self._wire = wire
        self._coordinator_ended = False
        self._task = asyncio.create_task(self._listen())

    def tell(self, notice: Notice) -> None:
        """Tell worker 0, which passes it on."""
        self._wire.send(messages.notice_to_json(notice))

    async def close(self) -> None:
        """Send what was told, and part."""
        await self._wire.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                notice = messages.notice_from_json(await self._wire.receive())
                self._coordinator_ended |= notice.worker == COORDINATOR
                self.notices.put_nowait(notice)
        except (OSError, EOFError, MessageError, RefusedError):
            if not self._coordinator_ended:
                self.notices.put_nowait(gone(COORDINATOR))


async def join_gang(endpoint: Endpoint, *, token: str, own: Join, timeout_s: float) -> Member:
    """Try until worker 0 has sent the table. Raises RendezvousError with the last reason after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    reason = ""
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _try_once(endpoint, token=token, own=own)
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


async def _try_once(endpoint: Endpoint, *, token: str, own: Join) -> Member:
    address = await asyncio.to_thread(resolve_ipv4, endpoint.host)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(address, endpoint.port, limit=messages.MAX_LINE_BYTES)
    wire = Wire(reader, writer)
    try:
        wire = await Wire.greet(reader, writer, token=token, side="worker")
        wire.send(messages.join_to_json(own))
        table = _table(await wire.receive())
    except BaseException:
        await wire.close()
        raise
    return Member(wire, table)


def _table(document: dict[str, object]) -> RankTable:
    table = document.get("table")
    if document.get("type") != "table" or not isinstance(table, dict):
        raise MessageError(f"a message of type {document.get('type')!r} in place of the rank table")
    try:
        return RankTable.from_json(table)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a rank table that cannot be used: {error}") from error
