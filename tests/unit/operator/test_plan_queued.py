"""Gangs that a queue or a gang scheduler places."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import rendered

from megatronapp_common.names import ExitCode
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import WORKLOADS
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.group_removal import RETRY_S, PodGroupRemover
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import (
    ConditionType,
    Deletion,
    PodGroupKey,
    Progress,
    RecordEvent,
    RemoveGroup,
    SuccessPolicy,
)

Maker = Callable[..., Any]


def test_the_active_deadline_of_a_queued_gang_counts_only_time_with_nodes(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(active_deadline_s=50)
    made.spec(gang=True)
    made.plan()
    for attempt in (0, 1):  # twice an hour in the queue, and 30 s with machines
        waiting = [dataclasses.replace(worker(index, "Pending", attempt=attempt), scheduled=False) for index in (0, 1)]
        made.see(*waiting)
        assert made.plan().wake_at is None
        made.now += 3600
        assert not made.plan().status.is_true(ConditionType.FAILURE_TARGET)
        made.see(*(worker(index, attempt=attempt) for index in (0, 1)), progress=Progress(attempt=attempt, iteration=1))
        made.plan()
        if attempt == 0:
            made.now += 30
            made.see(*(worker(index, "Failed", ExitCode.PREEMPTED, made.now) for index in (0, 1)))
            made.plan()
            made.see()
            made.now += 10
            made.plan()
    assert made.plan().wake_at == made.now + 20
    made.now += 20
    assert made.plan().status.condition(ConditionType.FAILURE_TARGET).reason == "DeadlineExceeded"


def test_the_active_deadline_restarts_when_a_queued_job_is_resumed(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(active_deadline_s=50)
    made.spec(gang=True)
    made.plan()
    made.see(worker(0), worker(1))
    made.plan()
    made.now += 40
    made.spec(suspend=True)
    made.plan()
    made.see()
    made.spec(suspend=False)
    made.plan()
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    made.plan()
    made.now += 40
    assert not made.plan().status.is_true(ConditionType.FAILURE_TARGET)
    made.now += 10
    assert made.plan().status.is_true(ConditionType.FAILURE_TARGET)


def terminating(worker: Any, grace: float = 0.0, since: float = 1000.0, **changes: Any) -> Any:
    """A worker that was asked to go, and that a finalizer keeps."""
    deletion = Deletion(since=since, grace_s=grace)
    return dataclasses.replace(worker, deletion=deletion, finalizers=("kueue.x-k8s.io/managed",), **changes)


def groups(made: Any) -> list[int]:
    return [action.attempt for action in made.actions if isinstance(action, RemoveGroup)]


@pytest.mark.parametrize("how", ["suspended", "released", "past its deadline", "deleted"])
def test_the_workload_of_a_gang_that_never_ran_is_removed_with_its_pods(
    plan_harness: Maker, worker: Maker, how: str
) -> None:
    made = plan_harness(start_deadline_s=60, active_deadline_s=30 if how == "past its deadline" else None)
    made.spec(gang=True, group=PodGroupKey.WORKLOAD)
    made.plan()
    placed, waits = worker(0, "Pending"), dataclasses.replace(worker(1, "Pending"), scheduled=False)
    made.see(placed, waits)
    assert groups(made.plan()) == []
    if how == "suspended":
        made.spec(suspend=True)
    elif how == "deleted":
        made.job = dataclasses.replace(made.job, deletion_requested=True)
    else:
        made.now += 60
    assert groups(made.plan()) == []  # the pods first: what runs has its time
    made.see(terminating(placed, 30), terminating(waits))
    assert groups(made.plan()) == []
    made.see(terminating(placed, 0), terminating(waits))
    removed = made.plan()
    assert groups(removed) == [0] and made.plan().actions == removed.actions
    made.see()
    assert groups(made.plan()) == []


@pytest.mark.parametrize("ended", [False, True])
def test_pod_groups_of_attempts_before_an_upgrade_are_removed_once(running: Maker, worker: Maker, ended: bool) -> None:
    """The status of an earlier release has no list of them; an empty list says that none is left."""
    made = running()
    made.spec(gang=True, group=PodGroupKey.POD_GROUP)
    made.job = dataclasses.replace(made.job, status=dataclasses.replace(made.job.status, attempt=3, groups=None))
    if ended:
        made.see(*(worker(index, "Succeeded", 0, made.now, attempt=3) for index in (0, 1)))
    else:
        made.see(*(worker(index, attempt=3) for index in (0, 1)))
    before = made.plan()
    assert groups(before) == ([0, 1, 2, 3] if ended else [0, 1, 2])
    made.observed = dataclasses.replace(made.observed, groups_removed=frozenset(groups(before)))
    after = made.plan()
    assert (groups(after), after.status.groups) == ([], () if ended else (3,))
    made.observed = dataclasses.replace(made.observed, groups_removed=frozenset())
    assert groups(made.plan()) == [], "the next process has removed none itself"


def test_a_job_that_has_not_begun_has_no_pod_groups(plan_harness: Maker) -> None:
    made = plan_harness()
    made.spec(gang=True, group=PodGroupKey.POD_GROUP, suspend=True)
    assert (groups(made.plan()), made.job.status.groups) == ([], ())


def test_a_workload_is_removed_if_a_node_is_lost(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.spec(gang=True, group=PodGroupKey.WORKLOAD)
    made.see(worker(0), terminating(worker(1), 30, unreachable_since=made.now))
    made.now += 330
    assert made.plan().status.attempt == 1
    made.see(terminating(worker(0), 30), terminating(worker(1), 0, made.now))
    assert groups(made.plan()) == []
    made.see(terminating(worker(1), 0, made.now))
    assert groups(made.plan()) == [0]
    made.observed = dataclasses.replace(made.observed, groups_refused=frozenset({0}))
    assert groups(made.plan()) == [], "the operator may have no right to read workloads"


class NoRights:
    """An API server that refuses to show workloads."""

    def __init__(self) -> None:
        self.requests = 0

    async def get(self, *_: object) -> None:
        self.requests += 1
        raise ForbiddenError("no")


@pytest.mark.asyncio
async def test_a_refused_removal_is_tried_again_after_ten_minutes_and_announced_once() -> None:
    now, api, owner = [0.0], NoRights(), JobOwner(namespace="team", name="gpt", uid="u")
    remover = PodGroupRemover(cast(KubernetesApi, api), clock=lambda: now[0])
    assert await remover.remove(owner, WORKLOADS, 1, ()) is not None
    assert (remover.refused("u"), remover.refused("other")) == ({1}, frozenset())
    now[0] = RETRY_S
    assert remover.refused("u") == frozenset()
    assert await remover.remove(owner, WORKLOADS, 1, ()) is None
    assert (remover.refused("u"), api.requests) == ({1}, 2)


@pytest.mark.asyncio
async def test_a_group_that_the_cluster_does_not_serve_is_removed_without_a_request() -> None:
    """Otherwise a job that waited for such groups would be reconciled every two seconds after its end."""
    job, api = rendered.make_job({"scheduling": {"gang": "Kubernetes"}}), NoRights()
    executor = Executor(cast(KubernetesApi, api), ObjectStore(), keys=KeyRing(["ab" * 32]), identity="one")
    owner, settings = rendered.owner_of(job), dataclasses.replace(rendered.SETTINGS, pod_groups=None)
    work = JobContext(document={}, job=job, owner=owner, attempt=AttemptSettings(number=4), settings=settings)
    assert await executor.run(work, [RemoveGroup(attempt=3)]) is None
    assert (executor.groups.removed_attempts(owner.uid), api.requests) == ({3}, 0)


def test_a_workload_is_removed_if_worker_0_completes_the_job_while_others_wait(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.spec(gang=True, group=PodGroupKey.WORKLOAD, success=SuccessPolicy.RANK0)
    done = worker(0, "Succeeded", 0, made.now)
    made.see(done, terminating(worker(1), 0, made.now))
    made.plan()
    made.now += 300
    assert groups(made.plan()) == [0]


def test_a_workload_stays_for_the_log_of_a_worker_that_failed_while_another_can_go(
    running: Maker, worker: Maker
) -> None:
    made = running(max_restarts=0, lost_worker_s=300)
    made.spec(gang=True, group=PodGroupKey.WORKLOAD)
    failed = worker(0, "Failed", ExitCode.DATA, made.now)
    made.see(failed, worker(1))
    assert made.plan().status.is_true(ConditionType.FAILURE_TARGET)
    made.see(failed, terminating(worker(1), 0, made.now))
    assert groups(made.plan()) == []
    made.now += 300
    assert groups(made.plan()) == [0]


def test_workers_that_cannot_be_deleted_are_reported_with_their_finalizers(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.spec(suspend=True)
    made.plan()
    made.see(terminating(worker(0), 0, made.now), terminating(worker(1), 0, made.now))
    assert made.plan().wake_at == made.now + 300
    made.now += 300
    reported = made.plan()
    condition = reported.status.condition(ConditionType.REMOVAL_BLOCKED)
    assert condition is not None and condition.status and condition.reason == "WorkersHeld"
    assert condition.message == (
        "worker 0, 1 still exists 300 s after it was killed; finalizers keep it: kueue.x-k8s.io/managed"
    )
    assert [action.reason for action in reported.actions if isinstance(action, RecordEvent)] == ["WorkersHeld"]
    assert not [action for action in made.plan().actions if isinstance(action, RecordEvent)]
    made.see()
    assert not made.plan().status.is_true(ConditionType.REMOVAL_BLOCKED)


def test_pod_groups_of_earlier_attempts_are_removed_until_that_is_known(running: Maker, worker: Maker) -> None:
    made = running()
    made.spec(gang=True, group=PodGroupKey.POD_GROUP)
    assert groups(made.plan()) == [] and made.job.status.groups == (0,)
    made.see(worker(0, "Failed", 1, made.now), worker(1))
    assert groups(made.plan()) == []  # a worker still runs
    made.see()  # also where all vanish together
    assert groups(made.plan()) == [0] == groups(made.plan())
    made.observed = dataclasses.replace(made.observed, groups_removed=frozenset({0}))
    made.now += 10
    assert groups(made.plan()) == [] and made.job.status.groups == (1,)


@pytest.mark.parametrize("code", [0, ExitCode.DATA])
def test_the_pod_group_of_a_job_that_has_ended_is_removed(running: Maker, worker: Maker, code: int) -> None:
    made = running()
    made.spec(gang=True, group=PodGroupKey.POD_GROUP)
    made.plan()
    ended = "Failed" if code else "Succeeded"
    made.see(*(worker(index, ended, code, made.now) for index in (0, 1)))
    assert groups(made.plan()) == [0]
    made.observed = dataclasses.replace(made.observed, groups_removed=frozenset({0}))
    assert groups(made.plan()) == [] and made.job.status.groups == ()
