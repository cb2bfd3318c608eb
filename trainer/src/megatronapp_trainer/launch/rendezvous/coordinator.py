"""Gathering of the gang: the side of worker 0."""

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

from megatronapp_common.names import ExitCode, RankOrder
from megatronapp_common.topology import FbdWorld
from megatronapp_trainer.errors import MessageError, RefusedError, RendezvousError, StoppedError
from megatronapp_trainer.launch.rendezvous import messages
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_connection import connection_lost_notice
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, ExpectedGang, JoinRequest, Notices, StopNotice
from megatronapp_trainer.launch.rendezvous.secure_channel import SecureChannel

log = logging.getLogger(__name__)


class Coordinator:
    """Admits the workers, sends the table, and forwards notices. Implements `GangConnection` once `gather` has
    returned.
    """

    briefing: Briefing

    def __init__(
        self,
        *,
        token: str,
        expected: ExpectedGang,
        own: JoinRequest,
        order: RankOrder = RankOrder.INDEX,
        fbd: FbdWorld | None = None,
        status: GangStatus | None = None,
    ) -> None:
        """`fbd`: ranks of both roles of MegaFBD."""
        self.notices: asyncio.Queue[Notices] = asyncio.Queue()
        self._token = token
        self._expected = expected
        self._order = order
        self._fbd = fbd
        self._status = status
        self._index = own.index
        self._stopped: StopNotice | None = None
        self._joins = {own.index: own}
        self._wires: dict[int, SecureChannel] = {}
        self._ended: set[int] = set()
        self._certain = False
        """True once the notice of a failure was forwarded that is its own cause."""
        self._all_ended = asyncio.Event()
        """Set while every connected worker has reported its end."""
        self._complete = asyncio.Event()
        """Set once all have joined, or once the wait for them was given up."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._note_missing()

    async def gather(self, listener: socket.socket, timeout_s: float) -> None:
        """Wait for all workers; if cancelled before, ask those that have joined to stop.

        Raises:
            RendezvousError: workers are missing after `timeout_s` seconds; names them.
            StoppedError: another worker was asked to stop.
        """
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=messages.MAX_LINE_BYTES)
        self._complete_if_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(map(str, self.missing))
            raise RendezvousError(f"after {timeout_s:g} s these workers are missing: {missing}") from None
        except asyncio.CancelledError:
            self.broadcast(StopNotice(worker=self._index))
            raise
        if self._stopped is not None:
            raise StoppedError(f"worker {self._stopped.worker} was asked to stop before the gang was complete")

    @property
    def missing(self) -> list[int]:
        """Return the workers that have not joined yet."""
        return [index for index in range(len(self._expected.proc_per_node)) if index not in self._joins]

    def broadcast(self, notice: Notices) -> None:
        self._pass_on(notice)

    def report(self, progress: Mapping[str, Any]) -> None:
        """Publish the document here: this is worker 0."""
        if self._status is not None:
            self._status.progress = progress

    async def await_ends(self, limit_s: float) -> bool:
        """Wait until every connected worker has reported how its ranks ended, for at most `limit_s` seconds."""
        self._note_ends()
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended.wait()
        except TimeoutError:
            open_ends = sorted(self._wires.keys() - self._ended)
            log.warning("no report of its end within %g s from workers %s", limit_s, ", ".join(map(str, open_ends)))
        return True

    def _note_ends(self) -> None:
        if self._wires.keys() <= self._ended:
            self._all_ended.set()

    async def close(self) -> None:
        """Close every connection and the port. The listener is closed first, or our leaving would be forwarded as a
        loss.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(wire.close() for wire in self._wires.values()), return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # even if cancelled before it began: its peer would wait

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        wire = SecureChannel(reader, writer)
        try:
            wire = await SecureChannel.greet(reader, writer, token=self._token, side="coordinator")
            async with asyncio.timeout(messages.JOIN_S):
                join = messages.join_from_json(await wire.receive())
            self._admit(join, wire)
        except MessageError as error:
            await self._refuse(wire, RefusedError(str(error), final=False), peer)
        except RefusedError as error:
            await self._refuse(wire, error, peer)
        except (OSError, EOFError, TimeoutError) as error:
            log.info("a connection from %s ended before it joined: %s", peer, error or "silence")
            await wire.close()
        else:
            await self._listen(join.index, wire)

    async def _refuse(self, wire: SecureChannel, error: RefusedError, peer: object) -> None:
        log.warning("refused %s: %s", peer, error.reason)
        wire.refuse(error)
        await wire.close()

    def _admit(self, join: JoinRequest, wire: SecureChannel) -> None:
        messages.check_join(join, self._expected, self._joins)
        self._joins[join.index] = join
        self._wires[join.index] = wire
        self._note_missing()
        log.info("worker %d joined from %s (%s)", join.index, join.address, join.node)
        self._complete_if_all()

    def _note_missing(self) -> None:
        if self._status is not None:
            self._status.missing = self.missing

    def _complete_if_all(self) -> None:
        if self.missing or self._stopped is not None:
            return
        self.briefing = Briefing.of(
            list(self._joins.values()), self._order, report=self._status is not None, fbd=self._fbd
        )
        for wire in self._wires.values():
            wire.send(self.briefing.to_json())
        self._complete.set()

    async def _listen(self, index: int, wire: SecureChannel) -> None:
        """Receive messages of an admitted worker until its connection ends."""
        try:
            while True:
                document = await wire.receive()
                progress = messages.progress_of(document)
                if progress is None:
                    notice = messages.notice_from_json(document)
                    self._record_end(notice)
                    self._receive(notice)
                else:
                    self.report(progress)
        except (OSError, EOFError, MessageError, RefusedError):
            self._part(index)
        finally:
            await wire.close()

    def _record_end(self, notice: Notices) -> None:
        if self._status is not None and isinstance(notice, EndNotice):
            self._status.add_end(notice)

    def _receive(self, notice: Notices) -> None:
        if isinstance(notice, EndNotice):
            self._ended.add(notice.worker)
            self._note_ends()
        elif not self._complete.is_set():
            self._stopped = notice
            self._complete.set()
        self.notices.put_nowait(notice)
        self._pass_on(notice)

    def _part(self, index: int) -> None:
        """Handle the loss of a worker: before the table is sent it may join again, afterwards it is a failure."""
        del self._wires[index]
        self._note_ends()
        if not self._complete.is_set():
            log.warning("worker %d left before the gang was complete", index)
            del self._joins[index]
            self._note_missing()
        elif index not in self._ended:
            self._receive(connection_lost_notice(index))

    def _pass_on(self, notice: Notices) -> None:
        """Send a notice to all other workers; once they know a failure, peers that end for it are not reported."""
        if isinstance(notice, EndNotice):
            if self._certain and notice.code == ExitCode.PEER_LOST and notice.worker != self._index:
                return
            self._certain |= not notice.orderly and notice.code != ExitCode.PEER_LOST
        for index, wire in self._wires.items():
            if index != notice.worker:
                wire.send(messages.notice_to_json(notice))
