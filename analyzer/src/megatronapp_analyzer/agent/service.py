"""The agent: reads the rings of its worker, sends them to the hub, and writes the hub's control document.

It only ever reads what the ranks write, and ranks read the control document without waiting; so the death of an agent
makes no difference to training.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatronapp_analyzer.agent.buffer import SendBuffer
from megatronapp_analyzer.agent.rings import RingDirectory, RingLibrary
from megatronapp_analyzer.agent.scope import ScopeSocket
from megatronapp_analyzer.agent.settings import AgentSettings
from megatronapp_analyzer.agent.uplink import Uplink
from megatronapp_common import frames
from megatronapp_common.errors import DocumentError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import ShmFile
from megatronapp_common.shared_documents import DocumentReader, DocumentWriter
from megatronapp_common.shared_memory_space import SharedMemorySpace

LOG = logging.getLogger(__name__)


class Agent:
    """Agent of one worker. `run` ends when the rings have ended, or after `stop`."""

    def __init__(self, settings: AgentSettings, library: RingLibrary, *, monotonic_ns: Callable[[], int]) -> None:
        self._settings = settings
        self._monotonic_ns = monotonic_ns
        self._rings = RingDirectory(settings.shm_dir, settings.shm_prefix, settings.worker, library)
        self._buffer = SendBuffer(limit_bytes=settings.buffer_bytes, resend_bytes=settings.resend_bytes)
        self._progress = DocumentReader(settings.shm_dir / f"{settings.shm_prefix}.{ShmFile.PROGRESS.value}")
        self._control: DocumentWriter | None = None
        self._stopping = asyncio.Event()
        self._asked_to_stop = False
        self._reason = "rings ended"
        self._scope = ScopeSocket(settings.run_dir, self._wake) if settings.run_dir and settings.hub_url else None
        self._uplink = Uplink(
            settings,
            self._buffer,
            ring_frames=self._ring_frames,
            status=self._status,
            on_command=self._command,
            last=self._scope.pop if self._scope else lambda: None,
        )

    def stop(self) -> None:
        """Deliver what is buffered and end once the launcher has ended.

        The launcher is stopped at the same time, and its ranks may write a last checkpoint. The agent ends at once if
        the launcher is absent or was killed, or at a second call.
        """
        self._reason = "stopped"
        if self._asked_to_stop:
            self._stopping.set()
        self._asked_to_stop = True

    async def run(self) -> None:
        """Run until the rings have ended or `stop` was called; then deliver what is buffered.

        Raises an unexpected error of the uplink: a restarted agent is better than one that reads in vain.
        """
        uplink = asyncio.create_task(self._uplink.run()) if self._settings.hub_url else None
        if uplink is not None:
            uplink.add_done_callback(lambda _: self._stopping.set())
        try:
            async with self._scope.running() if self._scope else contextlib.nullcontext():
                await self._read_until_end()
            if uplink is not None and uplink.done():
                LOG.critical("the connection to the hub ended for good; the agent ends, too")
                uplink.result()
            elif uplink is not None:
                await self._deliver()
        finally:
            if uplink is not None:
                uplink.cancel()
                await asyncio.gather(uplink, return_exceptions=True)
            self._close()

    async def _read_until_end(self) -> None:
        loop = asyncio.get_running_loop()
        next_discovery = ended_since = loop.time()
        while not self._stopping.is_set():
            if loop.time() >= next_discovery:
                self._discover()
                next_discovery = loop.time() + self._settings.discover_s
            self._read()
            if self._asked_to_stop and not self._rings.launcher_lives(self._monotonic_ns(), self._settings.quiet_s):
                break
            if not self._rings.all_ended:
                ended_since = loop.time()
            elif loop.time() - ended_since > self._settings.linger_s:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._settings.poll_s)
        self._discover()
        self._read()

    def _discover(self) -> None:
        for source in self._rings.discover():
            LOG.info("reading the ring of %s", "the worker" if source.ring is None else f"rank {source.ring}")
            self._uplink.send_first(f"ring {source.ring}", source.ring_frame())

    def _read(self) -> None:
        with contextlib.suppress(DocumentError):  # which the status reports
            self._progress.map()  # a short training may have removed it before a hub is there to be told
        for source in self._rings.sources:
            for packet in source.read():
                self._buffer.push(packet)
            if source.has_new_clock(self._monotonic_ns()):
                self._uplink.send_first(f"ring {source.ring}", source.ring_frame())
        if self._buffer.peek() is not None:
            self._uplink.notify()

    async def _deliver(self) -> None:
        """Send the last records, the last status and BYE, for at most `deliver_s`."""
        try:
            async with asyncio.timeout(self._settings.deliver_s):
                await self._uplink.flushed()
                self._uplink.send_first("status", frames.encode(Frame(FrameType.STATUS, self._status())))
                self._uplink.send_first("bye", frames.encode(Frame(FrameType.BYE, {"reason": self._reason})))
                await self._uplink.flushed()
        except TimeoutError:
            LOG.warning("the hub is unreachable: %d bytes of records were not delivered", self._buffer.buffered_bytes)

    def _wake(self) -> None:
        self._uplink.notify()

    def _ring_frames(self) -> Iterator[bytes]:
        """Yield the frames that a hub needs before any other."""
        yield from (source.ring_frame() for source in self._rings.sources)
        if self._scope is not None:
            yield from self._scope.standing.frames()

    def _status(self) -> dict[str, Any]:
        now_ns = self._monotonic_ns()
        return {
            "rings": [source.status(now_ns) for source in self._rings.sources],
            "progress": self._read_progress(),
            "buffered": self._buffer.buffered_bytes,
            "dropped": self._buffer.dropped_records,
            "sharedMemory": room.to_json()
            if (room := SharedMemorySpace.measure(self._settings.shm_dir)) is not None
            else None,
        }

    def _read_progress(self) -> dict[str, Any] | None:
        try:
            return self._progress.read()
        except DocumentError as error:
            LOG.warning("%s", error)
            return None

    def _command(self, document: Mapping[str, Any]) -> None:
        """Write the hub's commands to the control document."""
        path = self._settings.shm_dir / f"{self._settings.shm_prefix}.{ShmFile.CONTROL.value}"
        try:
            if self._control is None:
                self._control = DocumentWriter(path)
            self._control.write(dict(document))
        except DocumentError as error:
            LOG.error("faults cannot be given to the ranks: %s", error)

    def _close(self) -> None:
        self._rings.close()
        self._progress.close()
        if self._control is not None:
            self._control.close()
