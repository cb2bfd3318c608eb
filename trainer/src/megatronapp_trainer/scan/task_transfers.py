"""Records of transfers that are sent and received in any order, each the input of a pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatronapp_common.trace import Flag, RecordKind
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark

_CHUNK_BITS, _MICROBATCH_BITS = 8, 16


def message_number(target: PassKey) -> int:
    """Return the ordinal of the message that a pass takes: the same on both ranks, in any order."""
    return (target.kind << _CHUNK_BITS | target.chunk) << _MICROBATCH_BITS | target.microbatch


class _ReceivedMessage(NamedTuple):
    mark: TimeMark
    source: int


class TaskTransfers:
    """The `TransferObserver` of the tracer.

    A RECV_WAIT ends when the message is handed out: it is the time in which the rank could run nothing before that
    message arrived, and empty where the message was there in time. So the passes that fill a wait are not part of it.
    """

    def __init__(
        self, rank: int, slots: dict[tuple[int, int], int], *, recorder: Recorder, withheld_ns: Callable[[int], int]
    ) -> None:
        """Take the slots of directed pairs; `withheld_ns(source)`: how long a link fault withholds a message."""
        self._rank = rank
        self._slots = slots
        self._recorder = recorder
        self._withheld_ns = withheld_ns
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, in which no message has arrived."""
        self._received: dict[PassKey, _ReceivedMessage] = {}
        self._idle_since: TimeMark | None = None

    @contextmanager
    def sending(self, destination: int, target: PassKey, size_bytes: int) -> Iterator[None]:
        """Record the post of a send."""
        mark = self._recorder.host_mark()
        yield
        key = self._key(RecordKind.SEND_POST, (self._rank, destination), target)
        self._recorder.transfer(key, mark, size_bytes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Publish that this rank waits; recorded is a wait once a pass has ended it.

        An error leaves the span open: the ring then says what the rank failed in.
        """
        mark = self._recorder.host_enter(RecordKey(RecordKind.RECV_WAIT))
        if self._idle_since is None:
            self._idle_since = mark
        yield
        self._recorder.ring.close_span()

    def withholds(self, source: int) -> bool:
        """Return whether a fault withholds the messages of a rank."""
        return self._withheld_ns(source) > 0

    def release_ns(self, copy: ObservedCopy) -> int:
        """Return when a message may be handed out; record the FAULT that withholds it until then."""
        withheld_ns = self._withheld_ns(copy.source)
        if withheld_ns:
            self._recorder.interval(RecordKey(RecordKind.FAULT, flags=Flag.INJECTED), copy.end_ns, withheld_ns)
        return copy.end_ns + withheld_ns

    def arrived(self, target: PassKey, copy: ObservedCopy) -> None:
        """Record the COPY of a message."""
        self._received[target] = _ReceivedMessage(self._recorder.host_mark(), copy.source)
        key = self._key(RecordKind.COPY, (copy.source, self._rank), target)
        self._recorder.copy(key, copy)

    def part_arrived(self, target: PassKey, copy: ObservedCopy) -> None:
        """Record the COPY of a part of a message; wait and post are recorded with its last part."""
        self._recorder.copy(self._key(RecordKind.COPY, (copy.source, self._rank), target), copy)

    def take(self, target: PassKey) -> None:
        """Record the RECV_WAIT of a pass that begins, if its input is a message."""
        idle_since, self._idle_since = self._idle_since, None
        message = self._received.pop(target, None)
        if message is None:
            return
        begin = end = self._recorder.host_mark()
        if idle_since is not None and idle_since.time_ns < message.mark.time_ns:
            begin, end = idle_since, message.mark
        self._recorder.host_interval(self._key(RecordKind.RECV_WAIT, (message.source, self._rank), target), begin, end)

    def _key(self, kind: RecordKind, pair: tuple[int, int], target: PassKey) -> RecordKey:
        return RecordKey(kind, microbatch=target.microbatch, comm=self._slots[pair], ordinal=message_number(target))
