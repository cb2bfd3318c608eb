"""A rank or stage that has more work by design is no finding; a stage without peers is left open."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.model import JobLayout
from megatronapp_common.trace import RecordKind

Watch = Callable[..., Any]


def test_a_heavy_last_stage_with_peers_is_no_finding(watch: Watch) -> None:
    assert watch(JobLayout.grid(dp=2, pp=2, ranks_per_worker=2), stage_weight=(1.0, 2.5)).verdicts == []


@pytest.mark.full("variants of a simulated job")
@pytest.mark.parametrize(("is_vee", "heavy", "is_found"), [(False, 3, False), (False, 0, True), (True, 0, False)])
def test_the_stage_with_the_vocabulary_is_no_finding(watch: Watch, is_vee: bool, heavy: int, is_found: bool) -> None:
    layout = dataclasses.replace(JobLayout.grid(pp=4, ranks_per_worker=2), is_vee=is_vee)
    run = watch(layout, stage_weight=tuple(2.2 if stage == heavy else 1.0 for stage in range(4)))
    assert run.subjects == ({("stage", (heavy,), "undetermined")} if is_found else set())


@pytest.mark.parametrize("kind", [RecordKind.CAPTURE, RecordKind.PERTURB])
def test_a_rank_that_is_slow_in_captured_or_perturbed_steps_alone_is_not_named(
    sim: ModuleType, judge: Callable[..., Any], kind: RecordKind
) -> None:
    layout = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2)
    fault = sim.Fault(rank=0, kind="compute", factor=3.0, from_step=25)
    views = list(sim.Simulator(sim.Job(layout=layout, noise=sim.SHARED_CPU, faults=(fault,)), 1).steps(0, 45))
    assert judge(layout, views).subjects == {("rank", (0,), "compute")}
    for place, view in enumerate(views):
        span = view.records[view.records["kind"] == RecordKind.STEP][: view.step >= 25].copy()
        span["kind"] = kind
        views[place] = dataclasses.replace(view, records=np.concatenate((view.records, span)))
    assert judge(layout, views).verdicts == []
