"""Nodes that are to be emptied, as the API server describes them, and checkpoints as ranks report them."""

from typing import Any

import pytest

from megatronapp_common.text.times import seconds_of
from megatronapp_operator.backends.kubernetes.leaving_nodes import why_leaving
from megatronapp_operator.plan_io.hub_summary import read_checkpoint, read_progress


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]}}, None),
        ({"spec": {"unschedulable": True}}, "is cordoned"),
        ({"metadata": {"deletionTimestamp": "2026-01-02T03:04:05Z"}}, "is being deleted"),
        (
            {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}},
            "is being removed by Cluster Autoscaler",
        ),
        (
            {"spec": {"unschedulable": True, "taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}},
            "is being removed by Karpenter",
        ),
    ],
)
def test_a_node_is_leaving_by_what_precedes_an_eviction(changes: dict[str, Any], why: str | None) -> None:
    assert why_leaving({"metadata": {}, "spec": {}} | changes) == why


def test_the_newest_checkpoint_of_a_progress_document_is_read() -> None:
    checkpoint = {"iteration": 20, "takenAt": "2026-01-02T03:04:05.900000Z", "pendingIteration": None}
    found = read_progress({"iteration": 23, "checkpoint": checkpoint})
    assert found is not None
    assert (found.checkpoint_iteration, found.checkpoint_time) == (20, seconds_of("2026-01-02T03:04:05Z"))


@pytest.mark.parametrize(
    "entry",
    [None, {}, 7, {"iteration": 20}, {"iteration": -1, "takenAt": "2026-01-02T03:04:05Z"},
     {"iteration": 20, "takenAt": None}, {"iteration": 20, "takenAt": "soon"}, {"iteration": None, "takenAt": None}],
)  # fmt: skip
def test_a_checkpoint_without_step_or_time_is_none(entry: Any) -> None:
    assert read_checkpoint(entry) == (None, None)
