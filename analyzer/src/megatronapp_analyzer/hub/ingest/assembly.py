"""Assembly of the records of all ranks of one attempt into steps. Pure: no clock, no files.

A step is whole once every rank has delivered its STEP record. A rank that has reached the step after the next has lost
it and is not waited for; nor is any rank once the first rank is PATIENCE_STEPS ahead, so that memory stays bounded when
a ring is missing. A rank that made the others wait that long is absent, and is waited for again once it is within
REJOIN_STEPS of the first: it need not overtake another rank, and what it then still lacks is well within the patience.

A step number is believed if the job can have it and it is within PATIENCE_STEPS of the newest known one. One that is
further ahead waits until the rank's next records are of that step or later ones; if they are not, it was garbled and is
dropped, before it would make all other ranks absent.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.model import RANK_RECORD, RankRecords
from megatronapp_common.trace import RecordKind
from megatronapp_native import merge_by_rank, summarize_frame

MOVED_ON_STEPS = 2
PATIENCE_STEPS = 64
REJOIN_STEPS = PATIENCE_STEPS // 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AssembledStep:
    """A step's records. `complete`: every rank has delivered its STEP record and no ring lost any meanwhile."""

    attempt: int
    step: int
    records: RankRecords
    complete: bool
    lost: int


@dataclasses.dataclass(slots=True)
class _PendingStep:
    parts: list[tuple[int, NDArray[np.void]]] = dataclasses.field(default_factory=list)
    ended: set[int] = dataclasses.field(default_factory=set)
    lost: int = 0


class FrameSummary(NamedTuple):
    """Steps and kinds of the records of a frame, which has one or more."""

    least_step: int
    greatest_step: int
    kinds: int
    """A bit for each kind; those from 63 on have the last."""

    @classmethod
    def of(cls, records: NDArray[np.void]) -> "FrameSummary":
        """Summarize records by one native call: most frames need no more."""
        return cls(*summarize_frame(np.ascontiguousarray(records).view(np.uint8)))

    @property
    def has_samples(self) -> bool:
        """Return true if not all records are spans."""
        return bool(self.kinds >> RecordKind.METRIC)

    @property
    def has_step_end(self) -> bool:
        """Return true if a STEP record is among them."""
        return bool(self.kinds >> RecordKind.STEP & 1)


def split_by_step(records: NDArray[np.void]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Yield the records of each step, in the order in which they were received."""
    steps = records["step"]
    for step in np.unique(steps):
        yield int(step), records[steps == step]


def with_ranks(parts: Sequence[tuple[int, NDArray[np.void]]]) -> RankRecords:
    """Return RECORD rows of several ranks as RANK_RECORD rows, sorted by rank and start."""
    rows = np.empty(sum(len(records) for _, records in parts), RANK_RECORD)
    merge_by_rank(
        [(rank, np.ascontiguousarray(records).view(np.uint8)) for rank, records in parts], rows.view(np.uint8)
    )
    return rows


def in_order(rows: RankRecords) -> RankRecords:
    """Return the rows sorted by rank, then start."""
    ordered: RankRecords = rows[np.lexsort((rows["start_ns"], rows["rank"]))]
    return ordered


class StepAssembler:
    """Collector of the records of one attempt until steps are whole; returns steps in order of their numbers."""

    def __init__(self, attempt: int, world: int, total_steps: int | None = None) -> None:
        """Begin an attempt. `total_steps`: the job has no step after this one; None if unknown."""
        self._attempt = attempt
        self._world = world
        self._total_steps = total_steps
        self._doubtful: dict[int, list[NDArray[np.void]]] = {}
        """Records of each rank whose steps are far ahead of all."""
        self.garbled = 0
        """Number of records whose steps were not believed."""
        self._pending: dict[int, _PendingStep] = {}
        self._newest: dict[int, int] = {}
        self._front = 0
        """Newest finished step of the first rank."""
        self._closed_below = 0
        self._absent: set[int] = set()
        self._oldest: int | None = None
        """Pending step that is handed out next."""
        self._awaited: set[int] = set()
        """Ranks that `_oldest` waits for. A frame of a rank changes no other one's part in it."""

    @property
    def absent(self) -> frozenset[int]:
        """Return the ranks that are not waited for, because their steps never arrived or no longer arrive."""
        return frozenset(self._absent)

    @property
    def newest(self) -> dict[int, int]:
        """Return the newest finished step of each rank."""
        return dict(self._newest)

    def add(
        self, rank: int, records: NDArray[np.void], *, lost: int = 0, found: FrameSummary | None = None
    ) -> tuple[list[AssembledStep], list[tuple[int, RankRecords]]]:
        """Take span records of one rank.

        Returns the steps that became whole, and the late rows (step, rows) of steps that were handed out before.
        `lost` counts records that the ring lost just before these; `found` is the summary of the records, if known.
        """
        late = []
        for step, part, ended in self._parts(rank, records, found):
            if ended:
                self._newest[rank] = max(step, self._newest.get(rank, step))
                self._front = max(self._front, step)
            if step < self._closed_below:
                late.append((step, with_ranks([(rank, part)])))
                continue
            pending = self._pending.setdefault(step, _PendingStep())
            pending.parts.append((rank, part))
            if ended:
                pending.ended.add(rank)
        if rank in self._absent and self._newest.get(rank, -1) >= self._front - REJOIN_STEPS:
            self._absent.discard(rank)
            self._oldest = None
        if lost:
            self._note_loss(lost)
        return list(self._whole(rank)), late

    def _parts(
        self, rank: int, records: NDArray[np.void], found: FrameSummary | None
    ) -> Iterator[tuple[int, NDArray[np.void], bool]]:
        """Yield the believed records of each step, and whether they end it."""
        if not len(records) and rank not in self._doubtful:
            return
        if len(records):
            found = found or FrameSummary.of(records)
            if self._is_plain(rank, found):
                yield found.least_step, records, found.has_step_end
                return
        for step, part in split_by_step(self._believed(rank, records)):
            yield step, part, bool((part["kind"] == RecordKind.STEP).any())

    def _is_plain(self, rank: int, found: FrameSummary) -> bool:
        """Return true if records are all of one step, which is believed as it is."""
        if found.least_step != found.greatest_step or rank in self._doubtful:
            return False
        if self._total_steps is not None and found.greatest_step > self._total_steps:
            return False
        return not self._newest or found.greatest_step <= max(self._front, self._newest.get(rank, 0)) + PATIENCE_STEPS

    def _believed(self, rank: int, records: NDArray[np.void]) -> NDArray[np.void]:
        """Return the records without those of garbled steps, and with those that waited for the rank's next ones."""
        if self._total_steps is not None:
            possible = records["step"] <= self._total_steps
            self.garbled += len(records) - int(possible.sum())
            records = records[possible]
        waiting = self._doubtful.pop(rank, None)
        if not len(records) or not self._newest:
            return records
        bound = max(self._front, self._newest.get(rank, 0)) + PATIENCE_STEPS
        if waiting is not None and records["step"][0] >= waiting[0]["step"].min():
            return np.concatenate([*waiting, records])
        self.garbled += sum(map(len, waiting or ()))
        ahead = records["step"] > bound
        if not ahead.any():
            return records
        later = np.minimum.accumulate(records["step"][::-1])[::-1]
        doubtful = records[ahead & (later > bound)]
        self.garbled += int(ahead.sum()) - len(doubtful)
        if len(doubtful):
            self._doubtful[rank] = [doubtful]
        return records[~ahead]

    def flush(self) -> list[AssembledStep]:
        """Return the steps that are left, as incomplete ones; for the end of an attempt."""
        return [self._hand_out(step) for step in sorted(self._pending)]

    def _note_loss(self, lost: int) -> None:
        for pending in self._pending.values():
            pending.lost += lost

    def _whole(self, rank: int) -> Iterator[AssembledStep]:
        """Hand out the steps that are whole, after a frame of `rank`."""
        while self._pending:
            step = min(self._pending)
            if step != self._oldest:
                self._oldest = step
                self._awaited = {other for other in range(self._world) if self._is_awaited(step, other)}
            elif not self._is_awaited(step, rank):
                self._awaited.discard(rank)
            if self._front >= step + PATIENCE_STEPS:
                self._absent |= {other for other in range(self._world) if self._newest.get(other, -1) < step}
            elif self._awaited:
                return
            yield self._hand_out(step)

    def _is_awaited(self, step: int, rank: int) -> bool:
        """Return true if a step is not whole without further records of a rank."""
        moved_on = self._newest.get(rank, -1) >= step + MOVED_ON_STEPS
        return not moved_on and rank not in self._absent and rank not in self._pending[step].ended

    def _hand_out(self, step: int) -> AssembledStep:
        pending = self._pending.pop(step)
        self._oldest = None
        self._closed_below = max(self._closed_below, step + 1)
        return AssembledStep(
            attempt=self._attempt,
            step=step,
            records=with_ranks(pending.parts),
            complete=len(pending.ended) == self._world and not pending.lost,
            lost=pending.lost,
        )
