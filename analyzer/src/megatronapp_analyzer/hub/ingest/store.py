"""Finished steps in bounded memory: the newest in full, all of them as digests."""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.assembly import in_order
from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.thinning_list import ThinningList
from megatronapp_analyzer.model import RankRecords, StepRecords

StepKey = tuple[int, int]
"""Key (attempt, step): step numbers repeat after a resume."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """Limits of the memory that the hub uses."""

    full_steps: int = 2000
    """Number of steps held with all their spans."""
    full_bytes: int = 256 << 20
    """Bytes of spans held at most; takes precedence over full_steps."""
    digest_steps: int = 20_000
    """Number of digests held; older ones are thinned out."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredStep:
    """A step with all its spans, and the communicators and clocks to read them with."""

    view: StepRecords
    digest: StepDigest
    offsets_ns: NDArray[np.int64]
    """Real time minus the monotonic clock, per rank."""
    aligned: bool = True
    """False until the clocks at this step are known; `offsets_ns` are then those of a step before, or of the nodes."""

    @property
    def key(self) -> StepKey:
        """Return the key (attempt, step)."""
        return self.view.attempt, self.view.step


class StepStore(Protocol):
    """Finished steps of all attempts, in any storage. Values handed out are never changed afterwards."""

    @property
    def full_bytes(self) -> int: ...

    @property
    def full_steps(self) -> int: ...

    def add(self, step: StoredStep, *, with_digest: bool = True) -> None:
        """Store a step; without its digest if that was added before."""

    def add_digest(self, digest: StepDigest) -> None:
        """Store the digest of a step without the step, as after a restart."""

    def add_late(self, attempt: int, step: int, rows: RankRecords) -> bool:
        """Add spans received after their step was finished, such as a checkpoint's.

        False if the step is not stored in full.
        """
        ...

    def align(self, key: StepKey, offsets_ns: NDArray[np.int64]) -> None:
        """Replace the clocks of a step; does nothing if it is not stored in full."""

    def find(self, step: int | None, attempt: int | None) -> StoredStep | None:
        """Return the step of that attempt, or of the newest that has it; the newest step if None."""

    def newest(self, count: int) -> list[StoredStep]:
        """Return the newest `count` steps stored in full, oldest first."""
        ...

    def select(self, first: int | None, last: int | None, *, newest: int) -> list[StoredStep]:
        """Return the steps in full with a number in [first, last], oldest first; only the `newest` if first is None."""
        ...

    def digests(self, first: int | None, last: int | None) -> Iterator[StepDigest]:
        """Return the digests whose step is in [first, last], oldest first."""
        ...

    def recent(self, count: int) -> list[StepDigest]:
        """Return the newest `count` digests, oldest first."""
        ...


class MemoryStepStore:
    """Step store in bounded memory: the newest steps in full, thinned digests of all."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._full: OrderedDict[StepKey, StoredStep] = OrderedDict()
        self._full_bytes = 0
        self._digests: ThinningList[StepDigest] = ThinningList(limits.digest_steps)

    def add(self, step: StoredStep, *, with_digest: bool = True) -> None:
        """Store a step; the oldest full steps beyond the limits are deleted."""
        if step.key in self._full:
            self._full_bytes -= self._full.pop(step.key).view.records.nbytes
        self._full[step.key] = step
        self._full_bytes += step.view.records.nbytes
        if with_digest:
            self._digests.append(step.digest)
        while len(self._full) > self._limits.full_steps or self._full_bytes > self._limits.full_bytes:
            _, oldest = self._full.popitem(last=False)
            self._full_bytes -= oldest.view.records.nbytes

    def add_digest(self, digest: StepDigest) -> None:
        self._digests.append(digest)

    def add_late(self, attempt: int, step: int, rows: RankRecords) -> bool:
        held = self._full.get((attempt, step))
        if held is None:
            return False
        records = in_order(np.concatenate([held.view.records, rows]))
        self._full_bytes += records.nbytes - held.view.records.nbytes
        self._full[held.key] = dataclasses.replace(held, view=dataclasses.replace(held.view, records=records))
        return True

    def align(self, key: StepKey, offsets_ns: NDArray[np.int64]) -> None:
        if (step := self._full.get(key)) is not None:
            self._full[key] = dataclasses.replace(step, offsets_ns=offsets_ns, aligned=True)

    @property
    def full_bytes(self) -> int:
        """Return the bytes of spans held."""
        return self._full_bytes

    @property
    def full_steps(self) -> int:
        """Return the number of steps held in full."""
        return len(self._full)

    def find(self, step: int | None, attempt: int | None) -> StoredStep | None:
        for key in reversed(self._full):
            if step in (None, key[1]) and attempt in (None, key[0]):
                return self._full[key]
        return None

    def newest(self, count: int) -> list[StoredStep]:
        return list(itertools.islice(reversed(self._full.values()), count))[::-1]

    def select(self, first: int | None, last: int | None, *, newest: int) -> list[StoredStep]:
        chosen = [held for held in self._full.values() if in_range(held.view.step, first, last)]
        return chosen[-newest:] if first is None else chosen

    def digests(self, first: int | None, last: int | None) -> Iterator[StepDigest]:
        return (digest for digest in self._digests if in_range(digest.step, first, last))

    def recent(self, count: int) -> list[StepDigest]:
        return self._digests.tail(count)


def in_range(value: int, first: int | None, last: int | None) -> bool:
    """Return true if `value` is in [first, last], where None is open."""
    return (first is None or value >= first) and (last is None or value <= last)
