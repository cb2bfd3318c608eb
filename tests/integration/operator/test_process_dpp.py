"""MegaDPP from manifest to weights: the job of examples/dpp.yaml, run by `megatronapp run` with real ranks."""

import pathlib
from typing import Any

import pytest
from example_runs import QUIET, STEPS, ExampleRuns

pytestmark = [pytest.mark.process, pytest.mark.torch]


@pytest.mark.full("schedules of ranks are compared in test_dynamic_schedules")
def test_the_example_has_the_losses_of_the_same_job_without_it(forkserver: Any, tmp_path: pathlib.Path) -> None:
    runs = ExampleRuns(forkserver, tmp_path)
    # MegatronApp's flags about nodes, as the launcher of a laptop has them
    nodes = ("--num-gpus", "4", "--node-ips", ",".join(["127.0.0.2"] * 4))
    dynamic = runs.losses("dpp", "dynamic", *nodes)
    static = runs.losses("dpp", "static", dpp=None, parallelism={"virtualPipeline": 2}, **QUIET)
    assert len(dynamic) == STEPS
    assert dynamic == static
