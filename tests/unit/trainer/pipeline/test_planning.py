"""Orders and policies of a step's tasks: complete, never stuck, within their memory, as fast as their papers say."""

import collections
import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import FULL, examples

from megatronapp_trainer.pipeline.leader import Following, Leading
from megatronapp_trainer.pipeline.planning.choice import Candidate, HostReaction, MeasuredTimes, choose_candidate
from megatronapp_trainer.pipeline.planning.memory import ChunkMemory, MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import (
    Order,
    forward_vee,
    interleaved,
    needed_chunks,
    peak_activations,
    peak_in_flight,
    static_order,
    with_weights,
    zero_bubble,
    zero_bubble_h1,
    zero_bubble_v,
)
from megatronapp_trainer.pipeline.planning.policies import Greedy, PlanGuided, Policy, Static
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.simulator import DeadlockError, Simulation, simulate
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, Shape, Task, TaskKind

LOOPS = st.builds(Placement, st.integers(1, 5), st.integers(1, 4))
VEES = st.builds(lambda ranks: Placement(ranks, 2, Shape.VEE), st.integers(1, 6))
MICROBATCHES = st.integers(1, 12)


@st.composite
def loops_with_microbatches(draw: st.DrawFn) -> tuple[Placement, int]:
    """Draw stages in a loop and a number of microbatches that their interleaved order can have."""
    placement = draw(LOOPS)
    return placement, draw(st.integers(1, 4)) * placement.ranks if placement.chunks > 1 else draw(MICROBATCHES)


STEPS = loops_with_microbatches()
ALL_STEPS = STEPS | st.tuples(VEES, MICROBATCHES)


def all_tasks(placement: Placement, num_microbatches: int, *, split: bool) -> set[Task]:
    kinds = TaskKind if split else (TaskKind.FORWARD, TaskKind.BACKWARD)
    return {
        Task(kind, microbatch, chunk)
        for kind in kinds
        for microbatch in range(num_microbatches)
        for chunk in range(placement.chunks)
    }


def run(
    placement: Placement,
    num_microbatches: int,
    policy: Callable[[int], Policy],
    *,
    split: bool = False,
    history: random.Random | None = None,
    weights: tuple[int, ...] | None = None,
) -> Simulation:
    """Simulate a step; with a history, all tasks and transfers take very different times."""

    def seconds(rank: int, task: Task) -> float:
        return 1.0 if history is None else history.choice((0.0, 0.1, 1.0, 1.0, 30.0)) + history.random()

    def transfer(rank: int, task: Task) -> float:
        return 0.0 if history is None else history.choice((0.0, 0.0, 5.0, 50.0)) + history.random()

    return simulate(
        placement,
        num_microbatches,
        [policy(rank) for rank in range(placement.ranks)],
        split=split,
        task_seconds=seconds,
        transfer_seconds=transfer,
        weights=weights,
    )


def assert_valid(placement: Placement, num_microbatches: int, simulation: Simulation, *, split: bool) -> None:
    """Check that each task ran once, after its input, and gradients in the order of microbatches."""
    ends = {RankTask(rank, span.task): span.end for rank, spans in enumerate(simulation.spans) for span in spans}
    for rank, spans in enumerate(simulation.spans):
        assert collections.Counter(span.task for span in spans) == dict.fromkeys(
            all_tasks(placement, num_microbatches, split=split), 1
        )
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start
        for span in spans:
            source = placement.previous_task(rank, span.task)
            assert source is None or ends[source] <= span.start
        for kind in (TaskKind.BACKWARD, TaskKind.WEIGHT):
            for chunk in range(placement.chunks):
                numbers = [s.task.microbatch for s in spans if (s.task.kind, s.task.chunk) == (kind, chunk)]
                assert numbers == sorted(numbers)


@given(LOOPS | VEES)
def test_paths_of_microbatches_lead_through_all_stages(placement: Placement) -> None:
    holders = {placement.holder(stage) for stage in range(placement.stages)}
    assert holders == {(rank, chunk) for rank in range(placement.ranks) for chunk in range(placement.chunks)}
    assert all(placement.stage(*placement.holder(stage)) == stage for stage in range(placement.stages))
    rank, chunk = placement.holder(0)
    step: RankTask | None = RankTask(rank, Task.forward(3, chunk))
    path: list[RankTask] = []
    while step is not None:
        path.append(step)
        step = placement.next_task(*step)
    assert len(set(path)) == len(path) == 2 * placement.stages
    assert [placement.previous_task(*step) for step in path] == [None, *path[:-1]]


@pytest.fixture(scope="module")
def megatron_schedules() -> Any:
    """The module under comparison; importing it costs seconds, starts nothing."""
    with warnings.catch_warnings():  # that Transformer Engine and Apex are missing
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel import schedules
    return schedules


@pytest.mark.torch
@given(step=STEPS)
def test_the_interleaved_order_is_that_of_megatron_core(megatron_schedules: Any, step: tuple[Placement, int]) -> None:
    placement, num_microbatches = step
    table = megatron_schedules.get_schedule_table(num_microbatches, placement.chunks, placement.ranks)
    for rank in range(placement.ranks):
        order = interleaved(placement, num_microbatches, rank)
        forwards = [(task.microbatch, task.chunk) for task in order if task.kind is TaskKind.FORWARD]
        backwards = [(task.microbatch, task.chunk) for task in order if task.kind is TaskKind.BACKWARD]
        assert forwards == table
        assert backwards == [(microbatch, placement.chunks - 1 - chunk) for microbatch, chunk in table]


@settings(max_examples=examples(60))
@given(STEPS, st.integers(0, 4), st.randoms(use_true_random=False))
def test_static_orders_end_whatever_takes_long(step: tuple[Placement, int], delay: int, history: random.Random) -> None:
    placement, num_microbatches = step

    def order(rank: int) -> Order:
        return with_weights(interleaved(placement, num_microbatches, rank), delay)

    simulation = run(placement, num_microbatches, lambda rank: Static(order(rank)), split=True, history=history)
    assert simulation.orders == tuple(order(rank) for rank in range(placement.ranks))
    assert_valid(placement, num_microbatches, simulation, split=True)


@settings(max_examples=examples(60))
@given(VEES, MICROBATCHES, st.randoms(use_true_random=False))
def test_zero_bubble_v_ends_whatever_takes_long(
    placement: Placement, num_microbatches: int, history: random.Random
) -> None:
    simulation = run(
        placement,
        num_microbatches,
        lambda rank: Static(zero_bubble_v(placement, num_microbatches, rank)),
        split=True,
        history=history,
    )
    assert_valid(placement, num_microbatches, simulation, split=True)
    assert max(simulation.peaks) <= 2 * placement.ranks
    assert simulation.peaks == tuple(map(peak_activations, simulation.orders))


@given(VEES, MICROBATCHES)
def test_an_evaluation_in_a_vee_needs_no_wait(placement: Placement, num_microbatches: int) -> None:
    orders = [list(forward_vee(placement, num_microbatches, rank)) for rank in range(placement.ranks)]
    length = 2 * num_microbatches + 2 * placement.ranks - 2
    ends: dict[tuple[int, int], int] = {}
    """Time at which a microbatch leaves a stage."""
    for now in range(length):
        for rank, order in enumerate(orders):
            microbatch, stage = (order[0].microbatch, placement.stage(rank, order[0].chunk)) if order else (-1, -1)
            if order and (stage == 0 or ends.get((microbatch, stage - 1), length) <= now):
                ends[microbatch, stage] = now + 1
                order.pop(0)
    assert not any(orders)
    assert max(ends.values()) == length


@settings(max_examples=3000 if FULL else 60)
@given(
    step=ALL_STEPS,
    extra=st.integers(0, 6),
    split=st.booleans(),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    history=st.randoms(use_true_random=False),
)
def test_a_guided_rank_never_exceeds_its_cap_and_never_waits_forever(
    step: tuple[Placement, int], extra: int, split: bool, weights: list[int], history: random.Random
) -> None:
    placement, num_microbatches = step
    sizes = tuple(weights[: placement.chunks])
    orders = [static_order(placement, num_microbatches, rank) for rank in range(placement.ranks)]
    caps = [peak_in_flight(order, sizes) + extra for order in orders]
    simulation = run(
        placement,
        num_microbatches,
        lambda rank: PlanGuided(orders[rank], cap=caps[rank], weights=sizes),
        split=split,
        history=history,
        weights=sizes,
    )
    assert_valid(placement, num_microbatches, simulation, split=split)
    assert all(peak <= cap for peak, cap in zip(simulation.peaks, caps, strict=True))


@settings(max_examples=3000 if FULL else 60)
@given(
    step=ALL_STEPS,
    spare=st.tuples(st.integers(0, 6), st.integers(0, 30)),
    sizes=st.lists(st.builds(ChunkMemory, st.integers(1, 9), st.integers(0, 12)), min_size=4, max_size=4),
    delay=st.none() | st.integers(0, 2),
    history=st.randoms(use_true_random=False),
)
def test_a_guided_rank_never_exceeds_a_limit_of_what_it_keeps(
    step: tuple[Placement, int],
    spare: tuple[int, int],
    sizes: list[ChunkMemory],
    delay: int | None,
    history: random.Random,
) -> None:
    """Weight tasks may leave less or more to keep than backward tasks free."""
    placement, num_microbatches = step
    chunks = tuple(sizes[: placement.chunks])
    orders = [static_order(placement, num_microbatches, rank) for rank in range(placement.ranks)]
    if delay is not None:
        orders = [with_weights(order, delay) for order in orders]
    needs = [MemoryLimit(0, chunks).peak(order) for order in orders]
    simulation = run(
        placement,
        num_microbatches,
        lambda rank: PlanGuided(
            orders[rank],
            cap=peak_in_flight(orders[rank], (1,) * placement.chunks) + spare[0],
            memory=MemoryLimit(needs[rank] + spare[1], chunks),
        ),
        split=True,
        history=history,
    )
    assert_valid(placement, num_microbatches, simulation, split=True)
    for need, order in zip(needs, simulation.orders, strict=True):
        assert max(amounts_after(order, chunks)) <= need + spare[1]


def amounts_after(order: Order, chunks: Sequence[ChunkMemory]) -> list[int]:
    """Return the memory that a rank keeps after each task of an order."""
    kinds = {TaskKind.FORWARD: (1, 0), TaskKind.BACKWARD: (-1, 1), TaskKind.WEIGHT: (0, -1)}
    changes = []
    for task in order:
        chunk, (activations, operands) = chunks[task.chunk], kinds[task.kind]
        changes.append(activations * chunk.activations + operands * chunk.operands)
    return list(itertools.accumulate(changes))


def test_a_limit_below_the_need_of_a_plan_is_refused() -> None:
    order = interleaved(Placement(2), 4, 0)
    limit = MemoryLimit(19, (ChunkMemory(10, 3),))
    with pytest.raises(ValueError, match="holds 20 at its peak, more than the cap of 19"):
        PlanGuided(order, cap=8, memory=limit)
    assert MemoryLimit(0, (ChunkMemory(10, 15),)).peak(order) == 25  # while W of a microbatch is pending
    delayed = with_weights(order, 1)
    assert [MemoryLimit(most, (ChunkMemory(10, 3),)).allows_order(delayed) for most in (22, 23)] == [False, True]


@settings(max_examples=3000 if FULL else 60)
@given(
    step=ALL_STEPS,
    candidate=st.builds(Candidate, plans_weights=st.booleans(), spare_chunks=st.integers(0, 6))
    | st.just(Candidate(plans_weights=True, spare_chunks=0, is_left=False)),
    history=st.randoms(use_true_random=False),
)
def test_no_candidate_waits_forever_or_exceeds_its_cap(
    step: tuple[Placement, int], candidate: Candidate, history: random.Random
) -> None:
    placement, num_microbatches = step
    ranks = range(placement.ranks)
    caps = [candidate.cap(placement, num_microbatches, rank) for rank in ranks]
    needed = needed_chunks(placement, num_microbatches)
    assert max(caps) == needed + candidate.spare_chunks
    simulation = run(
        placement,
        num_microbatches,
        lambda rank: candidate.policy(placement, num_microbatches, rank),
        split=True,
        history=history,
    )
    assert_valid(placement, num_microbatches, simulation, split=True)
    if candidate.is_left:
        assert all(peak <= cap for peak, cap in zip(simulation.peaks, caps, strict=True))
    else:
        assert simulation.orders == tuple(candidate.order(placement, num_microbatches, rank) for rank in ranks)
        assert max(simulation.peaks) <= needed


@settings(max_examples=1000 if FULL else 40)
@given(
    placement=LOOPS | VEES,
    num_microbatches=MICROBATCHES,
    admitted=st.integers(1, 5),
    modes=st.tuples(st.booleans(), st.booleans()),
    history=st.randoms(use_true_random=False),
)
def test_greedy_ranks_never_wait_forever(
    placement: Placement, num_microbatches: int, admitted: int, modes: tuple[bool, bool], history: random.Random
) -> None:
    depth_first, split = modes
    simulation = run(
        placement,
        num_microbatches,
        lambda rank: Greedy(depth_first=depth_first, admitted=admitted),
        split=split,
        history=history,
    )
    assert_valid(placement, num_microbatches, simulation, split=split)
    assert max(simulation.peaks) <= admitted * placement.chunks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [8, 24])
def test_bubbles_are_those_of_the_papers(ranks: int, num_microbatches: int) -> None:
    def seconds(placement: Placement, order: Callable[[int], Order], *, split: bool) -> float:
        return run(placement, num_microbatches, lambda rank: Static(order(rank)), split=split).seconds

    loop, vee = Placement(ranks), Placement(ranks, 2, Shape.VEE)
    plain = seconds(loop, lambda rank: interleaved(loop, num_microbatches, rank), split=False)
    assert plain == 2 * (num_microbatches + ranks - 1)
    h1 = seconds(loop, lambda rank: zero_bubble_h1(loop, num_microbatches, rank), split=True)
    assert h1 == 3 * num_microbatches + ranks - 1
    v = seconds(vee, lambda rank: zero_bubble_v(vee, num_microbatches, rank), split=True)
    assert v == pytest.approx(6 * num_microbatches + ranks - 1, abs=0 if num_microbatches >= 2 * ranks else ranks)


def test_depth_first_and_breadth_first_choose_differently() -> None:
    placement = Placement(1, 3)

    def order(*, depth_first: bool) -> list[str]:
        simulation = run(placement, 2, lambda rank: Greedy(depth_first=depth_first, admitted=2))
        return [str(task) for task in simulation.orders[0]]

    depth, breadth = order(depth_first=True), order(depth_first=False)
    assert depth[:3] == ["F0.0", "F0.1", "F0.2"]
    assert breadth[:4] == ["F0.0", "F1.0", "F0.1", "F1.1"]


def test_a_rank_leaves_the_plan_only_while_its_input_is_late() -> None:
    placement = Placement(2)
    orders = [interleaved(placement, 6, rank) for rank in range(2)]
    guides = [PlanGuided(order, cap=2) for order in orders]
    assert run(placement, 6, guides.__getitem__).orders == tuple(orders)
    assert [guide.deviations for guide in guides] == [0, 0]

    late = [PlanGuided(order, cap=4) for order in orders]
    simulation = simulate(
        placement,
        6,
        late,
        split=False,
        task_seconds=lambda rank, task: 1.0,
        transfer_seconds=lambda rank, task: 9.0 if (rank, task) == (1, Task.backward(0, 0)) else 0.0,
    )
    assert simulation.orders[0][:4] == tuple(Task.forward(microbatch, 0) for microbatch in range(4))
    assert late[0].deviations == 2


class ListLog:
    """Log of a leader whose follower is in the same process."""

    def __init__(self) -> None:
        self._entries: collections.deque[int] = collections.deque()

    def append(self, entry: int) -> None:
        assert 0 <= entry < 1 << 64
        self._entries.append(entry)

    def poll_entry(self) -> int | None:
        return self._entries.popleft() if self._entries else None


def test_leader_and_follower_know_which_tasks_run_early() -> None:
    placement, log = Placement(2), ListLog()
    leader, follower = Leading(PlanGuided(interleaved(placement, 6, 0), cap=4), log), Following(log)
    leading, following = (RankProgress(placement, 0, 6, split=True) for _ in range(2))

    def next_task() -> tuple[str, bool]:
        task = leader.choose(leading)
        assert follower.choose(following) == task
        assert follower.early == leader.early or task is None
        for progress in (leading, following):
            if task is not None:
                progress.run(task)
        return str(task), leader.early

    early = [next_task() for _ in range(5)]
    assert early == [("F0.0", False), ("F1.0", False), ("F2.0", True), ("F3.0", True), ("None", False)]
    for progress in (leading, following):
        progress.receive(Task.backward(0, 0))
    assert [next_task() for _ in range(3)] == [("B0.0", False), ("W0.0", False), ("F4.0", True)]


def test_a_weight_task_of_a_plan_may_run_early() -> None:
    placement = Placement(2)
    order = zero_bubble_h1(placement, 4, 1)
    assert [str(task) for task in order[:5]] == ["F0.0", "B0.0", "F1.0", "B1.0", "W0.0"]
    guide, progress = PlanGuided(order, cap=2), RankProgress(placement, 1, 4, split=True)
    for task in order[:2]:
        progress.receive(task)
        assert guide.choose(progress) == task
        progress.run(task)
    assert guide.choose(progress) == Task.weight(0, 0)
    assert guide.early


def test_a_plan_above_its_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 4 at its peak, more than the cap of 3"):
        PlanGuided(interleaved(Placement(4), 8, 0), cap=3)


def test_a_short_last_group_is_refused() -> None:
    with pytest.raises(ValueError, match="6 microbatches are no multiple of the 4 ranks"):
        interleaved(Placement(4, 2), 6, 0)


def test_orders_that_wait_for_each_other_are_found() -> None:
    placement = Placement(2)
    backwards_first = (Task.backward(0, 0), Task.forward(0, 0))
    with pytest.raises(DeadlockError, match=r"by rank: \{0: 2, 1: 2\}"):
        run(placement, 1, lambda rank: Static(backwards_first))


def measured(placement: Placement, transfers: list[float]) -> MeasuredTimes:
    seconds = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 1.1, TaskKind.WEIGHT: 0.9}
    ranks, chunks = range(placement.ranks), range(placement.chunks)
    return MeasuredTimes(
        task_seconds={(rank, kind, chunk): [seconds[kind]] for rank in ranks for kind in TaskKind for chunk in chunks},
        transfer_seconds=transfers,
    )


@settings(max_examples=examples(20))
@given(ALL_STEPS, st.lists(st.floats(0, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_the_chosen_plan_is_expected_to_take_between_its_work_and_the_static_order(
    step: tuple[Placement, int], transfers: list[float], most_spare: int
) -> None:
    placement, num_microbatches = step
    choice = choose_candidate(placement, num_microbatches, measured(placement, transfers), most_spare=most_spare)
    work = 3.0 * num_microbatches * placement.chunks
    assert work * (1 - 1e-9) <= choice.seconds
    assert choice.candidate.spare_chunks <= most_spare
    assert 0 <= choice.bubble < 1
    assert choice == choose_candidate(
        placement, num_microbatches, measured(placement, transfers), most_spare=most_spare
    )


def test_a_choice_spends_memory_only_where_that_saves_time() -> None:
    alone = choose_candidate(Placement(1), 8, measured(Placement(1), [0.0]), most_spare=4)
    assert alone.candidate == Candidate(plans_weights=True, spare_chunks=0, is_left=False)
    placement = Placement(4, 2)
    late = choose_candidate(placement, 16, measured(placement, [0.05] * 19 + [3.0]), most_spare=4)
    assert late.candidate.spare_chunks > 0
    assert late.seconds < 0.95 * late.static_seconds


@pytest.mark.parametrize("reaction", [None, HostReaction(seconds=0.01, lead_seconds=0.02)])
@pytest.mark.parametrize(
    ("placement", "num_microbatches"), [(Placement(2), 64), (Placement(2, 2, Shape.VEE), 8)], ids=["one chunk", "vee"]
)
def test_of_nearly_equal_plans_the_order_that_is_never_left_is_chosen(
    placement: Placement, num_microbatches: int, reaction: HostReaction | None
) -> None:
    times = measured(placement, [0.0])
    choice = choose_candidate(placement, num_microbatches, times, most_spare=1, reaction=reaction)
    assert (choice.candidate.is_left, choice.candidate.plans_weights) == (False, True)
    order = "order of megatron-core" if placement.chunks == 1 else "order of ZB-V"
    assert choice.candidate.describe(placement) == f"{order}, weight gradients at planned places, never left"


def test_a_guided_vee_is_shorter_than_zero_bubble_v_where_transfers_are_late() -> None:
    placement = Placement(2, 2, Shape.VEE)
    choice = choose_candidate(placement, 16, measured(placement, [0.05] * 19 + [3.0]), most_spare=4)
    assert choice.candidate.is_left
    assert choice.seconds < 0.99 * choice.static_seconds
    assert "order of ZB-V, weight gradients " in choice.candidate.describe(placement)
    on_time = choose_candidate(placement, 16, measured(placement, [0.0]), most_spare=0)
    assert on_time.static_seconds == pytest.approx(on_time.seconds)
    assert on_time.candidate.order(placement, 16, 1) == zero_bubble(placement, 16, 1)
