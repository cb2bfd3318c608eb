"""Tensor-parallel groups whose first rank alone reads data: what the others wait for then is no fault of theirs."""

import numpy as np
import pytest
from numpy.typing import NDArray

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import RANK_RECORD, Cause, JobLayout, StepRecords, VerdictState
from megatronapp_common.trace import DURATION_UNIT_NS, NO_COMM, NO_MICROBATCH, Flag, RecordKind

LAYOUT = JobLayout.grid(tp=2)
MICROBATCHES = 8


def row(
    rank: int, kind: RecordKind, begin_s: float, end_s: float, *, microbatch: int = NO_MICROBATCH, flags: int = 0
) -> np.void:
    out: np.void = np.zeros(1, RANK_RECORD)[0]
    out["rank"], out["kind"], out["microbatch"], out["flags"], out["comm"] = rank, kind, microbatch, flags, NO_COMM
    out["start_ns"], out["duration"] = round(begin_s * 1e9), round((end_s - begin_s) * 1e9) // DURATION_UNIT_NS
    return out


def recorded_step(number: int, read_s: float, stall_s: float, rng: np.random.Generator) -> StepRecords:
    """Record a step in which rank 0 reads each microbatch in `read_s` and hands it to rank 1, which stalls before."""
    begin = now = 1000.0 + number
    rows: list[np.void] = []
    for microbatch in range(MICROBATCHES):
        read = now + read_s * rng.uniform(0.95, 1.05)
        rows.append(row(0, RecordKind.DATA, now, read, microbatch=microbatch))
        rows.append(row(1, RecordKind.DATA, now + stall_s, now + stall_s + 3e-5, microbatch=microbatch))
        ready = max(read, now + stall_s + 3e-5) + 1e-5
        for kind, length in ((RecordKind.FORWARD, 0.015), (RecordKind.BACKWARD, 0.03)):
            end = ready + length * rng.uniform(0.999, 1.001)
            rows += [row(rank, kind, ready, end, microbatch=microbatch, flags=Flag.DEVICE_CLOCK) for rank in (0, 1)]
            ready = end
        now = end + 1e-5
    rows += [row(rank, RecordKind.STEP, begin, now) for rank in (0, 1)]
    records: NDArray[np.void] = np.array(rows, RANK_RECORD)
    records = records[np.lexsort((records["start_ns"], records["rank"]))]
    return StepRecords(attempt=0, step=number, records=records, comms={}, real_time_s=now)


def found(read_s: tuple[float, float], stall_s: float = 0.0) -> set[tuple[tuple[int, ...], Cause]]:
    """Judge 40 steps; return what is named if reading, or rank 1, takes as long as this from the twentieth on."""
    detector, rng = Detector(LAYOUT), np.random.default_rng(1)
    named = set()
    for number in range(40):
        late = number >= 20
        step = recorded_step(number, read_s[late], stall_s * late, rng)
        named |= {
            (verdict.subject.ranks, verdict.cause)
            for verdict in detector.observe(step)
            if verdict.state is VerdictState.CONFIRMED
        }
    return named


@pytest.mark.parametrize("read_s", [1.1e-3, 8e-3])
def test_reading_for_others_is_no_fault(read_s: float) -> None:
    assert found((read_s, read_s)) == set()


def test_who_waits_for_a_slow_loader_of_another_does_not_stall() -> None:
    assert found((1.1e-3, 8e-3)) == {((0,), Cause.DATA)}


def test_a_host_that_stalls_before_the_data_of_others_is_named() -> None:
    assert found((1.1e-3, 1.1e-3), stall_s=8e-3) == {((1,), Cause.HOST)}


def test_waits_for_data_of_others_have_the_late_rank_as_their_cause() -> None:
    """The wait lies after the record of the rank that has asked for data, not in it."""
    step = recorded_step(0, 1.1e-3, 8e-3, np.random.default_rng(1))
    waits = attribute(build(step, unit_of_rank=np.zeros(2, np.int64)))
    assert waits.imposed_by((1,))[0] == pytest.approx(MICROBATCHES * 8e-3, rel=0.15)
