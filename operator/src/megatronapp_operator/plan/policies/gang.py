"""The gang: created all together, judged by its first failed worker, never mixed with another attempt."""

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction, Phase
from megatronapp_operator.plan import failure_rules, outcome, reasons
from megatronapp_operator.plan.actions import (
    Action,
    CreateWorker,
    EnsureHub,
    EnsureSecret,
    EventType,
    RecordEvent,
    RestartWorker,
)
from megatronapp_operator.plan.observed import HubPhase, Worker, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import elastic, in_place, slow_nodes, spares
from megatronapp_operator.plan.policies.lifecycle import complete
from megatronapp_operator.plan.policies.placement import release, waits_for_nodes
from megatronapp_operator.plan.policies.restart import attempt_failed, backoff_s, reset_budget, restart_at
from megatronapp_operator.plan.spec import Backoff, JobSpec, SuccessPolicy

HUB_BACKOFF = Backoff(initial_s=1.0, max_s=60.0)
"""Pause before a hub that has ended is started again."""


def created(draft: PlanBuilder) -> bool:
    """Acknowledge a new job. If its gang is created at once, the Event about the gang is the only one."""
    if draft.status.condition(ConditionType.CREATED) is None:
        message = f"accepted: {draft.job.spec.workers_text}"
        draft.set_condition(ConditionType.CREATED, True, reasons.JOB_CREATED, message)
        draft.event(EventType.NORMAL, reasons.JOB_CREATED, message)
    return False


def judge_success(draft: PlanBuilder) -> bool:
    """Complete the job once the worker with rank 0 succeeds, if the success policy is Rank0; stop the others."""
    spec, status = draft.job.spec, draft.status
    if spec.success is not SuccessPolicy.RANK0 or status.is_true(ConditionType.FAILURE_TARGET):
        return False
    first = status.rank_zero if spec.rank_zero is None else spec.rank_zero
    if status.phase is Phase.SUSPENDED or first not in status.succeeded:
        return False
    forced = draft.job.stop is not None and draft.job.stop.force
    for worker in draft.live:
        draft.delete(worker, 0.0 if forced else spec.policy.grace_s)
    if not draft.live:
        complete(draft, reasons.RANK0_SUCCEEDED, f"worker {first}, which holds rank 0, ended with success")
    return True


def judge_end(draft: PlanBuilder) -> bool:
    """Act on workers of this attempt that have ended."""
    gang, culprits = draft.gang, failure_rules.culprits(draft)
    if not culprits:
        if len(gang) < draft.job.spec.workers or not all(worker.ended for worker in gang):
            return False
        message = f"{draft.job.spec.all_workers_text} ended with success"
        complete(draft, reasons.ALL_WORKERS_SUCCEEDED, message)
        return True
    settle_at = failure_rules.settles_at(draft, culprits[0])
    if settle_at is not None and draft.now < settle_at:
        draft.wake(settle_at)
        return True
    _judge(draft, culprits[0])
    return True


def _judge(draft: PlanBuilder, culprit: Worker) -> None:
    """Act on the most likely culprit.

    One that only lost a peer, or stopped with its gang, is no evidence if a peer has vanished or is being deleted.
    """
    if waits_for_nodes(draft, culprit):
        release(draft, reasons.UNSCHEDULABLE, "the workers that were placed gave up waiting for the others")
        return
    if outcome.suspicion(culprit):
        others_judged = judge_missing(draft) or _judge_silent(draft)
    else:
        others_judged = outcome.stopped_with_gang(culprit) and (judge_missing(draft) or _judge_leaving(draft, culprit))
    if not others_judged:
        reset_budget(draft, until=culprit.finished_at or draft.now)
        ordered = slow_nodes.swap(draft, culprit) or elastic.ended_to_grow(draft, culprit)
        attempt_failed(draft, ordered or failure_rules.judged(draft, culprit))


def judge_missing(draft: PlanBuilder) -> bool:
    """Fail the attempt if a worker that ran has vanished without a record."""
    if draft.status.running_time is None:
        return False
    missing = draft.missing_indices
    if not missing:
        return False
    reset_budget(draft, until=draft.now)
    attempt_failed(
        draft, failure_rules.judged_lost(draft, outcome.lost_workers_failure(missing, draft.status.attempt, draft.now))
    )
    return True


def judge_lost_node(draft: PlanBuilder) -> bool:
    """Fail the attempt if a worker outlives its grace period, or its node does not answer."""
    for worker in draft.gang:
        at = draft.lost_at(worker) if worker.live else None
        if at is None:
            continue
        if draft.now >= at:
            _give_up(draft, worker, outcome.unreachable_failure(worker, draft.now, draft.job.spec.policy.lost_worker_s))
            return True
        draft.wake(at)
    return False


def _judge_silent(draft: PlanBuilder) -> bool:
    """Fail the attempt if a worker is silent although its peers have lost it.

    A lost node reports nothing, and it takes a while until the cluster notices that; until then only the peers know.
    """
    found = failure_rules.silent_workers(draft)
    if found:
        _give_up(draft, found[0], outcome.silent_worker_failure(found[0], draft.now))
    return bool(found)


def _judge_leaving(draft: PlanBuilder, stopped: Worker) -> bool:
    """Fail the attempt if its gang has stopped for a worker that is being deleted and takes long to end."""
    found = failure_rules.leaving_worker(draft)
    if found is not None:
        _give_up(draft, found, outcome.leaving_failure(found, stopped, draft.job.spec.name, draft.now))
    return found is not None


def _give_up(draft: PlanBuilder, worker: Worker, failure: Failure) -> None:
    reset_budget(draft, until=draft.now)
    attempt_failed(draft, failure_rules.judged_lost(draft, failure, worker.disrupted))


def clear_stale(draft: PlanBuilder) -> bool:
    """Remove workers of older attempts; nothing is created while one is left. Spares of no use delay nothing."""
    spares.clear(draft)
    stale = [worker for worker in draft.observed.workers if worker.attempt != draft.status.attempt]
    replaced = [worker for worker in stale if not in_place.continues(draft, worker)]
    for worker in replaced:
        draft.delete(worker, _stale_grace_s(draft, stale))
    return bool(replaced)


def _stale_grace_s(draft: PlanBuilder, stale: list[Worker]) -> float:
    """Return the seconds for stale workers to stop.

    After a preemption the others may still be writing the agreed checkpoint, unless one has lost a peer. A gang that
    never gathered has nothing to save. A released gang never trained: it gives back its nodes at once.
    """
    last, policy = draft.status.failures[-1:], draft.job.spec.policy
    if draft.status.released:
        return 0.0
    parted = any(outcome.suspicion(worker) for worker in outcome.failed(stale))
    may_save = bool(last) and last[0].reason != reasons.NOT_GATHERED
    preempted = may_save and last[0].action is FailureAction.RESTART_IGNORE_MAX
    return policy.grace_s if preempted and not parted else policy.failed_grace_s


def ensure_hub(draft: PlanBuilder) -> bool:
    """Keep secret and hub alive while the job lives; back off from a hub that ends again and again."""
    if not draft.observed.secret:
        draft.actions.append(EnsureSecret())
    if not draft.job.spec.hub:
        return False
    hub = draft.observed.hub
    at = draft.now
    if hub is not None:
        if hub.deletion is not None:
            at = hub.deletion.since + hub.deletion.grace_s + draft.job.spec.policy.lost_worker_s
        elif hub.phase is not HubPhase.ENDED:
            return False
        else:
            at = (draft.now if hub.ended_at is None else hub.ended_at) + backoff_s(HUB_BACKOFF, hub.starts)
    if draft.now < at:
        draft.wake(at)
    else:
        draft.actions.append(EnsureHub())
    return False


def create(draft: PlanBuilder) -> bool:
    """Create the missing workers of the gang, all at once, after the back-off, with the profiles of their attempt, and
    restart the others in place.
    """
    if _waits_for_profile(draft):
        return True
    at = restart_at(draft)
    if draft.now < at:
        draft.wake(at)
        return True
    stale = [worker for worker in draft.observed.workers if worker.attempt != draft.status.attempt]
    missing = sorted(set(draft.missing_indices) - {worker.index for worker in stale})
    if draft.status.attempt_time is None:
        spares.assign(draft, missing, stay={worker.name for worker in stale})
    for worker in stale:  # `clear_stale` has waited until the others are deleted
        grace_s = _stale_grace_s(draft, stale)
        draft.actions.append(RestartWorker(index=worker.index, attempt=draft.status.attempt, grace_s=grace_s))
    orders = spares.orders(draft)
    draft.actions += orders
    for index in sorted(set(missing) - {order.index for order in orders}):
        draft.actions.append(CreateWorker(index=index, attempt=draft.status.attempt))
    if draft.status.attempt_time is None:
        start_time = draft.now if draft.status.start_time is None else draft.status.start_time
        draft.update(attempt_time=draft.now, start_time=start_time)
        message = f"attempt {draft.status.attempt}: {draft.job.spec.workers_text}"
        draft.actions = [action for action in draft.actions if not _acknowledges(action)]
        draft.event(EventType.NORMAL, reasons.GANG_CREATED, message)
    if draft.status.phase not in {Phase.RESTARTING, Phase.RUNNING}:
        queued = draft.job.spec.gang and draft.status.scheduled_time is None
        draft.update(phase=Phase.QUEUED if queued else Phase.STARTING)
    return False


def _acknowledges(action: Action) -> bool:
    return isinstance(action, RecordEvent) and action.reason == reasons.JOB_CREATED


def _waits_for_profile(draft: PlanBuilder) -> bool:
    """Return True if the attempt has not begun, and its spec is not merged yet or cannot be merged.

    The backend merges the spec once the status has the number of the attempt, and plans again when a profile changes.
    """
    profile, status = draft.observed.profile, draft.status
    if profile is None or status.attempt_time is not None:
        return False
    if profile.attempt != status.attempt:
        draft.wake(draft.now)
        return True
    return not profile.ready


def running(draft: PlanBuilder) -> bool:
    """Record that the whole gang runs, and that it trains; until it trains the job is starting."""
    up = {worker.index for worker in draft.gang if worker.phase is WorkerPhase.RUNNING} | set(draft.status.succeeded)
    if len(up) < draft.job.spec.workers:
        return False
    if draft.status.running_time is None:
        draft.update(running_time=draft.now, released=0)
    if draft.status.phase is not Phase.RUNNING:
        spec = draft.job.spec
        gang = f"{spec.all_workers_text} of attempt {draft.status.attempt}"
        if draft.status.trains:
            _enter_running(draft, reasons.SERVING if spec.serves else reasons.TRAINING_BEGAN, f"{gang} {_does(spec)}")
        elif _silent_for_long(draft):
            silence = f"no progress was reported for {draft.job.spec.policy.silent_start_s:g} s"
            work = "serving" if spec.serves else "training"
            _enter_running(draft, reasons.NO_PROGRESS_REPORTED, f"{gang}: {silence}; {work} is assumed to have begun")
    reset_budget(draft, until=draft.now)
    return False


def _does(spec: JobSpec) -> str:
    """Return the verb for the number of workers."""
    verb = "serve" if spec.serves else "train"
    return f"{verb}s" if spec.workers == 1 else verb


def _enter_running(draft: PlanBuilder, reason: str, message: str) -> None:
    draft.update(phase=Phase.RUNNING)
    draft.set_condition(ConditionType.RUNNING, True, reason, message)
    draft.clear_condition(ConditionType.RESTARTING, reason, message)
    draft.event(EventType.NORMAL, "Running", message)


def _silent_for_long(draft: PlanBuilder) -> bool:
    """Return True if a gang that has gathered reports no progress, not even that it starts.

    Then its progress document could not be made.
    """
    if draft.status.current_progress is not None or draft.status.running_time is None or draft.observed.missing:
        return False
    launcher = draft.observed.launcher_attempt
    if launcher is not None and launcher < draft.status.attempt:  # it has yet to follow the order to continue
        return False
    at = draft.status.running_time + draft.job.spec.policy.silent_start_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at
