"""Captured steps of a training: what ranks send of each is merged, and old steps are thinned out. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.layer_statistics import (
    PERTURBATION,
    RECORD,
    REPEATED,
    Records,
    SiteLayer,
    merge,
    perturbation_of,
    read_statistics,
    statistics_frame,
)

MAX_STEPS = 256
MAX_BYTES = 32 << 20
"""Most memory of all steps."""
MIN_STEPS = 8
"""Steps that are kept even if they need more memory."""
MAX_AWAITED = 8
"""Incomplete steps, the newest, that are not shown or removed because ranks may still send them."""
MAX_RANKS = 1 << 20
MAX_STEP = 1 << 53
MAX_FIELD = 1 << 31


@dataclasses.dataclass(kw_only=True, slots=True)
class CapturedStep:
    """Statistics of a step, of the ranks that have sent theirs."""

    step: int
    """Steps done with it."""
    attempt: int
    ranks: int
    """Number of ranks of the training."""
    received: set[int] = dataclasses.field(default_factory=set)
    dropped: set[int] = dataclasses.field(default_factory=set)
    """Ranks whose statistics were dropped, because their agent was too slow."""
    rows: dict[SiteLayer, Records] = dataclasses.field(default_factory=dict)
    """One record of each row."""
    perturbation: str | None = None
    """Digest of the recipe that was in force in it; None: none was."""
    is_repeated: bool = False
    """True for a second computation, after one whose loss or gradient norm was not finite."""

    @property
    def is_complete(self) -> bool:
        """Return True once all ranks have reported."""
        return len(self.received) == self.ranks

    @property
    def missing(self) -> list[int]:
        """Return the ranks of which there is nothing, the first 64."""
        missing = sorted({*range(self.ranks)} - self.received | self.dropped) if self.is_partial else []
        return missing[:64]

    @property
    def is_partial(self) -> bool:
        """Return True if statistics of some rank are missing."""
        return not self.is_complete or bool(self.dropped)

    @property
    def nbytes(self) -> int:
        """Return about how much memory it needs."""
        return len(self.rows) * (RECORD.itemsize + 200) + len(self.received) * 32

    def add(self, rows: list[SiteLayer], records: Records) -> None:
        """Merge the records of a rank."""
        for place, row in enumerate(rows):
            own = records[place : place + 1]
            if row in self.rows:
                merge(self.rows[row], own)
            else:
                self.rows[row] = own.copy()

    def frame(self) -> Frame:
        """Return the step as a stored frame."""
        records = np.concatenate([np.zeros(0, RECORD), *self.rows.values()])
        header = {"step": self.step, "attempt": self.attempt, "ranks": self.ranks}
        missing = {"received": sorted(self.received), "dropped": sorted(self.dropped)} if self.is_partial else {}
        perturbed: dict[str, Any] = {} if self.perturbation is None else {PERTURBATION: self.perturbation}
        if self.is_repeated:
            perturbed[REPEATED] = True
        return statistics_frame(
            FrameType.TRAINING_STATISTICS, header | missing | perturbed, list(self.rows), records.tobytes()
        )


class CaptureStore:
    """Captured steps of a job, a bounded number: when they are too many, the older ones become sparser, evenly.

    A step that is computed again after a restart replaces the earlier one.
    """

    def __init__(self, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES) -> None:
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._steps: dict[int, CapturedStep] = {}
        self._attempt = -1
        self._ended = False
        self.every: int | None = None
        """Steps from one capture to the next, as the ranks report it; None before."""
        self.thinned = False
        """True once a step was removed to save memory, until it is set back."""

    def take_rank(self, frame: Frame) -> None:
        """Take a TRAINING_RANK frame of a rank that begins. Raises ProtocolError."""
        self._ended = False
        self.every = _number(frame.header, "every", MAX_FIELD) or None

    def take(self, frame: Frame) -> CapturedStep | None:
        """Merge a TRAINING_STATISTICS frame of a rank; returns its step once all ranks have sent theirs.

        A frame that is received twice counts once. Raises ProtocolError or FrameError.
        """
        header = frame.header
        step, attempt = _number(header, "step", MAX_STEP), _number(header, "attempt", MAX_FIELD)
        ranks, rank = _number(header, "ranks", MAX_RANKS), _number(header, "rank", MAX_RANKS)
        rows, records = read_statistics(frame)
        perturbation = perturbation_of(header)
        if rank >= ranks:
            raise ProtocolError("bad-statistics", f"rank {rank} of {ranks} ranks")
        if attempt < self._attempt:
            return None
        self._ended = self._ended and attempt == self._attempt
        self._attempt = attempt
        found = self._steps.get(step)
        if found is None or found.attempt < attempt:
            found = self._steps[step] = CapturedStep(step=step, attempt=attempt, ranks=ranks)
            self._thin()
        if found.ranks != ranks:
            raise ProtocolError("bad-statistics", f"rank {rank} counts {ranks} ranks, others {found.ranks}")
        if rank in found.received:
            return None
        found.received.add(rank)
        if header.get("dropped"):
            found.dropped.add(rank)
        found.perturbation = found.perturbation or perturbation
        found.is_repeated |= header.get(REPEATED) is True
        found.add(rows, records)
        return found if found.is_complete else None

    def restore(self, frame: Frame) -> None:
        """Take a stored frame. Raises FrameError or ProtocolError."""
        header = frame.header
        ranks = _number(header, "ranks", MAX_RANKS)
        rows, records = read_statistics(frame)
        found = CapturedStep(
            step=_number(header, "step", MAX_STEP), attempt=_number(header, "attempt", MAX_FIELD), ranks=ranks
        )
        found.received = set(header.get("received", range(ranks)))
        found.dropped = set(header.get("dropped", ()))
        found.perturbation = perturbation_of(header)
        found.is_repeated = header.get(REPEATED) is True
        found.add(rows, records)
        self._steps[found.step] = found
        self._attempt = max(self._attempt, found.attempt)
        self._thin()

    def incomplete(self) -> list[CapturedStep]:
        """Return the steps of which some rank has sent nothing."""
        return [step for step in self._steps.values() if not step.is_complete]

    def end(self) -> None:
        """No rank sends more, until one does: incomplete steps are shown, too."""
        self._ended = True

    def shown(self) -> list[CapturedStep]:
        """Return the steps, ascending: complete ones, and incomplete ones of which no rank is likely to send more."""
        complete = [step.step for step in self._steps.values() if step.is_complete]
        newest, awaited = max(complete, default=-1), self._awaited()
        return [
            step
            for number, step in sorted(self._steps.items())
            if self._ended or number < newest or number not in awaited
        ]

    def find(self, number: int) -> CapturedStep | None:
        """Return a step that is shown."""
        return next((step for step in self.shown() if step.step == number), None)

    def all_steps(self) -> list[CapturedStep]:
        """Return all steps, ascending."""
        return [step for _, step in sorted(self._steps.items())]

    def _thin(self) -> None:
        """Remove an eighth of the steps if they are too many: those whose neighbours are the closest, and none of the
        newest quarter. The newest steps that ranks still send stay.
        """
        nbytes = sum(step.nbytes for step in self._steps.values())
        if len(self._steps) <= MIN_STEPS or (len(self._steps) <= self._max_steps and nbytes <= self._max_bytes):
            return
        numbers = sorted(self._steps)
        newest, awaited = len(numbers) // 4, self._awaited()
        for _ in range(max(1, len(numbers) // 8)):
            places = [at for at in range(1, len(numbers) - newest) if numbers[at] not in awaited]
            if not places:
                break
            place = min(places, key=lambda at: numbers[at + 1] - numbers[at - 1])
            del self._steps[numbers.pop(place)]
        self.thinned = True

    def _awaited(self) -> set[int]:
        """Return the newest incomplete steps: a rank that never sends its part holds up no more than these."""
        incomplete = [
            step.step for step in self._steps.values() if step.attempt == self._attempt and not step.is_complete
        ]
        return set(sorted(incomplete)[-MAX_AWAITED:])


def _number(header: Mapping[str, Any], name: str, most: int) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError("bad-statistics", f"{name} is {str(value)[:40]!r}; it is a number from 0 to {most}")
    return value
