"""Failure rules: those of the user in their order, then the built-in ones."""

import dataclasses

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction
from megatronapp_common.names import ExitCode
from megatronapp_common.text.re2 import matches_re2
from megatronapp_operator.plan import outcome
from megatronapp_operator.plan.observed import Worker, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.spec import FailureMatch, FailureRule

DISRUPTIONS = frozenset({"DisruptionTarget", "TerminationTarget"})
"""Conditions of a failed pod that rules may match, by Kubernetes and Kueue: the cluster disrupted the pod."""

DEVICE_CODES = frozenset({201, 202})
"""Exit codes that mean a broken GPU or driver, the same as DLRover's."""

ACTIONS = {
    ExitCode.USAGE: FailureAction.FAIL_JOB,
    ExitCode.DATA: FailureAction.FAIL_JOB,
    ExitCode.NOT_FINITE: FailureAction.FAIL_JOB,  # a resume is bit-equal, so it would reach the same NaN
    ExitCode.SUPERSEDED: FailureAction.FAIL_JOB,  # a restart would take the directory back from its new owner
    ExitCode.PREEMPTED: FailureAction.RESTART_IGNORE_MAX,
}
"""Built-in actions for exit codes of the launcher."""

REFUSED_BY_NODE = "OutOf", "UnexpectedAdmissionError"
"""Prefixes of the reason of a pod that the kubelet rejected although the scheduler had bound it (OutOfcpu,
OutOfnvidia.com/gpu): a device plugin is broken, or not registered yet after the node has restarted."""

HOPELESS_CODES = frozenset({1, 2})
HOPELESS_S = 60.0
"""Seconds after its start within which one of these exit codes means wrong arguments, which no restart repairs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvidence:
    """Properties of a failure that a rule may match."""

    worker: int
    reason: str
    message: str
    code: int | None = None
    """Exit code; None: the worker left none, and no rule about codes matches."""
    signal: int | None = None
    disrupted: str | None = None


def evidence_of(worker: Worker) -> FailureEvidence:
    """Return what is known of a worker that failed."""
    end = outcome.outcome_of(worker)
    return FailureEvidence(
        worker=worker.index,
        reason=end.reason,
        message=end.message,
        code=end.code,
        signal=end.signal,
        disrupted=worker.disrupted,
    )


def matches_rule(match: FailureMatch, found: FailureEvidence) -> bool:
    """Return True if the failure satisfies every criterion of the rule."""
    return (
        (not match.exit_codes or found.code in match.exit_codes)
        and (not match.not_exit_codes or (found.code not in {None, 0, *match.not_exit_codes}))
        and (not match.signals or found.signal in match.signals)
        and (not match.reasons or bool({found.reason, found.disrupted} & set(match.reasons)))
        and (match.message_regex is None or matches_re2(match.message_regex, found.message))
        and (not match.condition_types or (_names_disruption(match) and found.disrupted is not None))
        and (not match.workers or found.worker in match.workers)
    )


def _names_disruption(match: FailureMatch) -> bool:
    return not DISRUPTIONS.isdisjoint(match.condition_types)


def matching_user_action(rules: tuple[FailureRule, ...], found: FailureEvidence) -> FailureAction | None:
    """Return the action of the first rule of the user that matches, or None."""
    return next((rule.action for rule in rules if matches_rule(rule.match, found)), None)


def ignored(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if a rule of the user says to ignore the failure of this worker."""
    rules = draft.job.spec.policy.rules
    if all(rule.action is not FailureAction.IGNORE for rule in rules):  # a gang may have thousands of workers
        return False
    return matching_user_action(rules, evidence_of(worker)) is FailureAction.IGNORE


def culprits(draft: PlanBuilder) -> tuple[Worker, ...]:
    """Return the workers whose failure is not ignored, most likely culprit first."""
    return tuple(worker for worker in outcome.failed(draft.gang) if not ignored(draft, worker))


def judged(draft: PlanBuilder, worker: Worker) -> Failure:
    """Return the failure of the attempt, given its most likely culprit."""
    action = matching_user_action(draft.job.spec.policy.rules, evidence_of(worker)) or _own_rules(draft, worker)
    return _possible(draft, outcome.failure_of(worker, draft.job.spec.name, draft.now, action))


def judged_lost(draft: PlanBuilder, failure: Failure, disrupted: str | None = None) -> Failure:
    """Return `failure` with the action for a worker that left no record: a preemption, unless a rule says otherwise."""
    assert failure.worker is not None
    found = FailureEvidence(worker=failure.worker, reason=failure.reason, message=failure.message, disrupted=disrupted)
    user_action = matching_user_action(draft.job.spec.policy.rules, found)
    # a gang does not continue without one of its workers
    if user_action is None or user_action is FailureAction.IGNORE:
        return _possible(draft, failure)
    return _possible(draft, dataclasses.replace(failure, action=user_action))


def _possible(draft: PlanBuilder, failure: Failure) -> Failure:
    """Turn an exclusion into a restart if the node is not known, is always allowed, or exclusion is disabled."""
    if failure.action is not FailureAction.EXCLUDE_AND_RESTART:
        return failure
    limits = draft.job.spec.policy.exclusion
    if failure.node is not None and limits.enabled and failure.node not in limits.allowed:
        return failure
    return dataclasses.replace(failure, action=FailureAction.RESTART)


def _own_rules(draft: PlanBuilder, worker: Worker) -> FailureAction:
    code = outcome.outcome_of(worker).code
    if worker.disrupted is not None or outcome.deleted_first(worker):
        return FailureAction.RESTART_IGNORE_MAX
    if outcome.suspicion(worker) and any(peer.taken for peer in draft.gang):
        return FailureAction.RESTART_IGNORE_MAX
    if code in DEVICE_CODES or _refused(worker):
        return FailureAction.EXCLUDE_AND_RESTART
    known = next((action for own, action in ACTIONS.items() if own == code), None)
    if known is not None:
        return known
    if _peer_taken(draft):
        return FailureAction.RESTART_IGNORE_MAX
    return FailureAction.FAIL_JOB if _hopeless(draft) else FailureAction.RESTART


def _refused(worker: Worker) -> bool:
    """Return True if the kubelet rejected the pod; a program that has run may end with the same reason, too."""
    never_ran = worker.started_at is None and worker.finished_at is None
    return never_ran and outcome.outcome_of(worker).reason.startswith(REFUSED_BY_NODE)


def _peer_taken(draft: PlanBuilder) -> bool:
    """Return True if a peer is being disrupted: NCCL then aborts the other ranks, which fail without a reason."""
    return any(peer.disrupted is not None or peer.unreachable_since is not None for peer in draft.gang)


def leaving_worker(draft: PlanBuilder) -> Worker | None:
    """Return the worker that was deleted or disrupted first of those that have not ended; None without any."""
    found = [worker for worker in draft.gang if not worker.ended and (worker.deletion or worker.disrupted)]
    return min(found, key=lambda worker: worker.deletion.since if worker.deletion else 0.0, default=None)


def silent_workers(draft: PlanBuilder) -> tuple[Worker, ...]:
    """Return workers on one node that seem to run, although all others have ended because they lost a peer.

    Return none while workers on several nodes are left, since these may still be ending, nor if another worker of the
    same node has ended: its kubelet works, because it reported that.
    """
    quiet, ended = _may_be_silent(draft), [worker for worker in draft.gang if worker.ended]
    lost = all(worker.phase is WorkerPhase.FAILED and outcome.suspicion(worker) for worker in ended)
    nodes = {worker.node for worker in quiet}
    if not lost or len(nodes) != 1 or len(quiet) + len(ended) < draft.job.spec.workers:
        return ()
    return () if nodes & {worker.node for worker in ended} else quiet


def _may_be_silent(draft: PlanBuilder) -> tuple[Worker, ...]:
    """Return running workers that may be dead; none if a disruption already explains the failure."""
    if any(worker.taken for worker in draft.gang):
        return ()
    return tuple(worker for worker in draft.gang if worker.phase is WorkerPhase.RUNNING and worker.node is not None)


def settles_at(draft: PlanBuilder, culprit: Worker) -> float | None:
    """Return the time until which to wait before `culprit` is judged, or None if it can be judged now.

    The launchers of victims may report before the culprit's does (`outcome.settles_at`), and one on a lost node never
    reports. Wrong arguments are recognised only once all workers have ended at once.
    """
    policy = draft.job.spec.policy
    lost = outcome.suspicion(culprit) and _may_be_silent(draft)
    settle_s = max(policy.settle_s, policy.silent_s) if lost else policy.settle_s
    at = outcome.settles_at(culprits(draft), draft.gang, settle_s)
    if at is None and not all(worker.ended for worker in draft.gang) and _begins(draft) and _ended_at_once(culprit):
        at = (culprit.finished_at or 0.0) + policy.settle_s
    return at


def _begins(draft: PlanBuilder) -> bool:
    """Return True for the first gang of a job as long as it has not trained; one that has grown is not the first."""
    status = draft.status
    return status.restarts == 0 and status.last_restart_time is None and not status.trains


def _hopeless(draft: PlanBuilder) -> bool:
    """Return True if the whole first gang ended at once, before it trained, as programs with wrong arguments do.

    A single worker that ends so proves less than several on different nodes: it gets one more attempt.
    """
    if draft.job.spec.workers == 1:
        first = _ended_the_same_before(draft)
    else:
        first = _begins(draft) and len(draft.gang) >= draft.job.spec.workers
    return first and all(_ended_at_once(worker) for worker in draft.gang)


def _ended_the_same_before(draft: PlanBuilder) -> bool:
    """Return True for the second gang of a job that has never trained if the first ended with the same exit code."""
    status, codes = draft.status, {outcome.outcome_of(worker).code for worker in draft.gang}
    if status.restarts != 1 or status.condition(ConditionType.RUNNING) is not None or not status.failures:
        return False
    return status.failures[-1].exit_code in codes


def _ended_at_once(worker: Worker) -> bool:
    end = worker.outcome
    if end is None or end.code not in HOPELESS_CODES or end.signal is not None or end.reason == outcome.NOT_STARTED:
        return False
    started, finished = worker.started_at, worker.finished_at
    return started is not None and finished is not None and finished - started <= HOPELESS_S
