"""Steps in detail, which cost their ranks time: no finding, and no silence of the detector for long."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.detect import engine
from megatronapp_analyzer.detect.causes.layer_parts import LayerParts
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import RecordKind, pass_ordinal

LAYOUT = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2)


def in_detail(view: StepRecords) -> StepRecords:
    """Return the step with a span of a layer in each forward pass of rank 1."""
    layers = view.records[(view.records["kind"] == RecordKind.FORWARD) & (view.records["rank"] == 1)].copy()
    layers["kind"] = RecordKind.LAYER_FORWARD
    records = np.concatenate([view.records, layers])
    return dataclasses.replace(view, records=records[np.lexsort((records["start_ns"], records["rank"]))])


def with_all_collectives(view: StepRecords) -> StepRecords:
    """Return the step with two collectives over the tensor group in each forward pass of rank 1."""
    forwards = view.records[(view.records["kind"] == RecordKind.FORWARD) & (view.records["rank"] == 1)]
    records = [view.records]
    for number in range(2):
        collectives = forwards.copy()
        collectives["kind"] = RecordKind.TP_REDUCE
        for place, forward in enumerate(forwards):
            where = int(forward["chunk"]), int(forward["microbatch"])
            collectives["ordinal"][place] = pass_ordinal(RecordKind.FORWARD, *where, number)
        records.append(collectives)
    joined = np.concatenate(records)
    return dataclasses.replace(view, records=joined[np.lexsort((joined["start_ns"], joined["rank"]))])


@pytest.fixture
def steps(sim: ModuleType) -> Callable[[float], list[StepRecords]]:
    """Steps of a job whose rank 1 is slower by a factor."""

    def run(factor: float) -> list[StepRecords]:
        slow = sim.Fault(rank=1, kind="compute", factor=factor)
        return list(sim.Simulator(sim.Job(layout=LAYOUT, noise=sim.GPU, faults=(slow,)), 1).steps(0, 60))

    return run


@pytest.mark.parametrize("detailed", [in_detail, with_all_collectives])
def test_a_window_in_detail_is_no_finding(
    steps: Callable[..., list[StepRecords]],
    judge: Callable[..., Any],
    detailed: Callable[[StepRecords], StepRecords],
) -> None:
    plain, slower = steps(1.0), steps(1.2)
    views = [detailed(slower[step]) if 25 <= step < 45 else plain[step] for step in range(60)]
    assert judge(LAYOUT, views).verdicts == []


def test_a_fault_after_a_window_is_found(steps: Callable[..., list[StepRecords]], judge: Callable[..., Any]) -> None:
    plain, slower = steps(1.0), steps(1.2)
    views = [in_detail(slower[step]) if 25 <= step < 30 else (plain, slower)[step >= 40][step] for step in range(60)]
    run = judge(LAYOUT, views)
    assert run.subjects == {("rank", (1,), "compute")}
    assert run.first_step() >= 40


def test_layers_of_captured_steps_are_not_read(
    steps: Callable[..., list[StepRecords]], judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks lengthen what they are on, norms as much as MLPs, which do much more."""
    read: list[int] = []
    monkeypatch.setattr(LayerParts, "read", lambda self, view, healthy: read.append(view.step))
    views = [in_detail(view) if view.step >= 5 else view for view in steps(1.0)[:9]]
    views[7].records["kind"][views[7].records["kind"] == RecordKind.OPTIMIZER] = RecordKind.CAPTURE
    judge(LAYOUT, views)
    assert read == [4, 5, 6, 8]


def test_a_long_window_is_judged_by_itself(
    steps: Callable[..., list[StepRecords]], judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOST_UNLIKE", 5)
    plain, slower = steps(1.0), steps(1.2)
    views = [in_detail((plain, slower)[step >= 45][step]) if step >= 20 else plain[step] for step in range(60)]
    run = judge(LAYOUT, views)
    assert run.subjects == {("rank", (1,), "compute")}
    assert run.first_step() >= 45
