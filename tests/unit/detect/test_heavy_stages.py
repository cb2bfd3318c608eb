"""A stage that has more work by design is no finding; another one without peers is left open."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_analyzer.model import JobLayout

Watch = Callable[..., Any]


def test_a_heavy_last_stage_with_peers_is_no_finding(watch: Watch) -> None:
    assert watch(JobLayout.grid(dp=2, pp=2, ranks_per_worker=2), stage_weight=(1.0, 2.5)).verdicts == []


@pytest.mark.full("variants of a simulated job")
@pytest.mark.parametrize(("is_vee", "heavy", "is_found"), [(False, 3, False), (False, 0, True), (True, 0, False)])
def test_the_stage_with_the_vocabulary_is_no_finding(watch: Watch, is_vee: bool, heavy: int, is_found: bool) -> None:
    layout = dataclasses.replace(JobLayout.grid(pp=4, ranks_per_worker=2), is_vee=is_vee)
    run = watch(layout, stage_weight=tuple(2.2 if stage == heavy else 1.0 for stage in range(4)))
    assert run.subjects == ({("stage", (heavy,), "undetermined")} if is_found else set())
