"""Status that the backend writes has the fields of its types (and so of the CRD)."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from megatronapp_common.job import Status, read_status, status_document
from megatronapp_common.job.api.analyzer import SlowNodeCost, SlowRank
from megatronapp_common.job.api.progress import Progress
from megatronapp_common.job.api.status import (
    Condition,
    ConditionType,
    Failure,
    FailureAction,
    Phase,
    Replicas,
)
from megatronapp_common.job.api.status_fields import MAX_COUNT
from megatronapp_operator import plan

ADAPTER = TypeAdapter(Status)
PINNED = {"attempt": 4, "trainerImage": "trainer", "analyzerImage": "analyzer"}
T0_S = 1_763_700_000.0


def full_status(phase: Phase) -> plan.Status:
    return plan.Status(
        phase=phase,
        conditions=tuple(
            Condition(type=kind, status=True, reason="R", message="m", since=T0_S, generation=1)
            for kind in ConditionType
        ),
        generation=1,
        attempt=2,
        restarts=2,
        restarts_towards_max=1,
        start_time=T0_S,
        running_time=T0_S,
        last_restart_time=T0_S,
        completion_time=T0_S,
        progress=Progress(attempt=2, iteration=7, total_iterations=9, loss=4.5, updated_at=T0_S),
        slow_ranks=(SlowRank(id="v", subject="rank", ranks=(1,), cause="compute", state="confirmed", sentence="s"),),
        slow_nodes=(SlowNodeCost(node="gpu-7", ranks=(1,), causes=("compute",), since=T0_S, gpu_hours=1.5, cost=3.75),),
        hung_ranks=(3,),
        replicas=Replicas(desired=2, running=2),
        failures=tuple(
            Failure(
                time=T0_S, attempt=0, reason="R", message="m", action=action, worker=1, rank=3, exit_code=1, signal=9
            )
            for action in FailureAction
        ),
    )


def test_every_status_of_the_backend_keeps_to_the_types() -> None:
    for phase in Phase:
        document = status_document(full_status(phase))
        assert status_document(ADAPTER.validate_json(json.dumps(document))) == document


def test_an_empty_status_keeps_to_the_types() -> None:
    document = status_document(plan.Status())
    assert status_document(ADAPTER.validate_json(json.dumps(document))) == document


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", [{"rankTable": {1: 2}}, {"progress": {1: 2}, "rankTable": {(): []}}])
def test_keys_that_are_no_text_are_absent(wrong: dict[str, Any]) -> None:
    assert read_status(wrong | {"restarts": 3}) == Status(restarts=3)
    assert read_status({1: 2}) == Status()


def test_a_slow_rank_without_id_is_absent() -> None:
    found = read_status({"slowRanks": [{"id": "", "cause": "compute"}, {"id": "v"}]})
    assert found.slow_ranks == (SlowRank(id="v"),)


@pytest.mark.parametrize(("given", "attempt"), [(3, 3), ("3", 3), (3.9, 3), (-3, 0), (2**40, MAX_COUNT)])
def test_a_number_that_is_no_count_is_read_as_the_count_next_to_it(given: object, attempt: int) -> None:
    found = read_status(
        {"attempt": given, "replicaStatuses": {"running": given}, "pinned": PINNED | {"attempt": given}}
    )
    assert found.attempt == found.replicas.running == attempt
    assert found.pinned is not None and found.pinned.attempt == attempt
    assert status_document(found)["attempt"] == attempt


@pytest.mark.parametrize("unreadable", [{}, {"attempt": None}, {"attempt": "x"}, {"attempt": float("nan")}])
def test_an_attempt_that_cannot_be_read_follows_from_the_rest(unreadable: dict[str, Any]) -> None:
    failed = {"time": "2026-11-20T10:00:00Z", "attempt": 4, "action": "RestartJob"}
    assert read_status(unreadable).attempt == 0
    assert read_status(unreadable | {"pinned": PINNED}).attempt == 4
    assert read_status(unreadable | {"failures": [failed, failed | {"attempt": 2}]}).attempt == 5
    assert read_status(unreadable | {"failures": [failed | {"action": "FailJob"}], "pinned": PINNED}).attempt == 4
    assert read_status({"attempt": 0, "failures": [failed], "pinned": PINNED}).attempt == 0


def test_a_worker_with_a_wrong_index_is_absent_and_is_no_other_worker() -> None:
    found = read_status({"endedWorkers": [{"index": -1}, {"index": 1.5}, {"index": 2}]})
    assert [worker.index for worker in found.ended] == [2]
    assert read_status({"hungRanks": [1.5, 2], "podGroups": "12"}) == Status()
