"""Records of a pod's containers: only real problems are reported, and only what prepares a worker is waited for."""

from typing import Any

import pytest

from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.observe import PollResult, observe
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod


def pod(kind: str = "worker", *, init: tuple[Object, ...] = (), **status: Any) -> Object:
    labels = {"job-name": "job", "job-uid": "job-uid", "replica-type": kind}
    metadata = {
        "name": "job-it",
        "namespace": "here",
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2026-11-22T03:00:00Z",
        "labels": {f"megatronapp.io/{name}": value for name, value in labels.items()},
        "ownerReferences": [{"uid": "job-uid"}],
    }
    spec = {"containers": [{"name": "trainer"}, {"name": "agent"}], "initContainers": list(init)}
    return {"metadata": metadata, "spec": spec, "status": status}


def record(made: Object) -> PodRecord:
    found = read_pod(made)
    assert found is not None
    return found


def with_agent(**ended: Any) -> Object:
    trainer = {"name": "trainer", "state": {"running": {}}}
    return pod(containerStatuses=[trainer, {"name": "agent", "state": {"terminated": ended}}])


def test_an_agent_that_ends_in_order_is_no_problem() -> None:
    assert record(with_agent(exitCode=0)).agent_problem is None
    assert record(with_agent(exitCode=1, message="no hub")).agent_problem == "agent ended with code 1: no hub"
    going = with_agent(exitCode=143)
    going["metadata"] |= {"deletionTimestamp": "2026-11-22T03:10:00Z", "deletionGracePeriodSeconds": 30}
    assert record(going).agent_problem is None


PROXY = {"name": "istio-proxy", "restartPolicy": "Always"}
DATA = {"name": "init-data"}


@pytest.mark.parametrize("kind", ["worker", "init"])
def test_a_sidecar_that_runs_prepares_nothing(kind: str) -> None:
    proxy = {"name": "istio-proxy", "state": {"running": {"startedAt": "2026-11-22T03:01:00Z"}}}
    made = pod(kind, init=(PROXY, DATA), initContainerStatuses=[proxy])
    assert not _preparing(made)
    data = {"name": "init-data", "state": {"running": {}}}
    made["status"]["initContainerStatuses"] = [proxy, data]
    assert _preparing(made)
    ended = {"terminated": {"exitCode": 0, "finishedAt": "2026-11-22T03:02:00Z"}}
    made["status"]["initContainerStatuses"] = [proxy | {"state": ended}]
    assert record(made).main.prepared_at is None
    made["status"]["initContainerStatuses"] = [proxy, data | {"state": ended}]
    assert not _preparing(made) and record(made).main.prepared_at is not None


def _preparing(made: Object) -> bool:
    seen = observe([record(made)], PollResult(), attempt=0, refusal=None)
    return (seen.workers or (seen.init,))[0].preparing  # type: ignore[union-attr]


def test_the_ready_time_of_a_worker_is_its_first_contact() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-22T03:07:00Z"}
    made = record(pod(conditions=[ready]))
    (seen,) = observe([made], PollResult(), attempt=0, refusal=None).workers
    assert seen.reachable_since == made.created_at + 7 * 60
    assert record(pod(conditions=[ready | {"status": "False"}])).reachable_since is None
