from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.hub.ingest.assembly import (
    PATIENCE_STEPS,
    REJOIN_STEPS,
    StepAssembler,
    split_by_step,
    with_ranks,
)
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RECORD, RecordKind


def spans(step: int, *, ended: bool = True, spans_before: int = 1) -> Any:
    out = np.zeros(spans_before + ended, RECORD)
    out["comm"], out["microbatch"], out["step"] = NO_COMM, NO_MICROBATCH, step
    out["kind"] = [RecordKind.FORWARD] * spans_before + [RecordKind.STEP] * ended
    out["start_ns"] = np.arange(len(out)) + step * 1000
    return out


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, Any]]]:
    """World, number of steps, and chunks (rank, records) whose order holds per rank only, cut anywhere."""
    world, steps = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    queues = []
    for _ in range(world):
        whole = np.concatenate([spans(step, spans_before=draw(st.integers(0, 3))) for step in range(steps)])
        splits = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=4)))
        queues.append([part for part in np.split(whole, splits) if len(part)])
    order = draw(st.permutations([rank for rank, queue in enumerate(queues) for _ in queue]))
    places = iter(order)
    chunks = [(rank, queues[rank].pop(0)) for rank in places]
    return world, steps, chunks


@given(deliveries())
def test_any_interleaving_gives_every_step_once_and_whole(given_chunks: tuple[int, int, list[tuple[int, Any]]]) -> None:
    world, steps, chunks = given_chunks
    assembler = StepAssembler(0, world)
    finished, late_rows = [], 0
    for rank, part in chunks:
        whole, late = assembler.add(rank, part)
        finished += whole
        late_rows += sum(len(rows) for _, rows in late)
    assert [step.step for step in finished] == list(range(steps))
    assert late_rows == 0
    assert all(step.complete for step in finished)
    assert sum(len(step.records) for step in finished) == sum(len(part) for _, part in chunks)
    for step in finished:
        keys = list(zip(step.records["rank"].tolist(), step.records["start_ns"].tolist(), strict=True))
        assert keys == sorted(keys)
    assert assembler.flush() == []


def test_step_waits_for_every_rank() -> None:
    assembler = StepAssembler(0, 2)
    assert assembler.add(0, spans(0))[0] == []
    assert assembler.add(1, spans(0, ended=False))[0] == []
    whole, _ = assembler.add(1, spans(0)[-1:])
    assert [step.step for step in whole] == [0]


def test_rank_that_moved_two_steps_on_is_not_waited_for() -> None:
    assembler = StepAssembler(0, 2)
    for step in range(3):
        assembler.add(0, spans(step))
    assert assembler.add(1, spans(1))[0] == []
    whole, _ = assembler.add(1, spans(2))
    assert [(step.step, step.complete) for step in whole] == [(0, False), (1, True), (2, True)]


def test_missing_ring_does_not_hold_memory_for_ever() -> None:
    assembler = StepAssembler(0, 2)
    finished = []
    for step in range(2 * PATIENCE_STEPS):
        finished += assembler.add(0, spans(step))[0]
    assert [step.step for step in finished] == list(range(2 * PATIENCE_STEPS))
    assert not any(step.complete for step in finished)
    assert assembler.absent == {1}


def test_rank_that_catches_up_is_waited_for_again() -> None:
    assembler = StepAssembler(0, 2)
    for step in range(PATIENCE_STEPS + 1):
        assembler.add(0, spans(step))
    assert assembler.absent == {1}
    near = PATIENCE_STEPS - REJOIN_STEPS
    late = [assembler.add(1, spans(step))[1] for step in range(near)]
    assert assembler.absent == {1}
    late.append(assembler.add(1, spans(near))[1])
    assert assembler.absent == set()
    assert sum(map(len, late)) == near + 1
    assert assembler.add(0, spans(PATIENCE_STEPS + 1))[0] == []
    for step in range(near + 1, PATIENCE_STEPS + 1):
        assert assembler.add(1, spans(step))[0] == []
    whole, _ = assembler.add(1, spans(PATIENCE_STEPS + 1))
    assert [(step.step, step.complete) for step in whole] == [(PATIENCE_STEPS + 1, True)]


def test_rank_that_is_back_but_always_last_is_waited_for_again() -> None:
    assembler = StepAssembler(0, 2)
    silent = 90
    for step in range(silent):
        assembler.add(0, spans(step))
    assert assembler.absent == {1}
    finished = []
    for step in range(silent, silent + 300):
        finished += assembler.add(0, spans(step))[0]
        finished += assembler.add(1, spans(step))[0]
    assert assembler.absent == set()
    assert [step.step for step in finished] == list(range(silent, silent + 300))
    assert [step.step for step in finished if not step.complete] == [silent]


def test_late_steps_count_as_progress_of_their_rank() -> None:
    assembler = StepAssembler(0, 2)
    for step in range(PATIENCE_STEPS + 1):
        assembler.add(0, spans(step))
    assembler.add(1, np.concatenate([spans(3), spans(4, ended=False)]))
    assert assembler.newest == {0: PATIENCE_STEPS, 1: 3}


def test_span_after_its_step_is_late() -> None:
    assembler = StepAssembler(0, 1)
    assembler.add(0, spans(0))
    whole, late = assembler.add(0, spans(0, ended=False))
    assert whole == []
    assert [(step, rows["rank"].tolist()) for step, rows in late] == [(0, [0])]


def test_lost_records_mark_the_steps_in_flight() -> None:
    assembler = StepAssembler(0, 2)
    assembler.add(1, spans(0))
    whole, _ = assembler.add(0, spans(0), lost=3)
    assert [(step.complete, step.lost) for step in whole] == [(False, 3)]


def test_flush_gives_what_is_left_as_incomplete() -> None:
    assembler = StepAssembler(4, 2)
    assembler.add(0, spans(7))
    assert [(step.attempt, step.step, step.complete) for step in assembler.flush()] == [(4, 7, False)]


def test_newest_step_of_each_rank() -> None:
    assembler = StepAssembler(0, 2)
    assembler.add(0, np.concatenate([spans(3), spans(4, ended=False)]))
    assert assembler.newest == {0: 3}


def in_step(assembler: StepAssembler, steps: range) -> list[int]:
    whole = []
    for step in steps:
        for rank in range(2):
            whole += assembler.add(rank, spans(step))[0]
    assert all(step.complete for step in whole)
    return [step.step for step in whole]


@pytest.mark.parametrize("total", [None, 1000])
@pytest.mark.parametrize("batch", ["alone", "in front of the next", "behind the last"])
def test_a_garbled_step_number_closes_no_step(total: int | None, batch: str) -> None:
    """Check that no step is closed as incomplete because every other rank is regarded as absent."""
    assembler = StepAssembler(0, 2, total)
    wild = spans(1 << 31, spans_before=0)
    assert in_step(assembler, range(5)) == list(range(5))
    chunks = {
        "alone": [wild, spans(5)],
        "in front of the next": [np.concatenate([wild, spans(5)])],
        "behind the last": [np.concatenate([spans(5), wild])],
    }[batch]
    for chunk in chunks:
        assert assembler.add(0, chunk)[0] == []
    whole, _ = assembler.add(1, spans(5))
    assert [(step.step, step.complete) for step in whole] == [(5, True)]
    assert in_step(assembler, range(6, 9)) == [6, 7, 8]
    assert (assembler.absent, assembler.garbled) == (frozenset(), 1)


def test_a_rank_that_truly_went_on_is_believed_with_its_next_records() -> None:
    """Send steps far ahead, as an agent does that was unreachable for long."""
    assembler = StepAssembler(0, 2)
    in_step(assembler, range(3))
    far = 3 + 10 * PATIENCE_STEPS
    assert assembler.add(0, spans(far))[0] == []
    assert assembler.newest[0] == 2
    assembler.add(0, spans(far + 1))
    assert (assembler.newest[0], assembler.garbled) == (far + 1, 0)
    assembler.add(1, spans(far))
    whole, _ = assembler.add(1, spans(far + 1))
    assert [(step.step, step.complete) for step in whole][-1] == (far + 1, True)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_split_keeps_every_record_in_order(steps: list[int]) -> None:
    records = np.zeros(len(steps), RECORD)
    records["step"], records["ordinal"] = steps, np.arange(len(steps))
    parts = dict(split_by_step(records))
    assert sorted(parts) == sorted(set(steps))
    for step, part in parts.items():
        assert part["ordinal"].tolist() == [place for place, value in enumerate(steps) if value == step]


def test_no_parts_are_no_rows() -> None:
    assert len(with_ranks([])) == 0
