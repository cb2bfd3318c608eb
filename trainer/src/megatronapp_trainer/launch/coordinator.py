"""Gathering at worker 0: its side."""

import asyncio
import logging
import socket

from megatronapp_trainer.errors import MessageError, RefusedError, RendezvousError
from megatronapp_trainer.launch import messages
from megatronapp_trainer.launch.gang import gone
from megatronapp_trainer.launch.messages import Expected, Join, Notice
from megatronapp_trainer.launch.table import RankTable, build_table
from megatronapp_trainer.launch.wire import Wire

log = logging.getLogger(__name__)


class Coordinator:
    """Lets the workers in, hands out the table, and passes notices on. Fulfils `Gang` once `gather` has returned."""

    table: RankTable

    def __init__(self, *, token: str, expected: Expected, own: Join) -> None:
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self._token = token
        self._expected = expected
        self._joins = {own.index: own}
        self._wires: dict[int, Wire] = {}
        self._ended: set[int] = set()
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def gather(self, listener: socket.socket, timeout_s: float) -> None:
        """Wait for all. Raises RendezvousError that names who is missing after `timeout_s`."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=messages.MAX_LINE_BYTES)
        self._complete_if_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise RendezvousError(f"after {timeout_s:g} s these workers are missing: {self._missing()}") from None

    def tell(self, notice: Notice) -> None:
        """Tell all others."""
        self._pass_on(notice)

    async def close(self) -> None:
        """Close every connection and the port. Listening ends first, or our parting would be passed on as a loss."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(wire.close() for wire in self._wires.values()), return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def _missing(self) -> str:
        every = range(len(self._expected.proc_per_node))
        return ", ".join(str(index) for index in every if index not in self._joins)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        wire = Wire(reader, writer)
        try:
            wire = await Wire.greet(reader, writer, token=self._token, side="coordinator")
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

    async def _refuse(self, wire: Wire, error: RefusedError, peer: object) -> None:
        log.warning("refused %s: %s", peer, error.reason)
        wire.send_bare(messages.refusal(error))
        await wire.close()

    def _admit(self, join: Join, wire: Wire) -> None:
        messages.check_join(join, self._expected, self._joins)
        self._joins[join.index] = join
        self._wires[join.index] = wire
        log.info("worker %d joined from %s (%s)", join.index, join.address, join.node)
        self._complete_if_all()

    def _complete_if_all(self) -> None:
        if len(self._joins) < len(self._expected.proc_per_node):
            return
        self.table = build_table(list(self._joins.values()))
        for wire in self._wires.values():
            wire.send({"type": "table", "table": self.table.to_json()})
        self._complete.set()

    async def _listen(self, index: int, wire: Wire) -> None:
        """Take notices of an admitted worker until its connection ends."""
        try:
            while True:
                self._hear(messages.notice_from_json(await wire.receive()))
        except (OSError, EOFError, MessageError, RefusedError):
            self._part(index)
        finally:
            await wire.close()

    def _hear(self, notice: Notice) -> None:
        self._ended.add(notice.worker)
        self.notices.put_nowait(notice)
        self._pass_on(notice)

    def _part(self, index: int) -> None:
        """A worker that leaves before the table may come again; afterwards its parting is a loss."""
        del self._wires[index]
        if not self._complete.is_set():
            log.warning("worker %d left before the gang was complete", index)
            del self._joins[index]
        elif index not in self._ended:
            self._hear(gone(index))

    def _pass_on(self, notice: Notice) -> None:
        for index, wire in self._wires.items():
            if index != notice.worker:
                wire.send(messages.notice_to_json(notice))
