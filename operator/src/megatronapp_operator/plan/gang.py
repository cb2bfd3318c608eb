"""The gang: created all together, judged by its first failed worker, never mixed with another attempt."""

from megatronapp_operator.plan import outcome
from megatronapp_operator.plan.actions import CreateWorker, EnsureHub, EnsureSecret, EventType
from megatronapp_operator.plan.draft import Draft
from megatronapp_operator.plan.lifecycle import complete
from megatronapp_operator.plan.observed import HubPhase, WorkerPhase
from megatronapp_operator.plan.restart import attempt_failed, backoff_s, reset_budget, restart_at
from megatronapp_operator.plan.spec import Backoff
from megatronapp_operator.plan.status import ConditionType, FailureAction, Phase

HUB_BACKOFF = Backoff(initial_s=1.0, max_s=60.0)


def created(draft: Draft) -> bool:
    """Acknowledge a new job."""
    if draft.status.condition(ConditionType.CREATED) is None:
        message = f"accepted: {draft.job.spec.workers_words}"
        draft.set_condition(ConditionType.CREATED, True, "JobCreated", message)
        draft.event(EventType.NORMAL, "JobCreated", message)
    return False


def judge_end(draft: Draft) -> bool:
    """Act on workers of this attempt that have ended."""
    gang = draft.gang
    culprits = outcome.failed(gang)
    if not culprits:
        if len(gang) < draft.job.spec.workers or any(one.phase is not WorkerPhase.SUCCEEDED for one in gang):
            return False
        complete(draft)
        return True
    settle_at = outcome.settles_at(gang, draft.job.spec.policy.settle_s)
    if settle_at is not None and draft.now < settle_at:
        draft.wake(settle_at)
        return True
    worker = culprits[0]
    reset_budget(draft, until=worker.finished_at or draft.now)
    attempt_failed(draft, outcome.failure_of(worker, draft.job.spec.name, draft.now))
    return True


def judge_missing(draft: Draft) -> bool:
    """A worker that ran and is not there any more was lost with all that it knew."""
    if draft.status.running_time is None:
        return False
    missing = outcome.missing(draft.gang, draft.job.spec.workers)
    if not missing:
        return False
    reset_budget(draft, until=draft.now)
    attempt_failed(draft, outcome.lost(missing, draft.status.attempt, draft.now))
    return True


def clear_stale(draft: Draft) -> bool:
    """Remove workers of older attempts; nothing is created while one is left."""
    stale = [one for one in draft.observed.workers if one.attempt != draft.status.attempt]
    for worker in stale:
        draft.delete(worker, _stale_grace_s(draft))
    return bool(stale)


def _stale_grace_s(draft: Draft) -> float:
    """After a preemption the others may still be writing the checkpoint that was agreed."""
    last, policy = draft.status.failures[-1:], draft.job.spec.policy
    preempted = bool(last) and last[0].action is FailureAction.RESTART_IGNORE_MAX
    return policy.grace_s if preempted else policy.failed_grace_s


def ensure_hub(draft: Draft) -> bool:
    """Keep secret and hub alive while the job lives; a hub that keeps dying is started less and less often."""
    if not draft.observed.secret:
        draft.actions.append(EnsureSecret())
    if not draft.job.spec.hub:
        return False
    hub = draft.observed.hub
    at = draft.now
    if hub is not None:
        if hub.phase is not HubPhase.ENDED:
            return False
        at = (draft.now if hub.ended_at is None else hub.ended_at) + backoff_s(HUB_BACKOFF, hub.starts)
    if draft.now < at:
        draft.wake(at)
    else:
        draft.actions.append(EnsureHub())
    return False


def create(draft: Draft) -> bool:
    """Create what is missing of the gang, all at once, after the back-off."""
    at = restart_at(draft)
    if draft.now < at:
        draft.wake(at)
        return True
    for index in outcome.missing(draft.gang, draft.job.spec.workers):
        draft.actions.append(CreateWorker(index=index, attempt=draft.status.attempt))
    if draft.status.attempt_time is None:
        start_time = draft.now if draft.status.start_time is None else draft.status.start_time
        draft.update(attempt_time=draft.now, start_time=start_time)
        draft.event(EventType.NORMAL, "GangCreated", f"attempt {draft.status.attempt}: {draft.job.spec.workers_words}")
    if draft.status.phase not in {Phase.RESTARTING, Phase.RUNNING}:
        draft.update(phase=Phase.STARTING)
    return False


def running(draft: Draft) -> bool:
    """Notice that the whole gang runs, and that it trains; until then the job starts, whatever its processes do."""
    counted = draft.status.replicas
    if counted.running + counted.succeeded < draft.job.spec.workers:
        return False
    if draft.status.running_time is None:
        draft.update(running_time=draft.now)
    if draft.status.phase is not Phase.RUNNING:
        gang = f"{draft.job.spec.all_workers_words} of attempt {draft.status.attempt}"
        if draft.status.trains:
            _enter_running(draft, "TrainingBegan", f"{gang} {'trains' if draft.job.spec.workers == 1 else 'train'}")
        elif _silent_for_long(draft):
            silence = f"no progress was told for {draft.job.spec.policy.silent_start_s:g} s"
            _enter_running(draft, "NoProgressPage", f"{gang}: {silence}; training is taken to have begun")
    reset_budget(draft, until=draft.now)
    return False


def _enter_running(draft: Draft, reason: str, message: str) -> None:
    draft.update(phase=Phase.RUNNING)
    draft.set_condition(ConditionType.RUNNING, True, reason, message)
    draft.clear_condition(ConditionType.RESTARTING, reason, message)
    draft.event(EventType.NORMAL, "Running", message)


def _silent_for_long(draft: Draft) -> bool:
    """Whether a gang that has gathered says nothing, not even that it starts: then its page cannot be made."""
    if draft.status.told is not None or draft.status.running_time is None:
        return False
    at = draft.status.running_time + draft.job.spec.policy.silent_start_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at
