"""Invariants of every plan for the job, after any history."""

from typing import NoReturn

from plan_histories.invariants import check_culprit

from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Action,
    ConditionType,
    CreateInit,
    CreateWorker,
    Disruption,
    EnsureDisruptionBudget,
    EnsureHub,
    Observed,
    Phase,
    Plan,
    RecordEvent,
    RemoveDisruptionBudget,
    RequestCheckpoint,
    RestartWorker,
    Status,
    SuccessPolicy,
    Worker,
)
from megatronapp_operator.plan.worker_history import micros, whole_gang
from plan_fuzz.world import World

RESTING = {Phase.SUCCEEDED: ConditionType.COMPLETE, Phase.FAILED: ConditionType.FAILED,
           Phase.SUSPENDED: ConditionType.SUSPENDED, Phase.RUNNING: ConditionType.RUNNING}  # fmt: skip


class Broken(AssertionError):
    """A promise of the plan does not hold."""


def broken(what: str, *details: object) -> NoReturn:
    """Raise Broken for a promise."""
    raise Broken(": ".join(map(str, (what, *details))))


def changes(made: Plan) -> list[Action]:
    """Actions that change the cluster."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def check(world: World, seen: Observed, made: Plan) -> None:
    """Check all promises about one plan; `world` is the state before its actions."""
    before, after = world.job.status, made.status
    check_creation(world, seen, made)
    check_restarts(world, seen, made)
    check_spares(world, seen, made)
    check_size(world, made)
    check_profiles(world, seen, made)
    check_counters(world, before, after)
    check_culprits(seen, before, after)
    check_end(before, after)
    check_deadline(world, after)
    check_conditions(world, before, after)
    check_waking(world, seen, made)
    check_exclusion(world, after)
    check_place_in_queue(world, seen, before, after)
    check_time(world, after)
    check_budget(world, seen, made)


def check_creation(world: World, seen: Observed, made: Plan) -> None:
    """Gangs are made whole, of one attempt, and only while the job may run."""
    created = [action for action in made.actions if isinstance(action, CreateWorker) and not action.spare]
    starts = [action for action in made.actions if isinstance(action, CreateWorker | CreateInit)]
    status = made.status
    if starts and (world.spec.suspend or world.job.deletion_requested):
        broken("something is created though the job is suspended or deleted")
    if starts and status.is_true(ConditionType.FAILURE_TARGET):
        broken("something is created though the job is failing")
    if status.phase in TERMINAL_PHASES and any(
        isinstance(action, CreateWorker | CreateInit | EnsureHub) for action in made.actions
    ):
        broken("something is created after the end")
    if not created:
        return
    restarted = {action.index for action in made.actions if isinstance(action, RestartWorker)}
    if any(worker.attempt != status.attempt and worker.index not in restarted for worker in seen.workers):
        broken("a gang is created beside workers of another attempt")
    if any(action.attempt != status.attempt for action in created):
        broken("a worker of another attempt is created")
    if world.spec.initializers and not status.initialized:
        broken("a gang is created before the initializers are done")
    if any((action.attempt, action.index) in world.used for action in created):
        broken("a worker that has run is created again in the same attempt")
    known = restarted | {action.index for action in created} | {worker.index for worker in seen.workers}
    known |= set(status.succeeded) | {worker.index for worker in status.ended}
    if known != set(range(world.job.spec.at(status).workers)):
        broken("not all workers are created together", known)


def check_restarts(world: World, seen: Observed, made: Plan) -> None:
    """Only sound pods continue in place, with the current attempt, and only while the job may run."""
    status = made.status
    orders = [action for action in made.actions if isinstance(action, RestartWorker)]
    if orders and (world.spec.suspend or world.job.deletion_requested or status.phase in TERMINAL_PHASES):
        broken("a worker is restarted though the job is suspended, deleted or over")
    if orders and (status.is_true(ConditionType.FAILURE_TARGET) or not world.spec.policy.in_place):
        broken("a worker is restarted in place though the job is failing, or wants new pods")
    avoided = {entry.node for entry in status.excluded_nodes if entry.until > world.now}
    for action in orders:
        if action.spare is not None:
            continue
        worker = next((known for known in seen.workers if known.index == action.index), None)
        if worker is None or worker.attempt >= action.attempt or action.attempt != status.attempt:
            broken("a worker that does not exist, or of another attempt, is restarted", action)
        if worker.taken or not worker.reusable or worker.node in avoided:
            broken("a worker is restarted in a pod that is at fault", action)


def check_spares(world: World, seen: Observed, made: Plan) -> None:
    """Spares are created for a gang that runs, take only free places, each its own, and stay within their number."""
    status, spec = made.status, world.job.spec.at(made.status)
    seats = range(spec.workers, spec.workers + spec.policy.spares + spec.absent_workers)
    created = [action for action in made.actions if isinstance(action, CreateWorker) and action.spare]
    if created and (status.running_time is None or not spec.policy.in_place or spec.gang):
        broken("a spare is created for a gang that does not run, or that uses none", created)
    if any(action.index not in seats or action.attempt != status.attempt for action in created):
        broken("a spare is created beyond their number", created)
    if {action.index for action in created} & {spare.index for spare in seen.spares}:
        broken("a spare is created twice", created)
    places, names = [entry.worker for entry in status.takeovers], [entry.pod for entry in status.takeovers]
    if len(set(places)) < len(places) or len(set(names)) < len(names):
        broken("two pods have one place, or one pod has two", status.takeovers)
    orders = [action for action in made.actions if isinstance(action, RestartWorker)]
    if len({action.index for action in orders}) < len(orders):
        broken("two pods are ordered to one place", orders)
    for action in orders:
        if action.spare is None:
            continue
        spare = next((known for known in seen.spares if known.name == action.spare), None)
        if spare is None or spare.taken or spare.attempt >= action.attempt or not spare.live:
            broken("a spare takes a place that cannot", action)
        if any(worker.index == action.index and worker.attempt == status.attempt for worker in seen.workers):
            broken("a spare takes a place that is not free", action)


def check_size(world: World, made: Plan) -> None:
    """The size is one that the spec allows, changes between attempts alone, and pods never continue with another."""
    before, after, elastic = world.job.status, made.status, world.job.spec.elastic
    if after.gang_size is None:
        return
    changed = after.gang_size != before.gang_size
    if elastic is None or (
        changed and after.gang_size.data not in {size.data for size in (elastic.full, *elastic.smaller)}
    ):
        broken("the gang has a size that the spec does not allow", after.gang_size)
    if before.condition(ConditionType.RUNNING) is None and not after.restarts:
        broken("the first gang gets smaller", after.gang_size)
    if changed:
        begun = before.attempt_time is not None and before.attempt == after.attempt
        if begun or after.gang_size.since_attempt != after.attempt:
            broken("the size changes within an attempt", before.gang_size, after.gang_size)
    pods = {pod.name: pod for pod in world.pods.values()}
    for action in made.actions:
        if isinstance(action, RestartWorker):
            place = next((pod for pod in pods.values() if not pod.spare and pod.index == action.index), None)
            pod = place if action.spare is None else pods.get(action.spare)
            if pod is not None and pod.attempt < after.gang_size.since_attempt:
                broken("a pod continues with another number of workers", action)


def check_profiles(world: World, seen: Observed, made: Plan) -> None:
    """No attempt begins with the spec of another one, or with profiles that cannot be merged."""
    profile, before = seen.profile, world.job.status
    if profile is None or (before.attempt == made.status.attempt and before.attempt_time is not None):
        return
    begins = made.status.attempt_time is not None
    orders = [action for action in made.actions if isinstance(action, CreateWorker | RestartWorker)]
    if (begins or orders) and not (profile.ready and profile.attempt == made.status.attempt):
        broken("an attempt begins without its profiles", profile, orders)


def check_counters(world: World, before: Status, after: Status) -> None:
    """Counters only grow; the budget is not passed."""
    if after.attempt < before.attempt or after.restarts < before.restarts:
        broken("a counter fell")
    spent = before.restarts_towards_max
    if after.restarts_towards_max not in {0, 1, spent, spent + 1}:  # a budget that is whole again may be used at once
        broken("the spent budget fell, or jumped", spent, after.restarts_towards_max)
    if after.restarts_towards_max > world.spec.policy.max_restarts:
        broken("the budget is passed")


def check_culprits(seen: Observed, before: Status, after: Status) -> None:
    """No worker is blamed that stopped in order for another one."""
    gang = whole_gang(seen, before)
    for failure in after.failures:
        if failure in before.failures or failure.attempt != before.attempt:
            continue
        try:
            check_culprit(failure, gang)
        except AssertionError:
            broken("a worker is blamed for another one that was deleted", failure, gang)


def check_end(before: Status, after: Status) -> None:
    """An end stays, and a job that is failing fails."""
    if before.phase in TERMINAL_PHASES and after.phase is not before.phase:
        broken("a terminal phase was left", before.phase, after.phase)
    if before.is_true(ConditionType.FAILURE_TARGET):
        if not after.is_true(ConditionType.FAILURE_TARGET):
            broken("FailureTarget was taken back")
        if after.phase is Phase.SUCCEEDED:
            broken("a failing job has succeeded")


def check_deadline(world: World, after: Status) -> None:
    """A job without a queue lives no longer than it may."""
    limit, start = world.spec.policy.active_deadline_s, after.start_time
    over = limit is not None and start is not None and world.now >= start + limit and not world.spec.gang
    ends = after.phase in TERMINAL_PHASES or after.is_true(ConditionType.FAILURE_TARGET)
    ends |= world.spec.success is SuccessPolicy.RANK0 and bool(after.succeeded)
    if over and not ends and after.phase is not Phase.SUSPENDED and not world.job.deletion_requested:
        broken("the job lives longer than it may", world.now - (start or 0.0))


def check_conditions(world: World, before: Status, after: Status) -> None:
    """Conditions say the same as the phase, and their times do not fall."""
    for phase, kind in RESTING.items():
        if (after.phase is phase) != after.is_true(kind):
            broken("phase and condition differ", after.phase, kind, after.is_true(kind))
    if after.condition(ConditionType.CREATED) is None and not world.job.deletion_requested:
        broken("nobody has said that the job was seen")
    for condition in after.conditions:
        old = before.condition(condition.type)
        if condition.since > world.now or (old is not None and condition.since < old.since):
            broken("a transition time is in the future, or fell", condition.type)


def check_waking(world: World, seen: Observed, made: Plan) -> None:
    """Check that a plan that waits has a time of its next reconciliation, unless an event will trigger one."""
    profile = seen.profile
    if profile is not None and (profile.attempt != made.status.attempt or not profile.ready):
        return  # the spec is merged anew at once, or once a profile changes
    if made.wake_at is not None and made.wake_at <= world.now:
        broken("the next look is in the past", made.wake_at - world.now)
    status = made.status
    if status.phase in TERMINAL_PHASES | {Phase.SUSPENDED} or world.job.deletion_requested:
        return
    pending = any(worker.live or worker.deletion for worker in seen.workers) or seen.init is not None
    if not pending and made.wake_at is None and not changes(made):
        broken("nothing is pending", status.phase)


def check_exclusion(world: World, after: Status) -> None:
    """The list of nodes keeps to its bound, and to what the user allows."""
    limits = world.spec.policy.exclusion
    avoided = [entry.node for entry in after.excluded_nodes]
    tolerated = {entry.node for entry in after.tolerated_nodes}
    if len(avoided) > limits.max_nodes or len(set(avoided)) < len(avoided):
        broken("the list of excluded nodes is too long, or names one twice", avoided)
    if limits.allowed & set(avoided) or tolerated & set(avoided):
        broken("a node is avoided that is allowed or tolerated", avoided)


def check_place_in_queue(world: World, seen: Observed, before: Status, after: Status) -> None:
    """Check that a gang that waits in a queue is not recreated for a node, unless a scheduler has found none."""
    gang = [worker for worker in seen.workers if worker.attempt == before.attempt]
    waits = before.holding_time is None and len(gang) == world.spec.workers and all(map(_only_waits, gang))
    placed = after.condition(ConditionType.PODS_SCHEDULED)
    for_a_node = placed is not None and placed.reason in {"NodeReadmitted", "Unschedulable"}
    if world.spec.gang and waits and for_a_node and after.released > before.released:
        broken("a gang in a queue has lost its place", placed)


def check_time(world: World, after: Status) -> None:
    """Every second since the first plan has one use, and none is negative."""
    spent = after.time_spent
    if spent is None:
        return
    world.counted_from = spent.since if world.counted_from is None else world.counted_from
    seconds = spent.seconds()
    if min(seconds.values()) < 0 or abs(sum(seconds.values()) - (spent.since - world.counted_from)) > 1e-3:
        broken("the time of the job is not accounted for", seconds, spent.since - world.counted_from)


def check_budget(world: World, seen: Observed, made: Plan) -> None:
    """A budget is set only for a gang that is to be protected, and is never removed from it."""
    budgets = (EnsureDisruptionBudget, RemoveDisruptionBudget)
    actions = [action for action in made.actions if isinstance(action, budgets)]
    if len(actions) > 1:
        broken("a budget is set and removed, or set twice", actions)
    protected = is_protected(world, made.status)
    if EnsureDisruptionBudget() in actions and not protected:
        broken("a budget is set for no gang")
    if RemoveDisruptionBudget() in actions and protected:
        broken("a protected gang loses its budget")
    if made.status.is_true(ConditionType.EVICTIONS_REFUSED) and not (protected or world.job.deletion_requested):
        broken("evictions are said to be refused that are not")
    requests = [action for action in made.actions if isinstance(action, RequestCheckpoint)]
    if requests and not (protected and world.spec.policy.disruption is Disruption.CHECKPOINT_FIRST):
        broken("a checkpoint is requested though no eviction waits for it", requests)
    if any(request.request.attempt != made.status.attempt for request in requests):
        broken("a checkpoint of another attempt is requested", requests)
    progress = made.status.progress
    if progress is not None and (progress.checkpoint_time or 0.0) > world.now:
        broken("a checkpoint is said to be of the future", progress)
    settled = not actions and not seen.budget_refusal and not world.job.deletion_requested
    if settled and seen.disruption_budget == world.budget_known and world.budget != protected:
        broken("a budget is missing, or is left", protected)


def is_protected(world: World, status: Status) -> bool:
    """Return whether no worker may be evicted, by the rules that users read."""
    gang = status.attempt_time is not None and status.phase not in TERMINAL_PHASES | {Phase.SUSPENDED}
    if not gang or status.is_true(ConditionType.FAILURE_TARGET):
        return False
    policy, progress = world.spec.policy, status.current_progress
    if policy.disruption is not Disruption.CHECKPOINT_FIRST:
        return policy.disruption is Disruption.PROTECT
    if status.running_time is None:
        return False
    taken = None if progress is None else progress.checkpoint_time
    return micros(world.now) >= max(status.running_time, taken or 0.0) + policy.checkpoint_age_s


def _only_waits(worker: Worker) -> bool:
    return worker.live and not worker.scheduled and not worker.unplaced


def check_pods(world: World) -> None:
    """Check the pods of the cluster: one attempt at a time, of one template."""
    live = [pod for pod in world.pods.values() if pod.live and not pod.spare]
    if len({pod.attempt for pod in live}) > 1 and not world.spec.policy.in_place:
        broken("two attempts are alive")
    current = {pod.template for pod in live if pod.attempt == world.job.status.attempt}
    if len(current) > 1:
        broken("a gang is made of two templates", current)
