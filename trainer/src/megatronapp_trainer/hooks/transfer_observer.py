"""Observers of transfers that are sent and received in any order."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from megatronapp_common.trace import RecordKind, TransferPath


class PassKey(NamedTuple):
    """A pass of a step on the rank that runs it."""

    kind: RecordKind
    chunk: int
    microbatch: int


class ObservedCopy(NamedTuple):
    """Copy of a message to its receiver."""

    source: int
    """Rank of the world."""
    size_bytes: int
    start_ns: int
    end_ns: int
    """Times of the copy on the monotonic clock of the node."""
    path: TransferPath = TransferPath.SHARED_MEMORY


class TransferObserver(Protocol):
    """Observer of one rank's transfers, called on its thread; a message is named by the pass that it is the input of.

    The `StepObserver` learns of passes itself: as one begins, its message is taken.
    """

    def sending(self, destination: int, target: PassKey, size_bytes: int) -> AbstractContextManager[None]:
        """Return what encloses the start of a transfer to a rank of the world."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return what encloses a wait: the rank may run nothing until a message arrives."""

    def withholds(self, source: int) -> bool:
        """Return whether a fault withholds the messages of a rank of the world."""

    def release_ns(self, copy: ObservedCopy) -> int:
        """Return when a message may be handed out: as its copy ends, or later where a fault withholds it."""

    def arrived(self, target: PassKey, copy: ObservedCopy) -> None:
        """Note that a message is handed out."""

    def part_arrived(self, target: PassKey, copy: ObservedCopy) -> None:
        """Note that a part of the input of a pass is handed out; the message that ends the input follows."""

    def take(self, target: PassKey) -> None:
        """Note that the message of a pass is used, which ends the wait for it; a pass that begins takes its own."""
