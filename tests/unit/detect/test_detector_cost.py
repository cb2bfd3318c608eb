"""Cost of a fault: no verdict without a cost, and the cost is what the fault adds to a step."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.detect import engine
from megatronapp_analyzer.errors import GraphError
from megatronapp_analyzer.graph.build import StepGraph, build_matched
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import JobLayout

DP2_PP2 = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2)


@pytest.mark.parametrize(("messages", "named"), [(4, {("link", (0, 1), "nvlink-pcie")}), (32, set())])
def test_late_messages_that_nothing_waits_for_are_not_named(
    watch: Callable[..., Any], sim: ModuleType, messages: int, named: set[Any]
) -> None:
    late = sim.Fault(rank=1, kind="link", factor=1.5, from_step=20, peer=0)
    heavy_end = {"noise": sim.GPU, "stage_weight": (1.0, 1.0, 1.0, 2.2), "microbatches": messages}
    assert watch(JobLayout.grid(pp=4, ranks_per_worker=2), faults=(late,), **heavy_end).subjects == named


def test_the_cost_is_what_the_fault_adds_to_a_step(sim: ModuleType, judge: Callable[..., Any]) -> None:
    fault = sim.Fault(rank=1, kind="compute", factor=3.0, from_step=20)
    for kind, expected in (("compute", "compute"), ("host", "host"), ("link", "link")):
        fault_on_rank_1 = dataclasses.replace(fault, kind=kind, rank=1)
        lengths = []
        for faults in ((), (fault_on_rank_1,)):
            simulator = sim.Simulator(sim.Job(layout=DP2_PP2, microbatches=8, faults=faults), 1)
            views = list(simulator.steps(0, 40))
            lengths.append(np.median([view.end_ns - view.start_ns for view in views[25:]]) * 1e-9)
        run = judge(DP2_PP2, views)
        assert str(run.last.cause) == expected
        assert run.last.seconds_per_step == pytest.approx(lengths[1] - lengths[0], rel=0.05)


def test_only_steps_in_which_a_fault_is_active_add_to_its_cost(sim: ModuleType, judge: Callable[..., Any]) -> None:
    simulators = [
        sim.Simulator(sim.Job(layout=DP2_PP2, microbatches=8, noise=sim.GPU, faults=faults), 1)
        for faults in ((), (sim.Fault(rank=1, kind="compute", factor=2.0, from_step=0),))
    ]
    healthy, faulty = ([*simulator.steps(0, 60)] for simulator in simulators)
    active = {step for step in range(20, 60) if step % 10 < 6}
    run = judge(DP2_PP2, [faulty[step] if step in active else healthy[step] for step in range(60)])
    lost_s = sum(
        (faulty[step].end_ns - faulty[step].start_ns - (healthy[step].end_ns - healthy[step].start_ns)) * 1e-9
        for step in active
    )
    found: dict[str, float] = {verdict.id: verdict.seconds_lost for _, verdict in run.verdicts}
    assert sum(found.values()) == pytest.approx(lost_s, rel=0.15)


def test_two_equally_slow_ranks_split_their_common_cost(sim: ModuleType, judge: Callable[..., Any]) -> None:
    both = tuple(sim.Fault(rank=rank, kind="compute", factor=2.0, from_step=20) for rank in (0, 3))
    lengths = []
    for faults in ((), both):
        simulator = sim.Simulator(sim.Job(layout=DP2_PP2, microbatches=8, noise=sim.GPU, faults=faults), 1)
        views = list(simulator.steps(0, 40))
        lengths.append(np.median([view.end_ns - view.start_ns for view in views[25:]]) * 1e-9)
    latest = {verdict.subject.ranks: verdict.seconds_per_step for _, verdict in judge(DP2_PP2, views).verdicts}
    assert set(latest) == {(0,), (3,)}
    assert sum(latest.values()) == pytest.approx(lengths[1] - lengths[0], rel=0.05)
    assert latest[(0,)] == pytest.approx(latest[(3,)], rel=0.2)


@pytest.mark.full("cases that differ in the kind of fault", but=("compute",))
@pytest.mark.parametrize("kind", ["compute", "host", "link"])
def test_a_suspect_is_named_only_once_steps_can_be_replayed(
    watch: Callable[..., Any], sim: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refused_before_step_40(step: MatchedStep, **options: Any) -> StepGraph:
        if step.view.step < 40:
            raise GraphError("operations depend on each other in a circle")
        return build_matched(step, **options)

    monkeypatch.setattr(engine, "build_matched", refused_before_step_40)
    fault = sim.Fault(rank=1, kind=kind, factor=3.0, from_step=20)
    run = watch(DP2_PP2, microbatches=8, faults=(fault,))
    assert run.first_step() > 40
    assert {str(verdict.cause) for _, verdict in run.verdicts} == {kind}
    assert all(verdict.seconds_per_step > 0 for _, verdict in run.verdicts)
