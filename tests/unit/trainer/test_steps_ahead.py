"""Decode steps that the scheduler plans before the tokens of the step before are read. Calls no torch."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.inference.request import ComparedBranch, GenerationRequest
from megatronapp_trainer.inference.scheduler import MOST_AHEAD, ScheduledStep, Scheduler


def scheduler_of() -> Scheduler:
    return Scheduler(slots=2, prefill_chunk=4, most_waiting=100)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0, 0.7])), min_size=1, max_size=6))
def test_a_step_planned_ahead_is_the_next_step(requests: list[tuple[int, int, float]]) -> None:
    line, ahead = scheduler_of(), None
    for index, (length, count, temperature) in enumerate(requests):
        prompt = tuple(range(length))
        line.add(GenerationRequest(id=str(index), prompt=prompt, max_new_tokens=count, temperature=temperature))
    while line.waiting or line.running:
        while line.next_admissible():
            line.admit(None)
        planned = line.plan()
        assert planned is not None
        if ahead is not None:
            segments = tuple(dataclasses.replace(segment, tokens=(0,)) for segment in planned.plan.segments)
            assert ahead.plan == dataclasses.replace(planned.plan, segments=segments, is_ahead=True, reads_chosen=True)
            assert [row.sequence for row in ahead.rows] == [row.sequence for row in planned.rows]
        ahead = line.plan_ahead(planned)
        assert ahead is None or planned.plan.decode
        advance(planned)
        over = [sequence for sequence in line.running if sequence.generated and sequence.stopped(frozenset())]
        assert ahead is None or not over
        assert ahead is not None or over or line.next_admissible() or not planned.plan.decode or prefills(line)
        for sequence in over:
            line.release(sequence)


@pytest.mark.parametrize("is_forced", [True, False])
def test_branches_of_a_comparison_are_launched_before_the_other_is_read(*, is_forced: bool) -> None:
    line = scheduler_of()
    line.add(
        *(
            GenerationRequest(
                id=name,
                prompt=(1, 2),
                max_new_tokens=4,
                group="pair",
                compared=ComparedBranch(name="pair", number=number, is_forced=is_forced and number > 0),
            )
            for number, name in enumerate("ab")
        )
    )
    while line.next_admissible():
        line.admit(None)
    ahead = None
    for index in range(4):
        for name in "ab":
            planned = ahead or line.plan()
            assert planned is not None
            (sequence,), (compared,) = planned.sequences, planned.plan.compared
            assert (sequence.request.id, compared.index) == (name, index)
            was_read = name == "a" or (ahead is None and index == 0)
            assert compared.token == (None if name == "a" or not was_read else 50)
            ahead = line.plan_ahead(planned)
            launches = index > 0 and (name == "a" or (is_forced and index < 3))
            assert (ahead is not None) == launches
            sequence.read = planned.plan.segments[0].end
            sequence.generated.append(sequence.next_token(50))
            sequence.ended = sequence.stopped(frozenset())
            if sequence.ended is not None:
                line.release(sequence)
    assert line.running == []


def test_a_step_ahead_gives_the_background_no_more_steps() -> None:
    line, ahead, counts = scheduler_of(), None, {"background": 0, "user": 0}
    for name in counts:
        line.add(GenerationRequest(id=name, prompt=(1,), max_new_tokens=500, is_background=name == "background"))
        line.admit(None)
        if name == "background":
            advance(line.plan())
    for _ in range(100):
        planned = ahead or line.plan()
        assert planned is not None
        ahead = line.plan_ahead(planned)
        advance(planned)
        for sequence in planned.sequences:
            counts[sequence.request.id] += 1
    assert counts["background"] <= 100 // MOST_AHEAD


def advance(planned: ScheduledStep | None) -> None:
    """Bring the sequences up to date with a step."""
    assert planned is not None
    for sequence, segment in zip(planned.sequences, planned.plan.segments, strict=True):
        sequence.read = segment.end
    for row in planned.rows:
        row.sequence.generated.append(50)


def prefills(line: Scheduler) -> bool:
    """Return true if some sequence reads its prompt."""
    return any(sequence.is_prefilling for sequence in line.running)
