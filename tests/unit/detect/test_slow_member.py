"""The slow member of a tensor-parallel group without replicas, whose members meet inside every pass."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.detect.localize import DetailedStep, waited_for
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import (
    RANK_RECORD,
    Cause,
    JobLayout,
    RankRecords,
    StepRecords,
    Verdict,
    VerdictState,
    VerdictSubject,
)
from megatronapp_common.trace import (
    DURATION_UNIT_NS,
    FIRST_COLLECTIVE_MASK,
    NO_COMM,
    NO_MICROBATCH,
    Flag,
    RecordKind,
    pass_ordinal,
)

Floats = NDArray[np.float64]
MICROBATCHES, MEETINGS = 4, 8
TRANSFER_S = 5e-5
BEGIN = 16
"""First step of a fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberFault:
    """A reason for which a member of the group is slow: factors on its work, or a kernel after each pass."""

    member: int
    passes: float = 1.0
    optimizer: float = 1.0
    after: float = 0.0


class GroupRun:
    """Steps of a group of `size` ranks on devices with a common clock; `optimizers`: their usual factors."""

    def __init__(self, size: int, seed: int, optimizers: Sequence[float] = ()) -> None:
        self.size = size
        self.passes = self.optimizer = 1.0
        """Factors of all members, as of devices that have become warm."""
        self._optimizers = np.array(optimizers or [1.0] * size)
        self._rng = np.random.default_rng(seed)
        self._now = np.full(size, 1000.0)
        self._rows: list[np.void] = []

    def step(
        self, number: int, fault: MemberFault | None, *, in_detail: bool = False, pause: tuple[int, float] = (0, 0.0)
    ) -> StepRecords:
        """Record a step; with all collectives if it is recorded in detail, otherwise with the first of each pass.

        `pause`: a member that pauses for some seconds before the first pass.
        """
        self._rows = []
        begin = self._now.copy()
        self._now[pause[0]] += pause[1]
        for microbatch in range(MICROBATCHES):
            for kind, length_s in ((RecordKind.FORWARD, 0.015), (RecordKind.BACKWARD, 0.03)):
                self._run_pass(kind, length_s, microbatch, fault, in_detail=in_detail)
        self._now = np.full(self.size, self._now.max())
        factor = self._factors(fault.optimizer if fault else 1.0, fault)
        self._add(
            RecordKind.OPTIMIZER,
            self._now,
            self._now + 0.008 * self.optimizer * self._optimizers * factor * self._noise(),
        )
        self._now = np.full(self.size, self._now.max() + 0.02)
        self._add(RecordKind.STEP, begin, self._now)
        records = np.array(self._rows, RANK_RECORD)
        records = records[np.lexsort((records["start_ns"], records["rank"]))]
        return StepRecords(attempt=0, step=number, records=records, comms={}, real_time_s=float(self._now[0]))

    def _run_pass(
        self, kind: RecordKind, length_s: float, microbatch: int, fault: MemberFault | None, *, in_detail: bool
    ) -> None:
        begin = self._now
        factor = self._factors(fault.passes if fault else 1.0, fault)
        for number in range(MEETINGS):
            arrive = self._now + self.passes * length_s / MEETINGS * factor * self._noise()
            self._now = np.full(self.size, arrive.max() + TRANSFER_S)
            if number == 0 or in_detail:
                ordinal = pass_ordinal(kind, 0, microbatch, number)
                self._add(RecordKind.TP_REDUCE, arrive, self._now, microbatch=microbatch, ordinal=ordinal)
        self._now = self._now + length_s * (self._factors(1.0 + (fault.after if fault else 0.0), fault) - 1.0)
        self._add(kind, begin, self._now, microbatch=microbatch)

    def _factors(self, factor: float, fault: MemberFault | None) -> Floats:
        factors = np.ones(self.size)
        if fault is not None:
            factors[fault.member] = factor
        return factors

    def _noise(self) -> Floats:
        return self._rng.uniform(0.998, 1.002, self.size)

    def _add(
        self,
        kind: RecordKind,
        start_s: Floats,
        end_s: Floats,
        *,
        microbatch: int = NO_MICROBATCH,
        ordinal: int = 0,
    ) -> None:
        for rank, (start, end) in enumerate(zip(start_s, end_s, strict=True)):
            row: np.void = np.zeros(1, RANK_RECORD)[0]
            row["rank"], row["kind"], row["microbatch"], row["ordinal"] = rank, kind, microbatch, ordinal
            row["comm"], row["flags"] = NO_COMM, Flag.DEVICE_CLOCK
            row["start_ns"], row["duration"] = round(start * 1e9), round((end - start) * 1e9) // DURATION_UNIT_NS
            self._rows.append(row)


def named(
    size: int,
    fault: Callable[[int], MemberFault | None],
    *,
    seed: int = 1,
    steps: int = 32,
    details: range = range(0),
    optimizers: Sequence[float] = (),
    pauses: Mapping[int, tuple[int, float]] | None = None,
) -> list[tuple[VerdictSubject, Cause]]:
    """Return what is confirmed after the last step; `fault` gives that of each step, `details` those with details.

    `pauses`: members that pause once, by step.
    """
    detector, run = Detector(JobLayout.grid(tp=size)), GroupRun(size, seed, optimizers)
    newest: dict[str, Verdict] = {}
    for number in range(steps):
        pause = (pauses or {}).get(number, (0, 0.0))
        step = run.step(number, fault(number), in_detail=number in details, pause=pause)
        newest |= {verdict.id: verdict for verdict in detector.observe(step)}
    return [(each.subject, each.cause) for each in newest.values() if each.state is VerdictState.CONFIRMED]


SIGNS: dict[str, tuple[Callable[[int], MemberFault], range]] = {
    "its optimizer is as slow": (lambda member: MemberFault(member=member, passes=1.6, optimizer=1.7), range(0)),
    "it leaves passes late": (lambda member: MemberFault(member=member, after=0.1), range(0)),
    "others wait for it": (lambda member: MemberFault(member=member, passes=1.1), range(BEGIN + 8, BEGIN + 11)),
}
"""A fault of a member, and the steps with details."""


@pytest.mark.parametrize("sign", SIGNS)
@given(size=st.sampled_from([2, 4]), member=st.integers(0, 3), seed=st.integers(0, 1000))
def test_the_slow_member_is_named(sign: str, size: int, member: int, seed: int) -> None:
    fault_of, details = SIGNS[sign]
    fault = fault_of(member % size)
    found = named(size, lambda step: fault if step >= BEGIN else None, seed=seed, details=details)
    assert [(subject.ranks, cause) for subject, cause in found] == [((fault.member,), Cause.COMPUTE)]


def always(fault: MemberFault) -> Callable[[int], MemberFault | None]:
    """Return a fault that begins with step BEGIN."""
    return lambda step: fault if step >= BEGIN else None


@pytest.mark.parametrize("size", [4, 8])
def test_a_pause_of_another_member_in_a_step_with_details_is_no_sign(size: int) -> None:
    fault, details = always(MemberFault(member=0, passes=1.06)), range(BEGIN + 8, BEGIN + 11)
    ((subject, _),) = named(size, fault, details=details, pauses={details[-1]: (1, 0.04)})
    assert subject.ranks == (0,)


@pytest.mark.parametrize("details", [range(0), range(BEGIN + 8, BEGIN + 11)])
def test_a_member_whose_optimizer_always_takes_longer_is_healthy(details: range) -> None:
    fault = always(MemberFault(member=0, passes=1.1))
    ((subject, _),) = named(4, fault, details=details, optimizers=(1.0, 1.0, 1.2, 1.0))
    assert subject.ranks == ((0,) if details else (0, 1, 2, 3))


def test_a_member_is_not_named_because_the_optimizer_of_the_other_became_shorter() -> None:
    ((subject, _),) = named(2, always(MemberFault(member=1, passes=1.1, optimizer=0.8)))
    assert subject.ranks == (0, 1)


def test_a_long_window_with_details_shows_the_slow_member() -> None:
    fault = always(MemberFault(member=1, passes=1.1))
    ((subject, _),) = named(2, fault, steps=BEGIN + 40, details=range(BEGIN + 8, BEGIN + 28))
    assert subject.ranks == (1,)


def records_with_details(*, keep: Callable[[RankRecords], NDArray[np.bool_]]) -> DetailedStep:
    """Return the records of a step with details of four ranks, of which the last is slow, that are kept."""
    view = GroupRun(4, 1).step(0, MemberFault(member=3, passes=1.2), in_detail=True)
    return DetailedStep.of(MatchedStep(dataclasses.replace(view, records=view.records[keep(view.records)])))


def test_waits_are_unknown_where_a_part_of_the_group_has_no_records() -> None:
    def is_collective(records: RankRecords) -> NDArray[np.bool_]:
        return np.array(records["kind"] == RecordKind.TP_REDUCE)

    def is_first(records: RankRecords) -> NDArray[np.bool_]:
        return np.array((records["ordinal"] & FIRST_COLLECTIVE_MASK) == 0)

    whole = waited_for(records_with_details(keep=lambda records: np.ones(len(records), np.bool_)), (0, 1, 2, 3))
    assert whole is not None
    assert whole.argmax() == 3
    assert whole[3] == pytest.approx(0.2 / 1.2, rel=0.1)
    of_two = records_with_details(
        keep=lambda records: ~is_collective(records) | is_first(records) | (records["rank"] < 2)
    )
    assert waited_for(of_two, (0, 1, 2, 3)) is None
    lost = records_with_details(keep=lambda records: ~is_collective(records) | (np.arange(len(records)) % 3 > 0))
    assert waited_for(lost, (0, 1, 2, 3)) is None
    assert waited_for(records_with_details(keep=lambda records: records["rank"] > 9), (0, 1)) is None


def test_without_details_only_the_group_is_named_for_passes_of_which_all_parts_are_slow() -> None:
    fault = MemberFault(member=1, passes=1.1)
    ((subject, _),) = named(2, lambda step: fault if step >= BEGIN else None)
    assert subject.ranks == (0, 1)


def test_details_before_a_fault_are_no_sign() -> None:
    """Rank 0 is slow in steps with details, which are no fault; then rank 1 is, without details."""
    early, late = MemberFault(member=0, passes=1.1), MemberFault(member=1, passes=1.1)
    details = range(BEGIN - 4, BEGIN - 1)
    ((subject, _),) = named(
        2, lambda step: late if step >= BEGIN else early if step in details else None, details=details
    )
    assert subject.ranks == (0, 1)


def test_the_signs_of_an_earlier_fault_are_forgotten() -> None:
    first, second = MemberFault(member=0, after=0.1), MemberFault(member=1, passes=1.1)
    found = named(
        2,
        lambda step: first if BEGIN <= step < BEGIN + 8 else second if step >= BEGIN + 40 else None,
        steps=BEGIN + 60,
    )
    assert [subject.ranks for subject, _ in found] == [(0, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_faults_in_devices_that_have_become_slower_are_named_at_their_sizes(seed: int) -> None:
    """After a first fault all passes stay 2 % longer, and optimizers 6 % shorter, as devices did that it had heated."""
    faults = {
        range(20, 36): MemberFault(member=1, passes=1.9, optimizer=1.8),
        range(80, 105): MemberFault(member=0, passes=1.11, optimizer=1.19),
        range(130, 155): MemberFault(member=1, passes=1.3, optimizer=1.5),
        range(180, 205): MemberFault(member=0, after=0.1),
    }
    detector, run = Detector(JobLayout.grid(tp=2)), GroupRun(2, seed)
    newest: dict[str, Verdict] = {}
    for number in range(230):
        if number == 20:
            run.passes, run.optimizer = 1.02, 0.94
        fault = next((fault for steps, fault in faults.items() if number in steps), None)
        newest |= {verdict.id: verdict for verdict in detector.observe(run.step(number, fault))}
        ended = next((fault for steps, fault in faults.items() if number == steps[-1]), None)
        if ended is not None:
            (found,) = [verdict for verdict in newest.values() if verdict.state is VerdictState.CONFIRMED]
            assert found.subject.ranks == (ended.member,), number
            assert found.slowdown == pytest.approx(1.02 * (ended.passes + ended.after), abs=0.025)
        elif number >= 120 and number % 50 in range(20, 30):  # 15 steps after a fault its verdict has been cleared
            named = [verdict for verdict in newest.values() if verdict.state is VerdictState.CONFIRMED]
            assert all(len(verdict.subject.ranks) == 2 for verdict in named), number
