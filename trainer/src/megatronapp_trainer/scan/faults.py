"""Faults for demonstrations: a rank that computes slowly, a host that stalls, a link that delivers late.

They need no root, do no real damage, and end by themselves. The active fault is chosen at step boundaries, from the
manifest and from the control document; the time it adds is relative to this rank's usual spans.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_common.trace import PASS_KINDS, RecordKind
from megatronapp_trainer.errors import UsageError

KINDS = ("compute", "host", "link")
MAX_FACTOR = 100
MAX_NUMBER = 2_147_483_647
"""Bounds of the manifest: a fault that is started by hand cannot stall a job forever either."""
HISTORY = 16
"""Number of last spans of which the usual length is the median."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault. `peer` limits a link fault to messages of that source rank."""

    rank: int
    kind: str
    factor: float
    from_step: int
    steps: int
    peer: int | None = None

    @classmethod
    def from_json(cls, document: object) -> "InjectedFault":
        """Parse a fault in the spelling of the manifest.

        Raises UsageError.
        """
        if not isinstance(document, Mapping):
            raise UsageError(f"fault {document!r}: give an object with rank, kind, factor, fromStep, steps")
        try:
            peer = document.get("peer")
            fault = cls(
                rank=int(document["rank"]),
                kind=str(document["kind"]),
                factor=float(document["factor"]),
                from_step=int(document["fromStep"]),
                steps=int(document["steps"]),
                peer=None if peer is None else int(peer),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"fault {dict(document)}: {error!r}; give rank, kind, factor, fromStep, steps") from error
        if fault.kind not in KINDS or not 1 <= fault.factor <= MAX_FACTOR:
            raise UsageError(f"fault {dict(document)}: kind is one of {', '.join(KINDS)}, factor 1 to {MAX_FACTOR}")
        if not (
            0 <= fault.rank <= MAX_NUMBER and 0 <= fault.from_step <= MAX_NUMBER and 1 <= fault.steps <= MAX_NUMBER
        ):
            raise UsageError(f"fault {dict(document)}: rank and fromStep are 0 or more, steps 1 or more, below 2^31")
        return fault

    def active(self, step: int) -> bool:
        """Return True if it acts in `step`."""
        return self.from_step <= step < self.from_step + self.steps


def commanded_faults(document: Mapping[str, Any]) -> list[InjectedFault]:
    """Parse the faults of a control document.

    Raises UsageError.
    """
    faults = document.get("faults", ())
    if not isinstance(faults, list | tuple):
        raise UsageError(f"faults is {type(faults).__name__}; give a list")
    return [InjectedFault.from_json(fault) for fault in faults]


class FaultPlan:
    """Faults of one rank, and the time each adds. Pure: the caller stalls."""

    def __init__(self, rank: int, faults: Iterable[InjectedFault]) -> None:
        self._rank = rank
        self._manifest = self._mine(faults)
        self._commanded: tuple[InjectedFault, ...] = ()
        self._active: tuple[InjectedFault, ...] = ()
        self._usual: dict[int, collections.deque[int]] = {
            kind: collections.deque(maxlen=HISTORY) for kind in PASS_KINDS
        }

    def command(self, faults: Iterable[InjectedFault]) -> None:
        """Replace the faults of the control document."""
        self._commanded = self._mine(faults)

    def begin_step(self, step: int) -> None:
        """Choose the faults that act in this step."""
        self._active = tuple(fault for fault in self._manifest + self._commanded if fault.active(step))

    @property
    def is_active(self) -> bool:
        """Return True if a fault acts in this step."""
        return bool(self._active)

    def observe(self, kind: int, own_ns: int) -> None:
        """Update the usual length with a span that no fault has stretched."""
        if kind in self._usual:
            self._usual[kind].append(own_ns)

    def usual_ns(self, kind: RecordKind) -> int:
        """Return the median of the last spans of this kind in ns; 0 without any yet."""
        history = self._usual[kind]
        return round(statistics.median(history)) if history else 0

    def compute_stall_ns(self, own_ns: int) -> int:
        """Return the ns to add to a compute span that took `own_ns` by itself."""
        return round(sum(factor - 1 for factor in self._factors("compute")) * own_ns)

    def host_stall_ns(self) -> int:
        """Return the ns to stall before a forward pass."""
        return round(sum(factor - 1 for factor in self._factors("host")) * self.usual_ns(RecordKind.FORWARD))

    def withhold_ns(self, source: int) -> int:
        """Return the ns to withhold a received message of rank `source`."""
        factors = self._factors("link", source)
        return round(sum(factor - 1 for factor in factors) * self.usual_ns(RecordKind.FORWARD))

    def _factors(self, kind: str, source: int | None = None) -> list[float]:
        return [
            fault.factor
            for fault in self._active
            if fault.kind == kind and (source is None or fault.peer in (None, source))
        ]

    def _mine(self, faults: Iterable[InjectedFault]) -> tuple[InjectedFault, ...]:
        return tuple(fault for fault in faults if fault.rank == self._rank)
