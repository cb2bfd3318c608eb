"""Sizes of a gang that may get smaller: those that the rules accept as the smallest, each of which is a right job."""

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from rule_example import BASE

from megatronapp_common.errors import JobError
from megatronapp_common.job import load_job, reduced_sizes, resized


def elastic(**given: Any) -> dict[str, Any]:
    """Return a manifest of a gang that may get smaller, with replicas of one rank."""
    document = copy.deepcopy(BASE)
    spec: dict[str, Any] = document["spec"]
    data, per_node = given["data"], given["per_node"]
    spec |= {
        "nodes": data // per_node,
        "procPerNode": per_node,
        "parallelism": {"data": data, "expert": given["expert"]},
        "args": ["--num-experts", "2"],
        "checkpoint": {"save": "/c/run", "saveInterval": 1, "volume": {"claim": "c", "mountPath": "/c"}},
        "runPolicy": {"restart": "InPlace", "elastic": {"minData": given["least"]}},
    }
    spec["training"] |= {"globalBatchSize": given["batch"] * data, "microBatchSize": 1}
    if given["ramp"]:
        step = given["ramp"] * data
        spec["training"] |= {"globalBatchSize": 15 * step, "rampupBatchSize": [12 * step, step, 100]}
    return document


@settings(max_examples=examples(60), deadline=None)
@given(
    per_node=st.sampled_from([1, 2, 4]),
    nodes=st.integers(1, 8),
    expert=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 5, 6, 12]),
    ramp=st.sampled_from([0, 0, 1, 2, 6]),
)
def test_the_rules_accept_the_sizes_that_the_operator_may_choose(**sizes: int) -> None:
    data = sizes["per_node"] * sizes["nodes"]
    sizes |= {"data": data, "expert": sizes["expert"] if data % sizes["expert"] == 0 else 1}
    accepted = []
    for least in range(1, data + 1):
        try:
            job = load_job(elastic(**sizes, least=least))
        except JobError as error:
            assert all(problem.startswith("spec.runPolicy.elastic.minData") for problem in error.problems)
        else:
            accepted.append(least)
            assert reduced_sizes(job)[-1] == least
    if not accepted:
        return
    job = load_job(elastic(**sizes, least=accepted[0]))
    assert sorted(reduced_sizes(job)) == accepted
    for size in accepted:
        smaller = resized(job, size)
        assert smaller.world.data_parallel_size == size
        assert smaller.world.proc_per_node == (sizes["per_node"],) * (size // sizes["per_node"])
        assert smaller.spec.training == job.spec.training
        document = smaller.model_dump(mode="json", by_alias=True, exclude_unset=True)
        document["spec"]["runPolicy"].pop("elastic")
        load_job(document)  # as right as a job that a user writes


def test_an_interleaved_schedule_needs_whole_rounds_of_microbatches_in_each_step_of_the_ramp_up() -> None:
    right = elastic(data=4, per_node=1, expert=1, batch=1, ramp=0, least=1)
    spec = right["spec"]
    spec |= {"procPerNode": 3, "parallelism": {"data": 4, "pipeline": 3}}
    spec["model"] |= {"numLayers": 6}
    spec["training"] |= {"globalBatchSize": 36, "rampupBatchSize": [12, 12, 100]}
    assert reduced_sizes(load_job(right)) == (3, 2, 1)
    spec["parallelism"]["virtualPipeline"] = 2
    assert reduced_sizes(load_job(right)) == (2, 1)
    spec["runPolicy"]["elastic"]["minData"] = 3
    with pytest.raises(JobError, match=re.escape("possible up to 16: [1, 2]")):
        load_job(right)


def test_a_job_that_an_accepting_cluster_lets_pass_keeps_its_size() -> None:
    right = elastic(data=4, per_node=1, expert=1, batch=3, ramp=0, least=1)
    job = load_job(right)
    assert reduced_sizes(job) == (3, 2, 1)
    for change in ({"restart": "Pods"}, {"elastic": None}):
        policy = job.spec.run_policy.model_copy(update=change)
        assert reduced_sizes(job.model_copy(update={"spec": job.spec.model_copy(update={"run_policy": policy})})) == ()
    assert resized(job, 4) is job
