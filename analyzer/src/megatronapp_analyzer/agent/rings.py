"""Discovery and reading of the rings of one worker."""

import dataclasses
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from megatronapp_analyzer.agent.buffer import RecordsPacket, RingId
from megatronapp_analyzer.agent.native import NativeOpenSpan, RingReader
from megatronapp_common.frames import Frame, FrameType, encode
from megatronapp_common.pid_namespace import pid_namespace
from megatronapp_common.trace import NO_MICROBATCH, RECORD_BYTES

LOG = logging.getLogger(__name__)
OTHER_VERSION = "not a ring of this version"
"""Part of the error of megatronapp_native for a ring that another release has written."""
FRAME_RECORDS = 4096
CLOCK_RESEND_NS = 30_000_000_000
NS_PER_S = 1_000_000_000
MAX_FRAMES_PER_READ = 16
"""Frames read from one ring before the other rings are read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingLibrary:
    """Function that opens rings, and the error it raises for a file that is not, or no longer, a whole ring."""

    open: Callable[[str], RingReader]
    error: type[Exception]


def native_library() -> RingLibrary:
    """Return the ring library of megatronapp_native."""
    import megatronapp_native

    return RingLibrary(open=megatronapp_native.RingReader, error=megatronapp_native.RingError)


def _entry_of(span: NativeOpenSpan | None) -> dict[str, Any] | None:
    """Return a span of a ring's header as an entry of a STATUS frame."""
    if span is None:
        return None
    return {
        "kind": span.kind,
        "step": span.step,
        "microbatch": None if span.microbatch == NO_MICROBATCH else span.microbatch,
        "startNs": span.start_ns,
    }


def process_state(pid: int) -> str | None:
    """Return the state letter of a process from /proc/PID/stat (proc(5)); None if no such process exists."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()[0]


class RingSource:
    """One ring file from its appearance to its end. Raises ValueError for metadata that is not JSON."""

    def __init__(self, path: pathlib.Path, ring: RingId, worker: int, library: RingLibrary) -> None:
        self.ring = ring
        self._path = path
        self._worker = worker
        self._library = library
        self._reader = library.open(str(path))
        self._info = self._reader.info()
        self._inode = os.stat(path).st_ino
        self._metadata = json.loads(self._info.metadata or b"{}")
        self._clock_pairs: list[tuple[int, int]] = []
        self._clock_due_ns = 0
        self._state = self._process_state()
        self._was_seen = self._state is not None
        self._gone = False
        self._drained = False
        self.lost = 0

    @property
    def ended(self) -> bool:
        """True if the ring is closed, unlinked or left by a dead process, and read to its end."""
        return self._drained and (self._gone or self._info.closed or not self._alive())

    def ring_frame(self) -> bytes:
        """Encode a RING frame of the current state."""
        return encode(
            Frame(
                FrameType.RING,
                {
                    "rank": self.ring,
                    "worker": self._worker,
                    "metadata": self._metadata,
                    "bootId": self._info.boot_id,
                    "clockPairs": [list(pair) for pair in self._info.clock_pairs],
                    "capacity": self._info.capacity,
                },
            )
        )

    def has_new_clock(self, now_ns: int) -> bool:
        """Return true if the hub needs newer clock pairs; at most every CLOCK_RESEND_NS, as clocks drift slowly."""
        if now_ns < self._clock_due_ns or self._info.clock_pairs == self._clock_pairs:
            return False
        self._clock_pairs, self._clock_due_ns = self._info.clock_pairs, now_ns + CLOCK_RESEND_NS
        return True

    def read(self) -> list[RecordsPacket]:
        """Return new records as packets. A file that has shrunk or become garbled has ended; its packets stay valid."""
        packets: list[RecordsPacket] = []
        if self._gone:
            return packets
        self._state = self._process_state()
        self._was_seen |= self._state is not None
        try:
            ending = self._info.closed or not self._alive() or not self._is_linked()
            self._info = self._reader.info()
            packets = self._read_packets()
        except self._library.error as error:
            LOG.warning("%s: no longer a ring: %s", self._path, error)
            self._gone = self._drained = True
            return packets
        # The last records are certain only when read after the end was noticed.
        self._drained = ending and len(packets) < MAX_FRAMES_PER_READ
        self._gone = self._drained and not self._is_linked()
        return packets

    def _read_packets(self) -> list[RecordsPacket]:
        packets = []
        for _ in range(MAX_FRAMES_PER_READ):
            position = self._reader.next_index
            data, lost = self._reader.read(FRAME_RECORDS)
            self.lost += lost
            if data:
                packets.append(self._packet(position + lost, data, lost))
            if len(data) < FRAME_RECORDS * RECORD_BYTES:
                break
        return packets

    def _packet(self, first: int, data: bytes, lost: int) -> RecordsPacket:
        header = {"rank": self.ring, "worker": self._worker, "first": first, "lost": lost}
        end = first + len(data) // RECORD_BYTES
        return RecordsPacket(ring=self.ring, first=first, end=end, data=encode(Frame(FrameType.RECORDS, header, data)))

    def status(self, now_ns: int) -> dict[str, Any]:
        """Return the entry of this ring for a STATUS frame."""
        return {
            "rank": self.ring,
            "heartbeatNs": self._info.heartbeat_ns,
            "nowNs": now_ns,
            "openSpan": _entry_of(self._info.open_span),
            "deviceSpan": _entry_of(self._info.device_span),
            "lost": self.lost,
            "closed": self._info.closed,
            "alive": self._alive(),
            "processState": self._state,
        }

    def beats(self, now_ns: int, within_s: float) -> bool:
        """Return true if the writer had a heartbeat within `within_s` and has not ended."""
        return not self.ended and now_ns - self._info.heartbeat_ns < within_s * NS_PER_S

    def close(self) -> None:
        """Unmap the ring's file."""
        self._reader.close()

    def _process_state(self) -> str | None:
        """Return the state letter, or None for a process of another PID namespace (as in a pod)."""
        namespace = self._metadata.get("pidNamespace") if isinstance(self._metadata, dict) else None
        return process_state(self._info.pid) if namespace in {None, pid_namespace()} else None

    def _alive(self) -> bool:
        """Return true unless the process is known to have ended; an unseen one may be in another PID namespace."""
        return not self._was_seen or self._state not in (None, "Z", "X")

    def _is_linked(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False


class RingDirectory:
    """All rings of one worker, discovered by their names as they appear."""

    def __init__(self, directory: pathlib.Path, prefix: str, worker: int, library: RingLibrary) -> None:
        self._directory = directory
        self._prefix = prefix
        self._worker = worker
        self._library = library
        self._pattern = re.compile(re.escape(prefix) + r"\.(?:rank(\d+)|worker)\.ring")
        self._sources: dict[str, RingSource] = {}
        self._complained: set[str] = set()

    @property
    def sources(self) -> list[RingSource]:
        """Rings found so far, ended ones included."""
        return list(self._sources.values())

    @property
    def all_ended(self) -> bool:
        """True if at least one ring was discovered and all have ended."""
        return bool(self._sources) and all(source.ended for source in self._sources.values())

    def launcher_lives(self, now_ns: int, quiet_s: float) -> bool:
        """Return true while the worker's own ring is written, which is until all ranks have ended."""
        return any(source.beats(now_ns, quiet_s) for source in self.sources if source.ring is None)

    def discover(self) -> list[RingSource]:
        """Open and return the rings that have appeared since the last call."""
        found = []
        for name in sorted(os.listdir(self._directory)):
            match = self._pattern.fullmatch(name)
            if match is None or name in self._sources:
                continue
            ring = int(match[1]) if match[1] is not None else None
            if (source := self._open(name, ring)) is not None:
                self._sources[name] = source
                found.append(source)
        return found

    def _open(self, name: str, ring: RingId) -> RingSource | None:
        """Open a ring; return None for a file that is not a whole ring, such as one being created."""
        try:
            return RingSource(self._directory / name, ring, self._worker, self._library)
        except (self._library.error, FileNotFoundError, ValueError) as error:
            if name not in self._complained:
                if OTHER_VERSION in str(error):
                    LOG.warning("%s: %s; use trainer and analyzer images of the same release", name, error)
                else:
                    LOG.info("%s: not a ring yet: %s", name, error)
                self._complained.add(name)
            return None

    def close(self) -> None:
        """Unmap the files of all rings."""
        for source in self._sources.values():
            source.close()
