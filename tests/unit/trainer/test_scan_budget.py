"""The budget of tracing: windows that stop, and warnings of what all records cost."""

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import late_pages
import numpy as np
import pytest
import traced_training
from hypothesis import given
from hypothesis import strategies as st
from traced_training import MICROBATCHES, STEPS, records

from megatronapp_common.trace import RecordKind
from megatronapp_native.errors import RingError
from megatronapp_trainer.scan.windows.budget import ALLOWANCE_NS, COST_STEPS, SAVED_NS, TracingCost, WindowBudget
from megatronapp_trainer.scan.windows.plan import CommandedWindow, TraceLevel, WindowPlan

RunRanks = Callable[..., list[Any]]
MS = 1_000_000
TENSOR = "--tensor-model-parallel-size 2"
ORDERED = [{"fromStep": 1, "steps": 100, "granularity": "full"}]


@given(
    st.floats(0.001, 0.1),
    st.integers(0, 2 * SAVED_NS),
    st.lists(st.tuples(st.integers(MS, 1000 * MS), st.integers(0, 5000)), max_size=200),
)
def test_ordered_windows_never_cost_much_more_than_the_limit(
    limit: float, idle_ns: int, steps: list[tuple[int, int]]
) -> None:
    budget, cost_ns = WindowBudget(limit, 100_000.0), 100_000
    budget.step_done(idle_ns, 1000, in_window=False)
    spent = elapsed = largest = 0
    for length_ns, spans in steps:
        spans_now = spans if budget.allows_ordered() else 0
        budget.step_done(length_ns, spans_now, in_window=bool(spans_now))
        spent, elapsed, largest = spent + spans_now * cost_ns, elapsed + length_ns, max(largest, spans * cost_ns)
        assert spent <= limit * (min(idle_ns, SAVED_NS) + elapsed) + ALLOWANCE_NS + largest + 1


def test_ordered_windows_are_allowed_again_once_time_has_passed() -> None:
    budget = WindowBudget(0.01, 1000.0)
    budget.step_done(100 * MS, 1_500_000)
    assert not budget.allows_ordered()
    assert budget.used_in_window == pytest.approx(15)
    budget.step_done(30_000 * MS, 0, in_window=False)
    assert not budget.allows_ordered()
    budget.step_done(30_000 * MS, 0, in_window=False)
    assert budget.allows_ordered()
    assert budget.used_in_window == pytest.approx(15), "still of the step in the window"


def test_days_without_windows_save_no_more_than_ten_minutes_do() -> None:
    spans = []
    for idle_ns in (SAVED_NS, 100 * SAVED_NS):
        budget, count = WindowBudget(0.01, 1_000_000.0), 0
        budget.step_done(idle_ns, 0, in_window=False)
        while budget.allows_ordered():
            budget.step_done(MS, 1)
            count += 1
        spans.append(count)
    assert spans[0] == spans[1] == pytest.approx((0.01 * SAVED_NS + ALLOWANCE_NS) / (0.99 * MS), rel=0.01)


def test_an_unknown_cost_stops_no_window() -> None:
    budget = WindowBudget(0.01, None)
    budget.step_done(MS, 10**9)
    assert budget.allows_ordered()


def test_a_stopped_window_is_over_and_a_later_order_is_not() -> None:
    first = CommandedWindow(from_step=3, steps=10, level=TraceLevel.LAYER)
    others = CommandedWindow(from_step=3, steps=10, level=TraceLevel.LAYER, ranks=frozenset({7}))
    plan = WindowPlan([0, 1], None)
    plan.command([first, others])
    assert not plan.stop(2)
    assert plan.stop(5)
    assert not plan.stop(6), "it is over already"
    assert (plan.commanded_level(6), plan.has_stopped(6), plan.has_stopped(13)) == (TraceLevel.PHASE, True, False)
    again = CommandedWindow(from_step=6, steps=2, level=TraceLevel.COLLECTIVE)
    plan.command([first, others, again])
    assert [plan.commanded_level(step) for step in (5, 6, 8)] == [
        TraceLevel.PHASE,
        TraceLevel.COLLECTIVE,
        TraceLevel.PHASE,
    ]
    plan.command([again])
    assert not plan.has_stopped(6)
    plan.command([first])
    assert plan.commanded_level(6) is TraceLevel.LAYER, "ordered anew, after it was taken back"


def test_the_log_has_the_cost_of_all_records_when_it_is_above_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    count, messages = 1_000, []
    cost = TracingCost(0.01, 2_000.0, lambda: count)
    for step in range(1, 4 * COST_STEPS + 1):
        count += 10 if step <= 2 * COST_STEPS else 1
        cost.step_done(step, MS)
        messages.append(len(caplog.records))
    assert [messages.index(number) + 1 for number in (1, 2)] == [COST_STEPS, 3 * COST_STEPS]
    warning, info = caplog.records
    assert (warning.levelno, info.levelno) == (logging.WARNING, logging.INFO)
    assert (
        "step 100: tracing has cost 2 % of the last 100 steps, above --trace-budget 1: 10 records a step" in caplog.text
    )


def test_a_ring_that_cannot_be_read_ends_the_measurement(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([5])

    def count() -> int:
        for answer in answers:
            return answer
        raise RingError("the file has shrunk")

    cost = TracingCost(0.01, 1e9, count)
    for step in range(3 * COST_STEPS):
        cost.step_done(step, MS)
    assert [record.message for record in caplog.records] == ["what tracing costs is not measured: the file has shrunk"]


def train_at_cost(flags: str, pages: late_pages.Pages, costs_ns: list[float]) -> dict[str, Any]:
    """Train with windows on the page of this rank, and a cost of a span by rank. `log`: of the tracer."""
    import os

    from megatronapp_trainer.scan import assemble
    from megatronapp_trainer.scan.windows import budget

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    logger = logging.getLogger("megatronapp_trainer.scan")
    logger.addHandler(Lines())
    logger.setLevel(logging.INFO)
    cost_ns = costs_ns[int(os.environ["RANK"])]
    replaced: Any = assemble
    replaced.span_cost_ns = lambda *_arguments: cost_ns
    budget.COST_STEPS = 2
    late_pages.install(pages)
    return traced_training.train(flags.split()) | {"log": lines}


def trained(
    run_ranks: RunRanks, folder: pathlib.Path, flags: str, costs_ns: list[float], windows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    flags = f"--trace --global-batch-size {2 * MICROBATCHES} {flags}"
    pages = [{0: windows}] * len(costs_ns)
    return run_ranks(len(costs_ns), train_at_cost, flags, pages, costs_ns, environment=environment)


def detailed_steps(result: dict[str, Any]) -> set[int]:
    found = records(result)
    kinds = [RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD]
    return set(found["step"][np.isin(found["kind"], kinds)].tolist())


@pytest.mark.torch
def test_an_ordered_window_that_costs_too_much_stops(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    for result in trained(run_ranks, tmp_path, TENSOR, [1e9, 1e9], ORDERED):
        assert detailed_steps(result) == {1, 2}, "the cost of step 1 is known when the ranks have agreed on step 2"
        (line,) = [line for line in result["log"] if "ordered window" in line]
        assert line.startswith("step 3: the ordered window stopped before this step: tracing used ")
        assert any("tracing has cost" in line for line in result["log"])


@pytest.mark.torch
def test_a_group_records_a_window_until_the_last_of_its_ranks_stops_it(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    dear, cheap = trained(run_ranks, tmp_path, TENSOR, [1e9, 1.0], ORDERED)
    assert detailed_steps(dear) == detailed_steps(cheap) == set(range(1, STEPS))
    assert any("ordered window stopped" in line for line in dear["log"])
    assert not any("only other ranks" in line for line in dear["log"])
    assert not any("window" in line for line in cheap["log"])


@pytest.mark.torch
def test_windows_of_files_are_recorded_at_any_cost_with_a_warning(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"--trace-interval 2 --trace-dir {tmp_path / 'files'}"
    (result,) = trained(run_ranks, tmp_path, flags, [1e9], [])
    assert detailed_steps(result) == set(range(1, STEPS, 2))
    assert [line for line in result["log"] if "recorded all the same" in line]
