"""Hosts that run ahead of their devices: when they launch, wait or leave the plan, and that they never stop."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import FULL

from megatronapp_trainer.pipeline.planning.choice import HostReaction, MeasuredTimes, choose_candidate
from megatronapp_trainer.pipeline.planning.device_simulator import DeviceModel, simulate_devices
from megatronapp_trainer.pipeline.planning.lateness import (
    Decision,
    LaunchRule,
    OwnWork,
    PostedInput,
    UsualTimes,
    decide,
)
from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight, with_weights
from megatronapp_trainer.pipeline.planning.policies import Greedy, PlanGuided, Policy, Static
from megatronapp_trainer.pipeline.planning.simulator import Simulation
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, Task, TaskKind

AHEAD = LaunchRule(lead_seconds=0.2, tolerance_seconds=0.1)
SECONDS = st.floats(0, 10)


def posted(tasks_left: int, known_seconds: float) -> PostedInput:
    return PostedInput(tasks_left=tasks_left, known_seconds=known_seconds, task_seconds=2.0, transfer_seconds=0.5)


@pytest.mark.parametrize(
    ("tasks_left", "known_seconds", "expected"),
    [
        (2, 0.5, 4.0),
        (1, 0.5, 2.0),
        (1, 2.05, 0.5),
        (1, 2.2, math.inf),
        (0, 0.2, 0.3),
        (0, 0.55, 0.0),
        (0, 0.7, math.inf),
    ],
)
def test_an_input_is_expected_after_what_its_sender_has_to_do(
    tasks_left: int, known_seconds: float, expected: float
) -> None:
    assert posted(tasks_left, known_seconds).expected_seconds(0.1) == pytest.approx(expected)


@given(work=st.integers(0, 1), seconds=SECONDS, late=SECONDS, known=st.booleans())
def test_a_rank_leaves_its_plan_only_for_a_late_input_and_when_it_must(
    work: int, seconds: float, late: float, known: bool
) -> None:
    own = OwnWork(tasks=work, seconds=seconds if work else 0.0)
    coming = PostedInput(tasks_left=0, known_seconds=0.0, task_seconds=1.0, transfer_seconds=own.seconds + late)
    decision = decide(AHEAD, own, is_complete=False, posted=coming, times_known=known)
    in_time = coming.transfer_seconds <= own.seconds + 0.1 or not known
    expected = Decision.LAUNCH if in_time else Decision.LEAVE
    assert decision is (Decision.HOLD if own.seconds > AHEAD.lead_seconds else expected)
    assert decide(AHEAD, own, is_complete=True, posted=None) is Decision.LAUNCH
    assert decide(AHEAD, own, is_complete=False, posted=None) is not Decision.LAUNCH
    patient = LaunchRule(lead_seconds=0.2, tolerance_seconds=None)
    assert decide(patient, own, is_complete=False, posted=coming) is not Decision.LAUNCH
    full = OwnWork(tasks=2, seconds=seconds)
    assert decide(AHEAD, full, is_complete=True, posted=None) is Decision.HOLD


LOOPS = st.builds(Placement, st.integers(1, 4), st.integers(1, 3))


def simulated(
    placement: Placement,
    num_microbatches: int,
    policies: list[Policy],
    *,
    split: bool,
    tolerance: float | None,
    history: random.Random | None = None,
    known: bool = True,
    transfer: dict[RankTask, float] | None = None,
    transfers: float = 0.05,
    slow_rank: int | None = None,
) -> Simulation:
    """A step whose tasks take 1.0 s, 2.0 s on a slow rank; with a history, all take times that no host expects."""
    keys = itertools.product(range(placement.ranks), TaskKind, range(placement.chunks))

    usual = {key: 2.0 if key[0] == slow_rank else 1.0 for key in keys}

    def seconds(rank: int, task: Task) -> float:
        if history is not None:
            return history.choice((0.0, 0.5, 1.0, 30.0)) + history.random()
        return 2.0 if rank == slow_rank else 1.0

    def transfer_seconds(rank: int, task: Task) -> float:
        if history is not None:
            return history.choice((0.0, 0.0, 5.0, 50.0)) + history.random()
        return (transfer or {}).get(RankTask(rank, task), transfers)

    return simulate_devices(
        placement,
        num_microbatches,
        policies,
        split=split,
        model=DeviceModel(
            launch_rule=LaunchRule(lead_seconds=0.1, tolerance_seconds=tolerance),
            reaction_seconds=0.01,
            usual=UsualTimes(task_seconds=usual, transfer_seconds=transfers) if known else None,
        ),
        task_seconds=seconds,
        transfer_seconds=transfer_seconds,
    )


def assert_valid(placement: Placement, num_microbatches: int, simulation: Simulation, *, split: bool) -> None:
    """Check that each task ran once and after its input, and gradients in the order of microbatches."""
    ends = {RankTask(rank, span.task): span.end for rank, spans in enumerate(simulation.spans) for span in spans}
    count = (3 if split else 2) * num_microbatches * placement.chunks
    for rank, spans in enumerate(simulation.spans):
        assert len({span.task for span in spans}) == len(spans) == count
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
        for span in spans:
            source = placement.previous_task(rank, span.task)
            assert source is None or ends[source] <= span.start
        for kind, chunk in itertools.product((TaskKind.BACKWARD, TaskKind.WEIGHT), range(placement.chunks)):
            numbers = [s.task.microbatch for s in spans if (s.task.kind, s.task.chunk) == (kind, chunk)]
            assert numbers == sorted(numbers)


@settings(max_examples=2000 if FULL else 60)
@given(
    step=st.tuples(LOOPS, st.integers(1, 3)),
    extra=st.integers(0, 4),
    modes=st.tuples(st.booleans(), st.booleans()),
    tolerance=st.sampled_from([None, 0.0, 0.25, 3.0]),
    history=st.randoms(use_true_random=False),
)
def test_every_planned_task_runs_finally_whatever_is_expected_wrongly(
    step: tuple[Placement, int],
    extra: int,
    modes: tuple[bool, bool],
    tolerance: float | None,
    history: random.Random,
) -> None:
    (placement, groups), (split, known) = step, modes
    count = groups * placement.ranks
    orders = [interleaved(placement, count, rank) for rank in range(placement.ranks)]
    caps = [peak_in_flight(order, (1,) * placement.chunks) + extra for order in orders]
    policies: list[Policy] = [PlanGuided(order, cap=cap) for order, cap in zip(orders, caps, strict=True)]
    simulation = simulated(placement, count, policies, split=split, tolerance=tolerance, history=history, known=known)
    assert_valid(placement, count, simulation, split=split)
    assert all(peak <= cap for peak, cap in zip(simulation.peaks, caps, strict=True))


@settings(max_examples=500 if FULL else 30)
@given(LOOPS, st.integers(1, 3), st.integers(0, 2), st.booleans(), st.randoms(use_true_random=False))
def test_fixed_and_greedy_orders_run_finally(
    placement: Placement, groups: int, delay: int, greedy: bool, history: random.Random
) -> None:
    count = groups * placement.ranks
    orders = [with_weights(interleaved(placement, count, rank), delay) for rank in range(placement.ranks)]
    policies: list[Policy] = [Greedy(depth_first=True, admitted=2) if greedy else Static(order) for order in orders]
    simulation = simulated(placement, count, policies, split=True, tolerance=0.25, history=history)
    assert_valid(placement, count, simulation, split=True)
    if not greedy:
        assert simulation.orders == tuple(orders)


@settings(max_examples=60 if FULL else 15)
@given(st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_no_rank_leaves_its_plan_while_inputs_are_in_time(num_microbatches: int, extra: int, split: bool) -> None:
    """The first stage takes twice as long as the second, so that each gradient is there, or is about to be."""
    placement = Placement(2)
    guide = PlanGuided(interleaved(placement, num_microbatches, 0), cap=min(2, num_microbatches) + extra)
    policies: list[Policy] = [guide, Static(interleaved(placement, num_microbatches, 1))]
    if split:
        policies[1] = Static(with_weights(interleaved(placement, num_microbatches, 1)))
        guide = PlanGuided(with_weights(interleaved(placement, num_microbatches, 0)), cap=2 + extra)
        policies[0] = guide
    simulated(placement, num_microbatches, policies, split=split, tolerance=1.0 if split else 0.3, slow_rank=0)
    assert guide.deviations == 0


LATE = RankTask(1, Task.backward(1, 0))


@pytest.mark.parametrize(("late_s", "leaves"), [(0.05, False), (1.2, False), (2.9, True), (9.0, True)])
def test_a_rank_leaves_its_plan_for_an_input_that_is_late_by_more_than_the_tolerance(
    late_s: float, leaves: bool
) -> None:
    """The gradient of microbatch 1 leaves rank 1 some 1.9 s before rank 0 needs it, and its transfer takes long."""
    placement = Placement(2)
    guide = PlanGuided(interleaved(placement, 8, 0), cap=4)
    policies: list[Policy] = [guide, Static(interleaved(placement, 8, 1))]
    simulated(placement, 8, policies, split=False, tolerance=0.3, transfer={LATE: late_s}, slow_rank=0)
    assert (guide.deviations > 0) == leaves


def test_early_launches_save_the_reaction_of_the_host() -> None:
    placement = Placement(4)
    orders = [interleaved(placement, 8, rank) for rank in range(4)]

    def seconds(tolerance: float | None) -> float:
        policies: list[Policy] = [PlanGuided(order, cap=8) for order in orders]
        return simulated(placement, 8, policies, split=False, tolerance=tolerance, transfers=0.0).seconds

    assert seconds(0.5) < seconds(None)


def test_the_choice_knows_how_often_inputs_are_late() -> None:
    """Planned tasks are launched early where transfers are alike, and for inputs that are there where many are late."""
    placement = Placement(2)
    seconds = {TaskKind.FORWARD: 5e-3, TaskKind.BACKWARD: 5.5e-3, TaskKind.WEIGHT: 4.5e-3}
    tasks = {(rank, kind, 0): [seconds[kind]] for rank in range(2) for kind in TaskKind}
    reaction = HostReaction(seconds=4e-4, lead_seconds=2e-4)
    for transfers, early in (([3e-5], True), ([3e-5] * 3 + [4e-2], False)):
        times = MeasuredTimes(task_seconds=tasks, transfer_seconds=transfers)
        choice = choose_candidate(placement, 8, times, most_spare=2, reaction=reaction)
        assert (choice.candidate.tolerance_seconds is not None) == early
        assert choice == choose_candidate(placement, 8, times, most_spare=2, reaction=reaction)
