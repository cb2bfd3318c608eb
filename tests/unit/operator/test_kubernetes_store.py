"""Store of jobs and pods: its content does not depend on the order of events, and late events revive nothing."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.observe import PollResult, observe
from megatronapp_operator.backends.kubernetes.pod_record import read_pod
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.plan import HubPhase, WorkerOutcome, WorkerPhase

LABELS = {
    "megatronapp.io/job-name": "job",
    "megatronapp.io/job-uid": "job-uid",
    "megatronapp.io/replica-type": "worker",
    "megatronapp.io/replica-index": "3",
    "megatronapp.io/attempt": "2",
}


def pod(name: str = "job-worker-3", *, uid: str = "u", version: int = 1, **status: Any) -> Object:
    metadata = {
        "name": name,
        "namespace": "here",
        "uid": uid,
        "resourceVersion": str(version),
        "creationTimestamp": "2026-11-22T03:00:00Z",
        "labels": dict(LABELS),
        "ownerReferences": [{"uid": "job-uid"}],
    }
    containers = [{"name": "trainer"}, {"name": "agent"}]
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}, "status": status}


def state(name: str = "trainer", **states: Any) -> Object:
    return {"containerStatuses": [{"name": "agent", "state": {"running": {}}}, {"name": name, "state": states}]}


def worker(**status: Any) -> Any:
    record = read_pod(pod(**status))
    assert record is not None
    seen = observe([record], PollResult(), attempt=2, refusal=None)
    return seen.workers[0]


@given(st.permutations(range(6)), st.integers(0, 6))
def test_the_newest_version_wins_in_any_order(order: list[int], until: int) -> None:
    store = ObjectStore()
    versions = [pod(version=number, phase=f"P{number}") for number in range(6)]
    for number in order[:until]:
        store.put_pod(versions[number])
    newest = max(order[:until], default=None)
    assert [pod.phase for pod in store.pods("here", "job-uid")] == ([] if newest is None else [f"P{newest}"])


@given(st.permutations(["first", "second", "gone"]))
def test_a_deleted_pod_stays_deleted_whatever_arrives_late(order: list[str]) -> None:
    store = ObjectStore()
    for event in order:
        if event == "gone":
            store.drop_pod(pod(version=9))
        else:
            store.put_pod(pod(version=1 if event == "first" else 2))
    assert store.pods("here", "job-uid") == []
    assert store.put_pod(pod(uid="next", version=3)) == ("here", "job")
    assert [pod.uid for pod in store.pods("here", "job-uid")] == ["next"]


def test_a_pod_whose_labels_were_restored_is_known_again() -> None:
    store, unlabelled = ObjectStore(), pod(version=4)
    unlabelled["metadata"]["labels"] = {}
    store.put_pod(pod(version=2))
    store.drop_pod(pod(version=3))
    assert store.put_pod(pod(version=3)) is None and store.put_pod(pod(version=5)) == ("here", "job")
    store.replace_pods([read_pod(unlabelled)], 8)
    assert store.put_pod(pod(version=8)) is None and store.put_pod(pod(version=9)) == ("here", "job")
    record = read_pod(pod(version=9))
    assert record is not None and store.drop_record(record) == ("here", "job")
    assert store.put_pod(pod(version=10)) is None, "it does not exist, whatever a late event says"


def test_a_list_removes_older_pods_and_leaves_newer_ones() -> None:
    store = ObjectStore()
    store.put_pod(pod("a", uid="a", version=5))
    store.put_pod(pod("b", uid="b", version=20))
    assert store.replace_pods([read_pod(pod("c", uid="c", version=8))], 10) == {("here", "job")}
    assert sorted(pod.name for pod in store.pods("here", "job-uid")) == ["b", "c"]


def test_a_job_of_the_same_name_is_another_job() -> None:
    store = ObjectStore()
    old: Object = {"metadata": {"namespace": "n", "name": "j", "uid": "old", "resourceVersion": "7"}, "spec": {}}
    new = copy.deepcopy(old)
    new["metadata"] |= {"uid": "new", "resourceVersion": "9"}
    assert store.put_job(old) == ("n", "j")
    assert store.put_job(copy.deepcopy(old)) is None
    assert store.put_job(new) == ("n", "j")
    assert store.drop_job(old) is None
    found = store.job(("n", "j"))
    assert found is not None and found["metadata"]["uid"] == "new"
    assert store.replace_jobs([], 9) == {("n", "j")} and store.keys == []


def test_pods_with_forged_job_labels_are_ignored() -> None:
    store, forged = ObjectStore(), pod(uid="forged", version=99)
    store.put_pod(pod())
    forged["metadata"]["namespace"] = "elsewhere"
    store.put_pod(forged)
    assert [pod.uid for pod in store.pods("here", "job-uid")] == ["u"]
    assert store.replace_pods([read_pod(pod(version=2))], 100, only=("here", "job-uid")) == {("here", "job")}
    ownerless = pod()
    del ownerless["metadata"]["ownerReferences"]
    assert read_pod(ownerless) is None


@pytest.mark.parametrize("text", ["[" * 4000, "{" * 4000, '{"rank": 1e999, "code": []}'])
def test_whatever_a_pod_has_left_it_is_read(text: str) -> None:
    ended = {"exitCode": 3, "reason": "Error", "message": text}
    assert worker(phase="Running", **state(terminated=ended)).phase is WorkerPhase.FAILED


@pytest.mark.parametrize("annotations", [{"megatronapp.io/starts": "boom"}, 3])
def test_a_pod_of_a_wrong_shape_is_none_of_ours(annotations: object) -> None:
    odd = pod()
    odd["metadata"]["annotations"] = annotations
    assert read_pod(odd) is None


@pytest.mark.parametrize("change", [{"megatronapp.io/replica-index": "x"}, {"megatronapp.io/replica-type": "other"}])
def test_a_pod_with_labels_of_another_kind_is_none_of_ours(change: dict[str, str]) -> None:
    stranger = pod()
    stranger["metadata"]["labels"] |= change
    assert read_pod(stranger) is None
    assert ObjectStore().put_pod(stranger) is None


def test_a_worker_has_ended_when_its_trainer_has_whatever_the_agent_does() -> None:
    record = {"code": 66, "reason": "RankFailed", "message": "loss is NaN", "rank": 3, "signal": None}
    ended = {"exitCode": 66, "finishedAt": "2026-11-22T03:05:00Z", "reason": "Error", "message": json.dumps(record)}
    seen = worker(phase="Running", **state(terminated=ended))
    assert seen.phase is WorkerPhase.FAILED and seen.finished_at is not None
    assert seen.outcome == WorkerOutcome(code=66, reason="RankFailed", message="loss is NaN", rank=3)


KILLED = "the launcher died"


@pytest.mark.parametrize(
    ("code", "reason", "message", "expected"),
    [
        (137, "OOMKilled", "", WorkerOutcome(code=137, reason="OOMKilled", message=KILLED, signal=9)),
        (137, "Error", "", WorkerOutcome(code=137, reason="LauncherKilled", message=KILLED, signal=9)),
        (2, "Error", "no module", WorkerOutcome(code=2, reason="LauncherFailed", message="no module")),
        (128, "StartError", "no such file", WorkerOutcome(code=128, reason="StartError", message="no such file")),
        (0, "Completed", "{]", WorkerOutcome(code=0, reason="Completed", message="{]")),
    ],
)
def test_how_a_container_without_a_record_ended(code: int, reason: str, message: str, expected: WorkerOutcome) -> None:
    ended = {"exitCode": code, "reason": reason, "message": message}
    assert worker(phase="Running", **state(terminated=ended)).outcome == expected


def test_an_evicted_pod_was_disrupted_and_failed_without_a_container() -> None:
    seen = worker(phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert (seen.phase, seen.disrupted) == (WorkerPhase.FAILED, "Evicted")
    assert seen.outcome is not None and "low on resource" in seen.outcome.message
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    assert worker(phase="Running", conditions=[target]).disrupted == "PreemptionByScheduler"
    by_kueue = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvictedDueToPreempted"}
    assert worker(phase="Running", conditions=[by_kueue]).disrupted == "WorkloadEvictedDueToPreempted"
    assert worker(phase="Running", conditions=[by_kueue | {"status": "False"}]).disrupted is None


def test_a_container_that_cannot_start_is_reported_after_its_preparation() -> None:
    pull = {"reason": "ImagePullBackOff", "message": "not found"}
    assert worker(phase="Pending", **state(waiting={"reason": "ContainerCreating"})).waiting is None
    assert worker(phase="Pending", **state(waiting=pull)).waiting == "trainer: ImagePullBackOff: not found"
    assert worker(phase="Running", **state("agent", waiting=pull)).waiting is None


def test_since_when_a_pod_is_to_go() -> None:
    going = pod()
    going["metadata"] |= {"deletionTimestamp": "2026-11-22T03:10:00Z", "deletionGracePeriodSeconds": 600}
    record = read_pod(going)
    assert record is not None and record.deleted_at is not None
    assert record.deleted_at == record.created_at
    seen = observe([record], PollResult(), attempt=2, refusal=None).workers[0].deletion
    assert seen is not None and (seen.since, seen.grace_s) == (record.created_at, 600)


@pytest.mark.parametrize(
    ("phase", "ready", "expected"),
    [("Running", "True", HubPhase.READY), ("Running", "False", HubPhase.STARTING), ("Failed", "False", HubPhase.ENDED)],
)
def test_the_phases_of_a_hub(phase: str, ready: str, expected: HubPhase) -> None:
    hub = pod("job-hub", phase=phase, conditions=[{"type": "Ready", "status": ready}])
    hub["metadata"]["labels"] |= {"megatronapp.io/replica-type": ReplicaType.HUB.value}
    record = read_pod(hub)
    assert record is not None
    seen = observe([record], PollResult(), attempt=0, refusal=None)
    assert seen.hub is not None and seen.hub.phase is expected


def condition(kind: str, status: str, **others: str) -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": "2026-11-22T03:07:00Z", **others}


READY, CONTAINERS_READY = condition("Ready", "True"), condition("ContainersReady", "True")
TAKEN_BACK = condition("Ready", "False")


@pytest.mark.parametrize(
    ("conditions", "reason", "lost"),
    [
        ([TAKEN_BACK, CONTAINERS_READY], None, True),  # as the node controller leaves it
        ([READY, CONTAINERS_READY], None, False),
        (
            [condition("Ready", "False", reason="ContainersNotReady"), condition("ContainersReady", "False")],
            None,
            False,
        ),
        ([condition("Ready", "False", reason="ReadinessGatesNotReady"), CONTAINERS_READY], None, False),
        ([condition("Ready", "False", reason="PodCompleted"), condition("ContainersReady", "False")], None, False),
        ([condition("Ready", "Unknown", reason="x")], "NodeLost", True),
        ([], None, False),
    ],
    ids=str,
)
def test_an_unreachable_node_is_seen_at_its_pods(conditions: list[Object], reason: str | None, lost: bool) -> None:
    seen = worker(phase="Running", conditions=conditions, reason=reason, **state(running={}))
    assert (seen.unreachable_since is not None) is lost and seen.phase is WorkerPhase.RUNNING
    if lost:
        assert seen.unreachable_since - read_pod(pod()).created_at == 7 * 60  # type: ignore[union-attr]


@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError", "TopologyAffinityError"])
def test_a_pod_refused_by_the_kubelet_has_its_reason_and_is_no_disruption(reason: str) -> None:
    assert worker(phase="Failed", reason="NodeShutdown").disrupted == "NodeShutdown"
    refused = worker(phase="Failed", reason=reason)
    assert refused.disrupted is None and refused.outcome is not None and refused.outcome.reason == reason


def test_a_worker_that_receives_its_data_is_distinguished_from_a_waiting_worker() -> None:
    before = {"name": "init-data", "state": {"running": {}}}
    busy = worker(phase="Pending", initContainerStatuses=[before], **state(waiting={"reason": "PodInitializing"}))
    assert (busy.preparing, busy.prepared_at, busy.waiting) == (True, None, None)
    before["state"] = {"terminated": {"exitCode": 0, "finishedAt": "2026-11-22T03:01:00Z"}}
    done = worker(phase="Pending", initContainerStatuses=[before], **state(waiting={"reason": "PodInitializing"}))
    assert not done.preparing and done.prepared_at is not None


def observed(kind: ReplicaType, **status: Any) -> Any:
    made = pod("job-it", **status)
    made["metadata"]["labels"] |= {"megatronapp.io/replica-type": kind.value}
    record = read_pod(made)
    assert record is not None
    return observe([record], PollResult(), attempt=0, refusal=None)


def test_a_hub_that_does_not_start_has_a_reason_for_programs() -> None:
    unplaced = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes are available")
    assert observed(ReplicaType.HUB, conditions=[unplaced]).hub.waiting == "Unschedulable: 0/3 nodes are available"
    gated = condition("PodScheduled", "False", reason="SchedulingGated")
    assert observed(ReplicaType.HUB, conditions=[gated]).hub.waiting is None
    ended = {"lastState": {"terminated": {"exitCode": 1, "message": "Traceback\nOSError: No space left\n"}}}
    loop = {"name": "trainer", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}}
    hub = observed(ReplicaType.HUB, phase="Running", containerStatuses=[loop | ended]).hub
    assert hub.waiting == "CrashLoopBackOff: it ended with code 1: OSError: No space left"


def test_an_initializer_is_seen_with_its_node_and_its_end() -> None:
    placed = condition("PodScheduled", "True")
    first = {"name": "init-a", "state": {"terminated": {"exitCode": 0, "finishedAt": "2026-11-22T03:09:00Z"}}}
    init = observed(
        ReplicaType.INIT, phase="Failed", reason="Evicted", message="low on resource", conditions=[placed],
        initContainerStatuses=[first],
    ).init  # fmt: skip
    assert (init.disrupted, init.message) == ("Evicted", "low on resource")
    assert init.begun_at - init.created_at == 7 * 60
    waiting = observed(
        ReplicaType.INIT, conditions=[condition("PodScheduled", "False", reason="Unschedulable", message="full")]
    ).init
    assert (waiting.scheduled, waiting.message) == (False, "full")
