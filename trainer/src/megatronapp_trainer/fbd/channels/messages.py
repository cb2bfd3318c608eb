"""Messages between forward and backward ranks: their keys, and the count of those of a step."""

import collections
import enum
from typing import NamedTuple, Self

from megatronapp_trainer.errors import TransferError

_PART_BITS, _CHUNK_BITS, _ITEM_BITS, _KIND_BITS, _STEP_BITS = 12, 6, 20, 4, 22


class MessageKind(enum.IntEnum):
    """Contents of a message."""

    COMMAND = 0
    """Work that forward ranks do next, and credits; numbers of 64 bits, of which each reader reads all in order."""
    WEIGHTS = 1
    """Parameters of a chunk, from a backward to a forward rank."""
    ACTIVATION = 2
    """Input of a chunk, between forward ranks."""
    GRADIENT = 3
    """Gradient of a chunk's output, between backward ranks."""
    SAVED = 4
    """Tensors that autograd has saved in a pass, from a forward to a backward rank."""
    REPORT = 5
    """Loss of a microbatch."""
    SUMMARY = 6
    """Counts of a step and random states after it."""


class MessageKey(NamedTuple):
    """Names a message between two ranks; no two messages of a run between them have the same key."""

    kind: MessageKind
    step: int
    """Number of the command that the message belongs to."""
    item: int = 0
    """Microbatch, counted over the replicas that a forward rank serves."""
    chunk: int = 0
    part: int = 0

    def pack(self) -> int:
        """Return the key as a number of 64 bits. Raises TransferError for a field that is too large."""
        fields = (
            (self.step % (1 << _STEP_BITS), _STEP_BITS),
            (self.kind, _KIND_BITS),
            (self.item, _ITEM_BITS),
            (self.chunk, _CHUNK_BITS),
            (self.part, _PART_BITS),
        )
        number = 0
        for value, bits in fields:
            if not 0 <= value < 1 << bits:
                raise TransferError(f"{self} does not fit a key: a field of {bits} bits cannot hold {value}")
            number = number << bits | value
        return number

    @classmethod
    def unpack(cls, number: int) -> Self:
        """Return the key that `pack` made a number of; the step only up to its bits."""
        fields = []
        for bits in (_PART_BITS, _CHUNK_BITS, _ITEM_BITS, _KIND_BITS, _STEP_BITS):
            fields.append(number & (1 << bits) - 1)
            number >>= bits
        part, chunk, item, kind, step = fields
        return cls(MessageKind(kind), step, item, chunk, part)


class Traffic(NamedTuple):
    """Number of messages, and of their bytes."""

    messages: int = 0
    bytes: int = 0

    def times(self, count: int) -> "Traffic":
        """Return the traffic of this many repetitions."""
        return Traffic(count * self.messages, count * self.bytes)


class MessageCounts:
    """Messages and bytes by peer and kind, to be compared between the two ends."""

    def __init__(self) -> None:
        self._messages: collections.Counter[tuple[int, MessageKind]] = collections.Counter()
        self._bytes: collections.Counter[tuple[int, MessageKind]] = collections.Counter()
        self._copies: list[tuple[MessageKind, tuple[int, int]]] = []

    def add(self, peer: int, kind: MessageKind, size: int, copied_ns: tuple[int, int] | None = None) -> None:
        """Count a message of `size` bytes; `copied_ns`: start and end of its copy, for one that was received."""
        self._messages[peer, kind] += 1
        self._bytes[peer, kind] += size
        if copied_ns is not None:
            self._copies.append((kind, copied_ns))

    def of(self, peer: int, kind: MessageKind) -> Traffic:
        """Return messages and bytes of a kind exchanged with a peer."""
        return Traffic(self._messages[peer, kind], self._bytes[peer, kind])

    @property
    def counted(self) -> set[tuple[int, MessageKind]]:
        """Return the peers and kinds of which there are messages."""
        return set(self._messages)

    def copies(self, kind: MessageKind) -> list[tuple[int, int]]:
        """Return start and end of the copies of received messages of a kind, in nanoseconds."""
        return [copied_ns for other, copied_ns in self._copies if other is kind]

    def clear(self) -> None:
        """Set all counts to zero."""
        self._copies.clear()
        self._messages.clear()
        self._bytes.clear()
