"""Nodes in the status: which verdicts are about a node, and what it has cost."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.analyzer import SlowNodeCost, SlowRank
from megatronapp_common.job.api.status import Phase, Status
from megatronapp_operator.plan.policies.report import MAX_SLOW_NODES, ON_A_NODE, costs_by_node

SUBJECTS = ["rank", "worker", "node", "replica", "group", "link", "stage", "job"]
NODES = [f"gpu-{number}" for number in range(5)]
HOURS = st.none() | st.floats(0, 1e6).map(lambda hours: float(f"{hours:.3g}"))
VERDICTS = st.builds(
    SlowRank,
    id=st.uuids().map(str),
    subject=st.sampled_from(SUBJECTS),
    ranks=st.lists(st.integers(0, 63), max_size=4, unique=True).map(tuple),
    cause=st.sampled_from(["compute", "host", "data", "data-imbalance", "nvlink-pcie", "hang"]),
    state=st.sampled_from(["suspect", "confirmed", "recovering", "cleared"]),
    node=st.none() | st.just("") | st.sampled_from(NODES),
    since_time=st.none() | st.floats(0, 4e9).map(lambda seconds: round(seconds, 6)),
    gpu_hours=HOURS,
    cost=HOURS,
)


def about(node: str | None = "gpu-7", **changes: Any) -> SlowRank:
    """A confirmed verdict about a rank of this node."""
    verdict = SlowRank(id="v", subject="rank", ranks=(3,), cause="compute", state="confirmed", node=node, gpu_hours=1.0)
    return dataclasses.replace(verdict, **changes)


def counts(verdict: SlowRank) -> bool:
    """Return True for a verdict by which a node is slow, as the documentation describes it."""
    return (
        verdict.state in {"confirmed", "recovering"}
        and verdict.cause not in {"hang", "data-imbalance"}
        and verdict.subject not in {"link", "stage", "job"}
        and bool(verdict.node)
    )


def test_a_node_has_the_ranks_causes_and_costs_of_all_verdicts_about_it() -> None:
    verdicts = (
        about("gpu-1", ranks=(9,), cause="host", since_time=50.0, gpu_hours=0.5, cost=1.25),
        about("gpu-7", ranks=(3,), cause="memory", since_time=30.0, gpu_hours=1.5, cost=3.75),
        about("gpu-7", subject="worker", ranks=(2, 3), cause="compute", since_time=20.0, gpu_hours=0.25, cost=0.625),
    )
    assert costs_by_node(verdicts) == (
        SlowNodeCost(node="gpu-7", ranks=(2, 3), causes=("compute", "memory"), since=20.0, gpu_hours=1.75, cost=4.38),
        SlowNodeCost(node="gpu-1", ranks=(9,), causes=("host",), since=50.0, gpu_hours=0.5, cost=1.25),
    )


@pytest.mark.parametrize("subject", sorted(ON_A_NODE))
def test_subjects_within_a_node_make_it_slow(subject: str) -> None:
    assert [slow.node for slow in costs_by_node([about(subject=subject)])] == ["gpu-7"]


@pytest.mark.parametrize(
    "verdict",
    [
        about(None, subject="link", ranks=(1, 2), cause="link"),
        about(subject="link", ranks=(1, 2), cause="nvlink-pcie"),
        about(None, subject="group", ranks=(1, 2), cause="link"),
        about(None, subject="replica", ranks=(1, 2)),
        about(subject="stage", ranks=(1, 2), cause="undetermined"),
        about(subject="job", ranks=(0, 1), cause="regression"),
        about(subject="replica", ranks=(0, 1), cause="data-imbalance"),
        about(cause="hang"),
        about(state="suspect"),
        about(state="cleared"),
    ],
    ids=lambda verdict: f"{verdict.subject}-{verdict.cause}-{verdict.state}-{verdict.node}",
)
def test_other_verdicts_name_no_node(verdict: SlowRank) -> None:
    assert costs_by_node([verdict]) == ()


def test_costs_that_the_hub_does_not_know_are_absent() -> None:
    (slow,) = costs_by_node([about(gpu_hours=None), about(gpu_hours=2.0)])
    assert (slow.gpu_hours, slow.cost, slow.since) == (2.0, None, None)
    (unknown,) = costs_by_node([about(gpu_hours=None)])
    assert unknown.gpu_hours is None
    (endless,) = costs_by_node([about(gpu_hours=1.7e308), about(gpu_hours=1.7e308)])
    assert endless.gpu_hours is None, "JSON has no infinity"


def test_of_very_many_nodes_the_costliest_are_listed() -> None:
    found = costs_by_node(about(f"gpu-{number:02}", gpu_hours=float(number)) for number in range(MAX_SLOW_NODES + 8))
    assert len(found) == MAX_SLOW_NODES
    assert (found[0].node, found[-1].node) == ("gpu-39", "gpu-08")


@given(st.lists(VERDICTS, max_size=12))
def test_each_verdict_counts_once_and_for_its_node_alone(verdicts: list[SlowRank]) -> None:
    found = costs_by_node(verdicts)
    counted = [verdict for verdict in verdicts if counts(verdict)]
    assert {slow.node for slow in found} == {verdict.node for verdict in counted}
    assert len({slow.node for slow in found}) == len(found)
    assert [-(slow.gpu_hours or 0.0) for slow in found] == sorted(-(slow.gpu_hours or 0.0) for slow in found)
    for field in ("gpu_hours", "cost"):
        parts = [getattr(verdict, field) or 0.0 for verdict in counted]
        total = sum(getattr(slow, field) or 0.0 for slow in found)
        assert math.isclose(total, sum(parts), rel_tol=0.006, abs_tol=1e-300), "three digits of each sum"
    for slow in found:
        mine = [verdict for verdict in counted if verdict.node == slow.node]
        assert set(slow.ranks) == {rank for verdict in mine for rank in verdict.ranks}
        assert list(slow.ranks) == sorted(set(slow.ranks))
        assert set(slow.causes) == {verdict.cause for verdict in mine}
        times = [verdict.since_time for verdict in mine if verdict.since_time is not None]
        assert slow.since == min(times, default=None)


@given(st.lists(VERDICTS, max_size=6))
def test_the_nodes_are_read_from_a_status_as_they_were_written(verdicts: list[SlowRank]) -> None:
    status = Status(phase=Phase.RUNNING, slow_nodes=costs_by_node(verdicts))
    document = json.loads(json.dumps(status_document(status), allow_nan=False))
    assert read_status(document).slow_nodes == status.slow_nodes
    assert ("slowNodes" in document) == bool(status.slow_nodes)


def test_a_status_of_an_older_release_names_no_nodes_until_the_hub_answers() -> None:
    document = status_document(Status(phase=Phase.RUNNING, slow_ranks=(about(),), slow_node="gpu-7"))
    assert "slowNodes" not in document
    assert read_status(document).slow_nodes == ()


def test_a_node_without_a_name_is_absent() -> None:
    named = {"node": "gpu-7", "ranks": [3], "causes": ["compute"], "gpuHours": 1.5, "later": True}
    found = read_status({"slowNodes": [{"node": "", "ranks": [1]}, {"gpuHours": 1.0}, named]})
    assert found.slow_nodes == (SlowNodeCost(node="gpu-7", ranks=(3,), causes=("compute",), gpu_hours=1.5),)
