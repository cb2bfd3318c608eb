"""The status that a backend writes, on a real API server: nothing of it is refused, dropped or changed."""

import dataclasses
from typing import Any

import kube
import pytest
import yaml

from megatronapp_common.job import EndedWorker, read_status, status_document
from megatronapp_operator.backends.kubernetes.client.resources import JOBS
from megatronapp_operator.plan import (
    Condition,
    ConditionType,
    ExcludedNode,
    Failure,
    FailureAction,
    Phase,
    Progress,
    Replicas,
    SlowNodeCost,
    SlowRank,
    Status,
)

SECOND = 1_700_000_000.0
MOMENT = 1_700_000_000.123456
ENDS = {ConditionType.COMPLETE, ConditionType.FAILED, ConditionType.SUSPENDED}
FIRST = Status(phase=Phase.PENDING, conditions=(), generation=1, replicas=Replicas(desired=2, pending=2))
RUNNING = Status(
    phase=Phase.RUNNING,
    conditions=tuple(
        Condition(type=kind, status=kind not in ENDS, reason="Seen", message="a sentence", since=SECOND, generation=1)
        for kind in ConditionType
    ),
    generation=1,
    attempt=2,
    restarts=2,
    restarts_towards_max=1,
    start_time=SECOND,
    attempt_time=MOMENT,
    holding_time=MOMENT,
    scheduled_time=MOMENT,
    running_time=SECOND,
    last_restart_time=MOMENT,
    released=3,
    released_time=MOMENT,
    initialized=True,
    init_restarts=1,
    init_failed_time=MOMENT,
    init_clearing=True,
    excluded_nodes=(ExcludedNode(node="gpu-7", reason="SlowNodeDetected", until=MOMENT),),
    succeeded=(0, 1, 2, 5),
    ended=(
        EndedWorker(
            index=3, started_at=SECOND, finished_at=MOMENT, node="gpu-1", disrupted="Evicted", deleted_at=MOMENT,
            grace_seconds=600.0, exit_code=137, reason="OOMKilled", message="words", rank=6, signal=9,
        ),
    ),
    progress_time=MOMENT,
    slow_node="gpu-7",
    progress=Progress(attempt=2, iteration=5, total_iterations=10, loss=1.25, tokens_per_second=1234.5),
    slow_ranks=(
        SlowRank(
            id="v1", subject="link", ranks=(0, 2), cause="link", state="confirmed", sentence="It is.", since_step=7,
            seconds_per_step=0.5, slowdown=1.5, worker=1, node="gpu-7", since_attempt=2, since_time=MOMENT,
        ),
    ),
    slow_nodes=(
        SlowNodeCost(
            node="gpu-7", ranks=(0, 2), causes=("compute", "host"), since=MOMENT, gpu_hours=1.75, cost=4.38
        ),
        SlowNodeCost(node="gpu-1"),
    ),
    hung_ranks=(3,),
    last_control=1_763_000_000_000,
    replicas=Replicas(desired=2, running=2),
    failures=(
        Failure(
            time=SECOND, attempt=1, reason="WorkerFailed", message="rank 3 on worker 1 failed\nmore words",
            action=FailureAction.RESTART, worker=1, node="gpu-1", rank=3, exit_code=1, signal=9,
        ),
    ),
)  # fmt: skip
FACTS = {
    "worldSize": 4,
    "dataParallelSize": 2,
    "fbd": {"forwardRanks": 2, "backwardRanks": 2, "backwardPerForward": 1},
    "hubUrl": "http://127.0.0.1:8080",
    "rankTable": {
        "attempt": 2,
        "digest": "abc",
        "masterAddr": "127.0.0.2",
        "masterPort": 29500,
        "workers": [
            {
                "index": 0,
                "address": "127.0.0.2",
                "node": "node-0",
                "ranks": [0, 1],
                "roles": ["backward", "forward"],
            }
        ],
    },
}
ENDED = dataclasses.replace(RUNNING, phase=Phase.SUCCEEDED, completion_time=MOMENT)
QUEUED = dataclasses.replace(FIRST, phase=Phase.QUEUED)


@pytest.mark.parametrize("status", [FIRST, QUEUED, RUNNING, ENDED], ids=lambda status: str(status.phase.value))
def test_a_status_is_stored_as_it_was_written_and_read_back(
    plane: kube.ControlPlane, namespace: str, status: Status
) -> None:
    job = yaml.safe_load((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    document: dict[str, Any] = status_document(status) | FACTS
    url, strict = JOBS.path(namespace), {"fieldValidation": "Strict"}
    with plane.client() as client:
        client.post(url, params=strict, json=job).raise_for_status()
        answer = client.patch(
            f"{url}/demo/status",
            params=strict,
            json={"status": document},
            headers={"Content-Type": "application/merge-patch+json"},
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == document
    assert read_status(answer.json()["status"]) == status
