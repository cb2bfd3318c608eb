"""Choice of the mode of shipping from measured steps, and advice on the replicas that a forward rank serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import ShipMode
from megatronapp_trainer.fbd.tuning.advice import WORTHWHILE, PassSeconds, Roles, advise, cost, round_seconds
from megatronapp_trainer.fbd.tuning.measured_steps import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    MeasuredSteps,
    StepSeconds,
    covered_seconds,
    fastest_mode,
    slowest,
)

EACH = WARM_UP_STEPS + MEASURED_STEPS
times = st.floats(1e-6, 1e3)
pass_seconds = st.builds(PassSeconds, times, times, times)


@st.composite
def roles(draw: st.DrawFn) -> Roles:
    replicas = draw(st.integers(1, 24))
    served = draw(st.sampled_from([number for number in range(1, replicas + 1) if replicas % number == 0]))
    return Roles(replicas, served, draw(st.integers(1, 8)))


@given(st.sets(st.sampled_from(ShipMode), min_size=1), st.lists(st.integers(1, 3), min_size=40), st.data())
def test_modes_are_measured_in_order_with_equal_numbers_of_microbatches(
    modes: set[ShipMode], sizes: list[int], data: st.DataObject
) -> None:
    order = [mode for mode in ShipMode if mode in modes]
    steps = MeasuredSteps(order)
    counted: list[tuple[int, ShipMode, float]] = []
    for size in [*sizes, *[4] * EACH * len(order)]:
        if steps.is_complete:
            break
        mode, seconds = steps.begin_step(size), data.draw(times)
        counted.append((size, mode, seconds))
        steps.end_step(StepSeconds(seconds, 0, 0, 0))
    newest = counted[-EACH * len(order) :]
    assert steps.is_complete
    assert {size for size, _, _ in newest} == {counted[-1][0]}
    assert [mode for _, mode, _ in newest] == [mode for mode in order for _ in range(EACH)]
    for place, mode in enumerate(order):
        own = [seconds for _, _, seconds in newest[place * EACH : (place + 1) * EACH]]
        assert steps.shortest()[mode].step == min(own[WARM_UP_STEPS:])


def test_the_slowest_rank_decides_in_each_mode() -> None:
    saved, full = ShipMode.SAVED, ShipMode.FULL
    ranks = [
        {saved: StepSeconds(3, 1, 9, 1), full: StepSeconds(4, 1, 1, 1)},
        {saved: StepSeconds(5, 2, 3, 0), full: StepSeconds(1, 1, 1, 1)},
    ]
    together = slowest(ranks)
    assert together == {saved: StepSeconds(5, 2, 9, 1), full: StepSeconds(4, 1, 1, 1)}
    assert fastest_mode(together) is full
    assert fastest_mode({mode: StepSeconds(1, 0, 0, 0) for mode in (saved, full)}) is saved


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40))))
def test_time_that_copies_overlap_counts_once(found: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in found]
    moments = {moment for start, end in intervals for moment in range(start, end)}
    assert covered_seconds(intervals) == pytest.approx(1e-9 * len(moments))


@given(pass_seconds, roles())
def test_advice_is_a_divisor_that_no_other_undercuts_by_much(seconds: PassSeconds, own: Roles) -> None:
    advice = advise(seconds, own)
    advised = advice.backward_per_forward
    assert advised is not None
    assert own.replicas % advised == 0
    assert f"--fbd-backward-per-forward {advised}" in advice.sentence
    divisors = [number for number in range(1, own.replicas + 1) if own.replicas % number == 0]
    assert cost(seconds, advised) <= min(cost(seconds, number) for number in divisors) / (1 - WORTHWHILE) * 1.000001
    if advised != own.served:
        assert cost(seconds, advised) < cost(seconds, own.served)
        assert str(own.ranks(advised)) in advice.sentence


@given(pass_seconds, roles())
def test_a_forward_rank_that_keeps_up_serves_as_many_as_it_can(seconds: PassSeconds, own: Roles) -> None:
    """The best number is at least each with which a backward pass hides forward passes and copies."""
    divisors = [number for number in range(1, own.replicas + 1) if own.replicas % number == 0]
    best = min(divisors, key=lambda number: cost(seconds, number))
    for number in divisors:
        if round_seconds(seconds, number) == seconds.backward:
            assert best >= number or cost(seconds, best) == pytest.approx(cost(seconds, number))


def test_the_sentence_of_an_advice() -> None:
    seconds = PassSeconds(1e-3, 2.2e-3, 0.4e-3)
    assert advise(seconds, Roles(4, 1, 2)) == (
        2,
        "--fbd-backward-per-forward 2 fits better: 4 replicas on 12 ranks, not 16, with 2.2 ms a microbatch as now "
        "take 25% less time of ranks",
    )
    assert (
        "16 ranks, not 12, with 1.5 ms a microbatch, not 3.0 ms, take"
        in advise(PassSeconds(1.5e-3, 1.4e-3, 0), Roles(4, 2, 2)).sentence
    )
    assert advise(seconds, Roles(4, 2, 2)).sentence == (
        "--fbd-backward-per-forward 2 fits: backward ranks are the limit, and forward ranks wait 9% of the time"
    )
    assert advise(seconds, Roles(1, 1, 1)) == (
        1,
        "--fbd-backward-per-forward 1 fits: backward ranks are the limit, and forward ranks wait 55% of the time; "
        "--fbd-backward-per-forward 2 would take 25% less time of ranks, but does not divide the 1 replica",
    )
    assert "copies of shipments are the limit" in advise(PassSeconds(1, 2, 3), Roles(2, 1, 1)).sentence
    assert advise(PassSeconds(1, 2, 3), Roles(2, 1, 1)).backward_per_forward == 1
    assert "forward ranks are the limit" in advise(PassSeconds(3, 1, 1), Roles(2, 1, 1)).sentence
    on_cpu = Roles(4, 2, 1, forward_on_cpu=True)
    assert advise(PassSeconds(3, 1, 1), on_cpu) == (
        1,
        "--fbd-backward-per-forward 1 fits better: 4 replicas on 8 ranks, not 6, with 3000.0 ms a microbatch, not "
        "6000.0 ms, take 50% less time of GPUs",
    )
    assert advise(PassSeconds(0.4, 1, 0.1), on_cpu).sentence == (
        "--fbd-backward-per-forward 2 fits: backward ranks are the limit, and forward ranks wait 20% of the time"
    )
    assert advise(PassSeconds(4, 1, 0.1), Roles(1, 1, 1, forward_on_cpu=True)) == (
        1,
        "--fbd-backward-per-forward 1 fits: forward ranks, which run on the CPU, are the limit, and the GPUs of "
        "backward ranks wait 75% of the time",
    )
    nothing, limited = advise(PassSeconds(3, 2, 1), Roles(2, 1, 2, merged=2))
    assert nothing is None
    assert limited.startswith("merged forward ranks are the limit: 3000.0 ms a microbatch for a tensor group of 2")
    assert (
        "keeps up with its tensor group of 2 and waits 25%"
        in advise(PassSeconds(3, 4, 1), Roles(2, 1, 2, merged=2)).sentence
    )
