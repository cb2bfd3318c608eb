"""Slots of replayed passes: enough for each schedule, no more than it needs, alike on ranks that run one order."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import SlotsExhaustedError, TaskOrderError
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.graphs.slots import SlotLimits, SlotPool, slots_of_order
from megatronapp_trainer.pipeline.planning.choice import Candidate
from megatronapp_trainer.pipeline.planning.memory import ChunkMemory, MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import interleaved, static_order, with_weights, zero_bubble
from megatronapp_trainer.pipeline.planning.simulator import simulate
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task, TaskKind

MICROBATCHES = st.integers(1, 12)
VEES = st.builds(lambda ranks: Placement(ranks, 2, Shape.VEE), st.integers(1, 5))


@st.composite
def loops(draw: st.DrawFn) -> tuple[Placement, int]:
    """Draw stages in a loop and a number of microbatches that their interleaved order can have."""
    placement = Placement(draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    return placement, draw(st.integers(1, 4)) * placement.ranks if placement.chunks > 1 else draw(MICROBATCHES)


STEPS = loops() | st.tuples(VEES, MICROBATCHES)


def use(pool: SlotPool, order: Sequence[Task]) -> list[tuple[Task, int | None]]:
    """Return the slot of each forward task of an order, after a check that no slot has two microbatches at a time."""
    last = TaskKind.WEIGHT if any(task.kind is TaskKind.WEIGHT for task in order) else TaskKind.BACKWARD
    taken: list[tuple[Task, int | None]] = []
    for task in order:
        if task.kind is TaskKind.FORWARD:
            before = {(chunk, slot) for (chunk, _), slot in pool.in_flight.items()}
            slot = pool.take(task.chunk, task.microbatch)
            assert (task.chunk, slot) not in before
            taken.append((task, slot))
        elif task.kind is last and (task.chunk, task.microbatch) in pool.in_flight:
            pool.give_back(task.chunk, task.microbatch)
    pool.end_step()
    return taken


@settings(max_examples=examples(60))
@given(STEPS, st.integers(0, 4), st.sampled_from(("whole", "delayed", "zero-bubble")))
def test_a_static_order_finds_its_slots_and_needs_each_of_them(
    step: tuple[Placement, int], delay: int, kind: str
) -> None:
    placement, num_microbatches = step
    for rank in range(placement.ranks):
        order = static_order(placement, num_microbatches, rank)
        if kind != "whole":
            order = with_weights(order, delay)
        if kind == "zero-bubble":
            order = zero_bubble(placement, num_microbatches, rank)
        limits = slots_of_order(order, placement.chunks)
        assert limits.is_exact
        pool = SlotPool()
        for _ in range(2):  # all slots are free again after a step
            pool.begin_step(limits)
            taken = use(pool, order)
        assert {(task.chunk, slot) for task, slot in taken} == {
            (chunk, slot) for chunk, count in enumerate(limits.counts) for slot in range(count)
        }
        fewer = tuple(max(0, count - 1) for count in limits.counts)
        pool.begin_step(SlotLimits(fewer))
        with pytest.raises(SlotsExhaustedError, match="schedule has no more in flight"):
            use(pool, order)


@pytest.mark.parametrize(("rank", "counts"), [(0, (4,)), (1, (3,)), (3, (1,))])
def test_1f1b_has_a_slot_for_each_later_stage_and_its_own(rank: int, counts: tuple[int, ...]) -> None:
    assert slots_of_order(interleaved(Placement(4), 8, rank), 1).counts == counts


def test_the_first_rank_of_two_interleaved_chunks_needs_more_slots_for_its_first_chunk() -> None:
    assert slots_of_order(interleaved(Placement(2, 2), 8, 0), 2).counts == (4, 2)


@settings(max_examples=examples(60))
@given(
    step=STEPS,
    schedule=st.sampled_from(("auto", "dfc", "bfc", "static", "zero-bubble")),
    candidate=st.none()
    | st.builds(Candidate, plans_weights=st.booleans(), spare_chunks=st.integers(0, 8))
    | st.just(Candidate(plans_weights=True, spare_chunks=0, is_left=False)),
    cap=st.none() | st.integers(8, 12).map(str),
    history=st.randoms(use_true_random=False),
)
def test_dynamic_orders_find_slots_whatever_takes_long(
    step: tuple[Placement, int],
    schedule: str,
    candidate: Candidate | None,
    cap: str | None,
    history: random.Random,
) -> None:
    placement, num_microbatches = step
    if placement.shape is Shape.VEE and schedule == "static":
        schedule = "auto"
    plan = DppPlan(DppConfig(use_dpp=True, dpp_schedule=schedule, dpp_memory_cap=cap), placement)
    if schedule == "auto" and candidate is not None:
        spare = min(candidate.spare_chunks, plan.most_spare(num_microbatches))
        plan.candidates[num_microbatches] = Candidate(
            plans_weights=candidate.plans_weights, spare_chunks=spare, is_left=candidate.is_left
        )
    simulation = simulate(
        placement,
        num_microbatches,
        [plan.policy(rank, num_microbatches) for rank in range(placement.ranks)],
        split=plan.split,
        task_seconds=lambda _rank, _task: history.choice((0.0, 0.1, 1.0, 1.0, 30.0)) + history.random(),
        transfer_seconds=lambda _rank, _task: history.choice((0.0, 0.0, 5.0, 50.0)) + history.random(),
    )
    for rank, order in enumerate(simulation.orders):
        limits = plan.slots(rank, num_microbatches)
        assert limits.is_exact == (schedule != "auto")
        assert max(limits.counts) <= num_microbatches
        pool, follower = SlotPool(), SlotPool()
        pool.begin_step(limits)
        taken = use(pool, order)
        assert pool.shortages == sum(slot is None for _, slot in taken)
        assert not pool.shortages or (schedule == "auto" and placement.chunks > 1)
        follower.begin_step(limits)
        assert use(follower, order) == taken


def test_slots_stay_within_a_cap_in_bytes() -> None:
    plan = DppPlan(DppConfig(use_dpp=True, dpp_memory_cap="1GiB"), Placement(2))
    free = plan.slots(0, 16).counts[0]
    plan.memory = (MemoryLimit(40, (ChunkMemory(10, 5),)), MemoryLimit(40, (ChunkMemory(10, 5),)))
    assert free == 10
    assert plan.slots(0, 16).counts == (4,)


def test_a_pass_without_a_slot_is_counted_where_limits_are_not_exact() -> None:
    pool = SlotPool()
    pool.begin_step(SlotLimits((1,), is_exact=False))
    assert [pool.take(0, 0), pool.take(0, 1)] == [0, None]
    assert pool.shortages == 1
    pool.give_back(0, 0)
    pool.begin_step(SlotLimits((1,)))
    assert pool.shortages == 0


def test_passes_in_another_order_are_refused() -> None:
    pool = SlotPool()
    pool.begin_step(SlotLimits((2, 1)))
    pool.take(0, 3)
    with pytest.raises(TaskOrderError, match="microbatch 3 of chunk 0 begins again"):
        pool.take(0, 3)
    with pytest.raises(TaskOrderError, match="microbatch 0 of chunk 1 gives back a slot"):
        pool.give_back(1, 0)
    for after in (pool.end_step, lambda: pool.begin_step(SlotLimits((2, 1)))):
        with pytest.raises(TaskOrderError, match="before the last pass of microbatch 3 of chunk 0, which holds slot 0"):
            after()


def test_an_exhausted_pool_names_the_holders() -> None:
    pool = SlotPool()
    pool.begin_step(SlotLimits((2,)))
    pool.take(0, 5)
    pool.take(0, 4)
    with pytest.raises(SlotsExhaustedError, match=r"microbatch 6 .* none of 2 slots free: .* microbatches 4, 5, "):
        pool.take(0, 6)
