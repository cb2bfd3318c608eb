"""Restart in place: workers of the attempt before continue in their pods, except those whose pod or node is at fault.

A pod is at fault if it has ended or is ending, if its node is excluded or does not answer, if its launcher did not join
the gang in time, if its device is broken, or if its worker failed twice in a row: a restart in place did not help then.
A worker that ended in order has not failed.
If nothing says which worker failed, the second failure in a row for the same reason replaces all pods; if launchers
gave up gathering, which of them is at fault is not known, and the first does.
"""

from megatronapp_common.job.api.status import Failure, FailureAction, Status
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.failure_rules import DEVICE_CODES
from megatronapp_operator.plan.observed import Worker, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.restart import ORDERED, attempt_failed

POD_FAULTS = frozenset({reasons.NOT_GATHERED, reasons.LOST_NODE})
"""Reasons of failures that blame the pod of the worker that they name, or its node."""
POLL_AGAIN_S = 15.0
"""Seconds between checks whether a launcher has joined."""


def continues(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if a worker of an older attempt continues with the current one in its pod.

    A gang that was released gives back its nodes, so that none of its pods is kept.
    """
    status, spec = draft.status, draft.job.spec
    if not spec.policy.in_place or spec.gang or status.released or worker.index >= spec.workers:
        return False
    if worker.attempt < draft.resized_in:  # it knows another number of workers
        return False
    runs = worker.phase is WorkerPhase.RUNNING or worker.standby
    if not runs or not worker.reusable or worker.taken or worker.attempt > status.attempt:
        return False
    excluded = any(listed.node == worker.node and listed.until > draft.now for listed in status.excluded_nodes)
    return not excluded and not _is_at_fault(draft, worker)


def _is_at_fault(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if a failure since the worker's attempt is one of its pod."""
    failures = [failure for failure in draft.status.failures if failure.attempt >= worker.attempt]
    if any(failure.reason == reasons.NOT_GATHERED for failure in failures) and _is_missing(draft, worker):
        return True  # a failure names only the first of several
    if any(failure.exit_code == ExitCode.RENDEZVOUS for failure in failures):
        return True
    return _repeats(draft.status, worker) or any(_blames_pod(failure, worker) for failure in failures)


def _is_missing(draft: PlanBuilder, worker: Worker) -> bool:
    return draft.observed.launcher_attempt == worker.attempt and worker.index in draft.observed.missing


def _blames_pod(failure: Failure, worker: Worker) -> bool:
    return failure.worker == worker.index and (failure.reason in POD_FAULTS or failure.exit_code in DEVICE_CODES)


def _repeats(status: Status, worker: Worker) -> bool:
    """Return True if the last two attempts ended with the same failure, of this worker or of none in particular."""
    if len(status.failures) < 2:
        return False
    before, last = status.failures[-2:]
    if last.attempt != before.attempt + 1 or last.attempt < worker.attempt or last.reason != before.reason:
        return False
    if last.exit_code == ExitCode.PREEMPTED or last.reason in ORDERED:
        return False
    return last.worker == before.worker and last.worker in {None, worker.index}


def judge_rejoining(draft: PlanBuilder) -> bool:
    """Fail the attempt if a launcher that is to continue in place does not join in time; its pod is replaced then.

    A new pod has the start deadline, because it may load an image. Answers from before the deadline prove nothing. This
    costs no restart of the budget: with new pods the failure before would have cost one, too.
    """
    status, policy = draft.status, draft.job.spec.policy
    if not policy.in_place or status.running_time is None or status.current_progress is not None:
        return False
    late = _late_worker(draft)
    if late is None or any(worker.taken for worker in draft.gang):
        return False
    limit = policy.rejoin_s + max(policy.failed_grace_s, policy.grace_s if _was_disrupted(status) else 0.0)
    due, contact = status.running_time + limit, draft.observed.last_contact
    if draft.now < due or (contact is not None and contact < due):
        draft.wake(due if draft.now < due else draft.now + POLL_AGAIN_S)
        return False
    message = f"the launcher of worker {late.index} did not continue in place within {limit:g} s; its pod is replaced"
    failure = Failure(
        time=draft.now,
        attempt=status.attempt,
        worker=late.index,
        node=late.node,
        reason=reasons.NOT_GATHERED,
        message=message,
        action=FailureAction.RESTART_IGNORE_MAX,
    )
    attempt_failed(draft, failure)
    return True


def _was_disrupted(status: Status) -> bool:
    last = status.failures[-1:]
    return bool(last) and last[0].action is FailureAction.RESTART_IGNORE_MAX and last[0].reason != reasons.NOT_GATHERED


def _late_worker(draft: PlanBuilder) -> Worker | None:
    """Return the first restarted worker that has not joined; None if all have, or if new pods are missing, too.

    Worker 0 is late if its launcher still answers for an older attempt.
    """
    seen, status = draft.observed, draft.status
    if seen.launcher_attempt is None:
        return None
    late = {0} if seen.launcher_attempt < status.attempt else set(seen.missing)
    found = [worker for worker in draft.gang if worker.index in late and _is_restarted(draft, worker)]
    return found[0] if found and len(found) == len(late) else None


def _is_restarted(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if a worker runs in a pod that is older than the attempt."""
    begun = draft.status.attempt_time
    return worker.started_at is not None and begun is not None and worker.started_at < begun
