"""The choice of the plan by times: plans against the order that is never left, and advice on other placements."""

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.choice import MeasuredTimes
from megatronapp_trainer.pipeline.planning.orders import zero_bubble
from megatronapp_trainer.pipeline.planning.other_placements import MOST_CHUNKS, other_placements, times_in
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, TaskKind
from megatronapp_trainer.pipeline.task_clocks import StepTimes, TaskTime


def placements() -> st.SearchStrategy[Placement]:
    loops = st.builds(Placement, st.integers(2, 5), st.integers(1, 3))
    return loops | st.integers(2, 5).map(lambda ranks: Placement(ranks, 2, Shape.VEE))


def exact(placement: Placement, body: float, end: float, slower: dict[int, float]) -> MeasuredTimes:
    """Times of a model whose stages are equal but for its end, and whose ranks may be slow."""
    seconds = {}
    for kind in TaskKind:
        for rank in range(placement.ranks):
            for chunk in range(placement.chunks):
                last = placement.stage(rank, chunk) == placement.stages - 1
                value = slower.get(rank, 1.0) * body / placement.chunks + (end if last else 0.0)
                seconds[rank, kind, chunk] = [0.9 * value, value, 1.5 * value]
    return MeasuredTimes(task_seconds=seconds, transfer_seconds=[0.01])


@given(placements(), st.integers(1, 4), st.floats(0.5, 20.0), st.floats(0.0, 5.0), st.data())
def test_times_of_another_placement_are_those_of_the_model_there(
    placement: Placement, chunks: int, body: float, end: float, data: st.DataObject
) -> None:
    other = Placement(placement.ranks, chunks)
    if chunks == 2 and data.draw(st.booleans()):
        other = Placement(placement.ranks, chunks, Shape.VEE)
    rank_of_end, _ = placement.holder(placement.stages - 1)
    slow = data.draw(st.integers(0, placement.ranks - 1))
    # With one chunk a slow last rank looks like a long end, and with two ranks a slow first one like a short end.
    is_known = placement.chunks > 1 or (slow != rank_of_end and placement.ranks > 3)
    slower = {slow: 1.3} if is_known else {}
    found = times_in(exact(placement, body, end, slower), placement, other).task_seconds
    expected = exact(other, body, end, slower).task_seconds
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert list(found[key]) == pytest.approx(values), key


@given(placements(), st.integers(1, 24), st.integers(1, 12), st.booleans())
def test_other_placements_have_whole_layers_and_an_order(
    placement: Placement, microbatches: int, layers: int, has_vee: bool
) -> None:
    found = other_placements(placement, microbatches, layers, has_vee=has_vee)
    assert has_vee or all(other.shape is not Shape.VEE for other in found)
    assert placement not in found
    assert len(set(found)) == len(found)
    for other in found:
        assert other.ranks == placement.ranks
        assert layers % other.chunks == 0
        assert other.chunks <= MOST_CHUNKS
        assert microbatches % other.ranks == 0 or other.chunks == 1 or other.shape is Shape.VEE


def test_medians_and_lateness_of_tasks_stay() -> None:
    times = exact(Placement(2), 8.0, 2.0, {})
    found = times_in(times, Placement(2), Placement(2, 2))
    late = found.task_seconds[0, TaskKind.FORWARD, 1]
    assert max(late) / statistics.median(late) == pytest.approx(1.5)
    assert found.transfer_seconds == times.transfer_seconds


MICROBATCHES = 16
VEE = Placement(2, 2, Shape.VEE)


def step_of(length: float) -> StepTimes:
    """A step of a rank, with a late transfer in twenty; only its length depends on `length`."""
    tasks = [TaskTime(task, 1.0, 0.0) for task in zero_bubble(VEE, MICROBATCHES, 0)]
    tasks[-1] = TaskTime(tasks[-1].task, 1.0, length)
    return StepTimes(tasks=tasks, transfers=[0.05] * 19 + [3.0])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of a tuner; all ranks of its pipeline have the same times."""
    from megatronapp_trainer.pipeline.plan_tuner import PlanTuner

    monkeypatch.setattr(PlanTuner, "_gather", lambda _self, own: [own] * VEE.ranks)
    return []


@pytest.mark.torch
@pytest.mark.parametrize(("guided", "never_left"), [(100.0, 101.0), (101.0, 100.0)])
def test_the_plan_that_is_faster_when_measured_stays(guided: float, never_left: float, reports: list[str]) -> None:
    from megatronapp_trainer.pipeline.plan_tuner import MEASURED_STEPS, WARM_UP_STEPS, PlanTuner

    plan = DppPlan(DppConfig(use_dpp=True, dpp_placement="vee"), VEE)
    tuner = PlanTuner(plan, Any, reports.append)
    candidates = []
    for step in range(WARM_UP_STEPS + MEASURED_STEPS + 2 * (1 + MEASURED_STEPS) + 1):
        tuner.begin_step(MICROBATCHES)
        candidate = plan.candidates.get(MICROBATCHES)
        candidates.append(None if candidate is None else candidate.is_left)
        is_warm_up = step > WARM_UP_STEPS and candidates[-1] != candidates[-2]
        tuner.end_step(step_of(1e6 if is_warm_up else guided if candidates[-1] else never_left))
    known = [None] * (WARM_UP_STEPS + MEASURED_STEPS)
    tried = [is_left for is_left in (True, False) for _ in range(1 + MEASURED_STEPS)]
    assert candidates == [*known, *tried, guided < never_left]
    assert plan.candidates[MICROBATCHES] == tuner.choices[MICROBATCHES].candidate
    assert tuner.measured_seconds == {MICROBATCHES: 100.0}
    winner = "the first one" if guided < never_left else "the order that is never left"
    assert reports[-1].endswith(f"with the order that is never left, {winner} is kept")


@pytest.mark.torch
@settings(max_examples=12)
@given(st.lists(st.floats(0.7, 2.0), min_size=1, max_size=3), st.integers(0, 3))
def test_plans_are_compared_again_once_steps_are_longer(factors: list[float], other_size_after: int) -> None:
    """Each factor holds for steps until a review has seen it; a few steps of another size lie between."""
    from megatronapp_trainer.pipeline.plan_tuner import LONGER, MEASURED_STEPS, REVIEWED_STEPS, WARM_UP_STEPS, PlanTuner

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanTuner, "_gather", lambda _self, own: [own] * VEE.ranks)
        tuner = PlanTuner(DppPlan(DppConfig(use_dpp=True, dpp_placement="vee"), VEE), Any, lines.append)

        def run(steps: int, length: float, size: int = MICROBATCHES) -> None:
            for _ in range(steps):
                tuner.begin_step(size)
                tuner.end_step(step_of(length))

        trials = 2 * (1 + MEASURED_STEPS)
        run(WARM_UP_STEPS + MEASURED_STEPS + trials, 100.0)
        usual, compared = 100.0, 0
        for factor in factors:
            run(other_size_after, 500.0, 2 * MICROBATCHES)
            compared += 100.0 * factor > LONGER * usual
            run(REVIEWED_STEPS, 100.0 * factor)
            assert sum("compared again" in line for line in lines) == compared
            if 100.0 * factor > LONGER * usual:
                run(trials, 100.0 * factor)
                usual = 100.0 * factor
            usual = min(usual, 100.0 * factor)
