"""Checks that a job reaches its end, or trains, in a world that stays as bad as it is.

A world stays healthy, or keeps nodes that are dead, a node that is slow, a node that has failed once, an image that
no node can pull, too few nodes for a while, or a quota that is used up for a while. That a gang trains is read from the
world, never of the status.
"""

import dataclasses
from collections.abc import Callable

from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    ConditionType,
    HubPhase,
    NodeExclusion,
    Phase,
    SlowNodeAction,
    SuccessPolicy,
    WorkerPhase,
)
from plan_fuzz.cluster import set_down, set_up, tick
from plan_fuzz.faults import edit, slow_node
from plan_fuzz.pods import Node
from plan_fuzz.promises import broken
from plan_fuzz.simulated_operator import Operator
from plan_fuzz.world import World, advance

PLANS = 600
TRAINED_PLANS = 5
SPARE_PLANS = 3
SHORTAGE_S = 5400.0
SLACK_S = 360.0
RELEASE_PAUSE_S = 900.0
"""Longest pause after a gang was released."""
BROKEN_DEVICE = 201
"""Exit code after which the node is excluded."""
SLOW_S = 6 * 3600.0
TRAINED_FRACTION = 0.6


def end(world: World, operator: Operator) -> str:
    """Play the history to its end in one of the worlds; returns which, and how it ended."""
    if world.job_removed:
        return "gone"
    calm(world)
    resizes = world.spec.elastic is not None and world.random.random() < 0.5
    kind, keep = ("fewer nodes", keep_fewer_nodes) if resizes else world.random.choice(WORLDS)
    world.note("from here on the world is", kind)
    if not keep(world, operator):
        return f"{kind}: {settle(world, operator)}"
    return f"{kind}: kept"


def calm(world: World) -> None:
    """No more trouble than the world is to keep."""
    if world.spec.suspend and world.random.random() < 0.5:
        edit(world, suspend=False)
    world.crashes_with, world.refuses, world.refusal = None, "", None
    world.hung_ranks, world.slow_ranks, world.missing = None, (), ()
    world.polled = world.admits = world.removes_groups = True
    world.budget_forbidden, world.budget_refusal = False, ""
    world.image_fails = False
    world.profile = None if world.profile is None else "applied"
    for node in world.nodes.values():
        node.cordoned = False
    for pod in world.pods.values():
        pod.waiting, pod.preparing, pod.occupies = None, False, False


def heal(world: World) -> None:
    """Let all machines work."""
    for node in world.nodes.values():
        set_up(world, node)
        node.starts_pods = True
    if world.init is not None and world.init.unreachable_since is not None:
        world.init = None


def keep_healthy(world: World, _: Operator) -> bool:
    heal(world)
    return False


def keep_dead_nodes(world: World, operator: Operator) -> bool:
    """Keep dead nodes dead, and let one more die under a worker; for every worker there is a node that works."""
    world.polled = world.random.random() < 0.5
    under = [pod.node for pod in world.pods.values() if pod.node is not None and world.healthy(pod)]
    if under:
        set_down(world, world.nodes[world.random.choice(under)], world.random)
    while sum(node.up for node in world.nodes.values()) < world.spec.workers:
        name = f"n{len(world.nodes)}"
        world.nodes[name] = Node(name)
    return False


def keep_slow_node(world: World, operator: Operator) -> bool:
    """Keep one of the nodes slow, and let the hub report it whenever a worker is on it: the gang must still train."""
    heal(world)
    ended = [pod for pod in world.pods.values() if pod.phase is WorkerPhase.SUCCEEDED and not pod.spare]
    if ended or not _may_train(world):
        return False
    excluded = {entry.node for entry in world.job.status.excluded_nodes}
    others = [name for name in world.nodes if name not in excluded]
    if not others:  # a node that is excluded already is no reason for a restart, with any action
        return False
    limits = NodeExclusion(enabled=world.random.random() < 0.8, ttl_s=2 * SLOW_S)
    policy = dataclasses.replace(world.spec.policy, exclusion=limits, active_deadline_s=None, progress_deadline_s=None)
    action = world.random.choice([*SlowNodeAction, SlowNodeAction.EXCLUDE_AND_RESTART])
    edit(world, policy=policy, slow_node=dataclasses.replace(world.spec.slow_node, action=action))
    slow, began, trained = world.random.choice(others), world.now, 0.0
    for _ in range(20 * PLANS):
        tick(world)
        operator.reconcile()
        if not _may_train(world) or _some_succeeded(world):
            return False
        trains = world.trains()
        on_it = any(pod.node == slow and pod.runs and not pod.spare for pod in world.pods.values())
        world.slow_ranks = (slow_node(world, slow, since=world.now - 100),) if trains and on_it else ()
        passed = _leap(world, operator)
        trained += passed if trains and world.now > began + SLOW_S / 2 else 0.0
        if world.now >= began + SLOW_S:
            break
    if trained < TRAINED_FRACTION * SLOW_S / 2:
        broken("a slow node keeps the gang from training", f"{trained:.0f} s of {SLOW_S / 2:.0f} s")
    tolerated = slow in {entry.node for entry in world.job.status.tolerated_nodes}
    free = len(world.nodes) > world.spec.workers and not tolerated
    if free and limits.enabled and action is SlowNodeAction.EXCLUDE_AND_RESTART and on_it:
        broken("a slow node is used though another is free")
    world.slow_ranks = ()
    return False


def keep_failed_node(world: World, operator: Operator) -> bool:
    """A device of a node fails once, and most often no other node is free: the gang trains again soon all the same."""
    heal(world)
    limits = NodeExclusion(max_nodes=world.spec.policy.exclusion.max_nodes)
    policy = dataclasses.replace(
        world.spec.policy, exclusion=limits, rules=(), max_restarts=9, active_deadline_s=None, progress_deadline_s=None
    )
    edit(world, policy=policy)
    if not _trains_within(world, operator, PLANS * 300.0):
        return False
    running = [pod for pod in world.gang(world.job.status.attempt) if pod.runs]
    used = {pod.node for pod in running}
    unused = [node for node in world.nodes.values() if node.name not in used]
    for node in unused[world.random.choice([0, 0, 1]) :]:
        set_down(world, node, world.random)
    world.end(world.random.choice(running), BROKEN_DEVICE)
    excluded = operator.reconcile().status.excluded_nodes
    rounds = 1 + max(1, len(excluded))
    bound = rounds * (2 * (world.spec.policy.start_deadline_s or 0.0) + RELEASE_PAUSE_S) + SHORTAGE_S
    if not _trains_within(world, operator, bound) and _may_train(world) and not _some_succeeded(world):
        broken("a node that has failed keeps the gang from training", f"{bound:.0f} s")
    return False


def keep_fewer_nodes(world: World, operator: Operator) -> bool:
    """Let nodes die under a gang that may get smaller: it trains with those that are left, and whole once all work."""
    heal(world)
    elastic = world.spec.elastic
    limits = NodeExclusion(enabled=False)
    policy = dataclasses.replace(
        world.spec.policy, exclusion=limits, rules=(), max_restarts=99, active_deadline_s=None, progress_deadline_s=None
    )
    edit(world, policy=policy)
    if (
        elastic is None
        or not elastic.smaller
        or not policy.in_place
        or not _trains_within(world, operator, PLANS * 300.0)
    ):
        return False
    left = world.random.randrange(elastic.smaller[-1].workers, elastic.full.workers)
    for node in world.random.sample(sorted(world.nodes.values(), key=lambda node: node.name), len(world.nodes) - left):
        set_down(world, node, world.random)
    bound = 4 * (2 * (policy.start_deadline_s or 0.0) + RELEASE_PAUSE_S + policy.lost_worker_s) + SHORTAGE_S
    if not _trains_within(world, operator, bound) and _may_train(world) and not _some_succeeded(world):
        broken("a gang that may get smaller does not train with the nodes that are left", left)
    heal(world)
    until = world.now + 10 * bound
    while _may_train(world) and not _some_succeeded(world):
        tick(world)
        operator.reconcile()
        if world.trains() and world.spec.workers == elastic.full.workers:
            return False
        advance(world, world.random.choice([5, 15, 30]))
        if world.now > until:
            broken("a gang stays smaller though all nodes work", world.spec.workers)
    return False


def _trains_within(world: World, operator: Operator, seconds: float) -> bool:
    """True if the gang trains before that time is over."""
    until = world.now + seconds
    while world.now < until and _may_train(world) and not _some_succeeded(world):
        tick(world)
        operator.reconcile()
        if world.trains():
            return True
        # A kubelet has several ticks within the shortest start deadline.
        advance(world, world.random.choice([5, 15, 30]))
    return False


def _may_train(world: World) -> bool:
    """Return whether nothing but the cluster keeps the gang from training."""
    status = world.job.status
    failing = status.phase in TERMINAL_PHASES or status.is_true(ConditionType.FAILURE_TARGET)
    return not (failing or world.spec.suspend or world.job.deletion_requested or world.job_removed)


def keep_hanging(world: World, operator: Operator) -> bool:
    """Let ranks hang, or some never reach the gathering: where a deadline applies, the gang is restarted."""
    heal(world)
    status = world.job.status
    gathers = status.current_progress is None and (world.progress is None or world.progress.attempt != status.attempt)
    if not gathers and world.spec.policy.progress_deadline_s is None:
        return False
    world.hung.add(status.attempt)
    if gathers:
        world.missing, world.missing_in = (world.spec.workers - 1,), status.attempt
    return False


def keep_denied(world: World, operator: Operator) -> bool:
    """Deny all new pods permanently: a job that has never run fails, another one continues to try."""
    heal(world)
    world.refuses = "denied"
    until = world.now + 2 * SHORTAGE_S
    for _ in range(PLANS):
        tick(world)
        operator.reconcile()
        if rest_of(world) is not None or world.trains() or world.now > until:
            break
        pass_time(world, operator)
    has_run = world.job.status.condition(ConditionType.RUNNING) is not None
    if not has_run and not world.trains() and _may_train(world):
        broken("a job whose pods are denied does not fail", world.job.status.phase)
    world.refuses = ""
    return False


def keep_image_missing(world: World, operator: Operator) -> bool:
    """Let no container of a new gang ever start: the job fails, it does not hold its machines without limit."""
    heal(world)
    world.image_fails = True
    return False


def keep_short_of_nodes(world: World, operator: Operator) -> bool:
    """Keep one node too few for a while: what is placed is released in time, and the gang starts when there is one."""
    up = [node for node in world.nodes.values() if node.up]
    for node in up[world.spec.workers - 1 :]:
        set_down(world, node, world.random)
    until, holding_since, attempt = world.now + SHORTAGE_S, world.now, -1
    bound = 2 * (world.spec.policy.start_deadline_s or 0.0) + world.spec.policy.lost_worker_s + SLACK_S
    for _ in range(PLANS):
        tick(world)
        operator.reconcile()
        status = world.job.status
        placed = any(pod.node and pod.live for pod in world.gang(status.attempt))
        if status.attempt != attempt or not placed or status.running_time is not None:
            attempt, holding_since = status.attempt, world.now
        if world.now > holding_since + bound and _may_train(world):
            broken("a gang that is not whole holds machines", f"{world.now - holding_since:.0f} s")
        _leap(world, operator)
        if world.now > until:
            break
    heal(world)
    return False


def keep_quota_full(world: World, operator: Operator) -> bool:
    """No pod is taken for a while, and then they are."""
    heal(world)
    world.refuses, until = "quota", world.now + SHORTAGE_S
    for _ in range(PLANS):
        tick(world)
        operator.reconcile()
        _leap(world, operator)
        if world.now > until:
            break
    world.refuses = ""
    return False


WORLDS: tuple[tuple[str, Callable[[World, Operator], bool]], ...] = (
    ("healthy", keep_healthy),
    ("dead nodes", keep_dead_nodes),
    ("dead nodes", keep_dead_nodes),
    ("slow node", keep_slow_node),
    ("failed node", keep_failed_node),
    ("no image", keep_image_missing),
    ("short of nodes", keep_short_of_nodes),
    ("hanging ranks", keep_hanging),
    ("denied pods", keep_denied),
    ("quota", keep_quota_full),
)


def settle(world: World, operator: Operator) -> str:
    """Continue until the job rests. Raises Broken where it never does."""
    trained, trained_in, short = 0, -1, 0
    for _ in range(PLANS):
        tick(world)
        fails = failing_for(world) is not None  # an operator that was cut off has decided it, and removed nothing yet
        operator.reconcile()
        rests = rest_of(world)
        if rests is not None:
            return rests
        status, trains = world.job.status, world.trains()
        trained += trains
        trained_in = status.attempt if trains and not fails else trained_in
        if trained_in == status.attempt and (why := failing_for(world)) == "StartDeadlineExceeded":
            broken("a gang that trains is said not to have started", why)
        if trained == TRAINED_PLANS and world.spec.hub and world.hub is None and _may_train(world):
            broken("a gang trains without its hub")
        short = short + 1 if trains and status.phase is Phase.RUNNING and _lacks_spares(world) else 0
        if short > SPARE_PLANS and not fails:
            broken("a spare is not replaced")
        if trained > TRAINED_PLANS or _some_succeeded(world):
            finish(world)
        pass_time(world, operator)
    broken("the job does not settle", world.job.status.phase)


def _lacks_spares(world: World) -> bool:
    """Return whether fewer pods than there should be wait, or are about to."""
    policy = world.spec.policy
    desired = policy.spares + world.spec.absent_workers if policy.in_place and not world.spec.gang else 0
    return sum(pod.spare for pod in world.pods.values()) < desired


def rest_of(world: World) -> str | None:
    """Return how the job rests, or None if it does not yet."""
    status = world.job.status
    if world.job_removed:
        return "gone"
    if world.job.deletion_requested:
        hub_ends = world.hub is None or world.hub.deleting or world.hub.phase is HubPhase.ENDED
        return "deleted" if not world.pods and world.init is None and hub_ends else None
    if status.phase in TERMINAL_PHASES:
        lives = any(pod.live for pod in world.pods.values()) or world.groups  # a queue counts groups
        return status.phase.value if world.spec.policy.ttl_s is None and not lives else None
    if world.spec.suspend:
        rests = status.phase is Phase.SUSPENDED and not world.pods and not world.groups
        return "Suspended" if rests else None
    if world.spec.serves and world.trains() and status.phase is Phase.RUNNING:
        return "serves"
    return None


def failing_for(world: World) -> str | None:
    """Return the reason why the job is failing, or None."""
    target = world.job.status.condition(ConditionType.FAILURE_TARGET)
    return None if target is None else target.reason


def finish(world: World) -> None:
    """The training is done: all ranks end, or only rank 0 where its success is that of the job."""
    status = world.job.status
    first = status.rank_zero if world.spec.rank_zero is None else world.spec.rank_zero
    alone = world.spec.success is SuccessPolicy.RANK0 and first is not None and status.attempt not in world.broken
    for pod in world.pods.values():
        if pod.runs and not pod.spare and world.healthy(pod) and (not alone or pod.index == first):
            world.end(pod, 0)


def _some_succeeded(world: World) -> bool:
    """The others of a gang end with it, once all of it has started."""
    phases = [pod.phase for pod in world.pods.values() if not pod.spare]
    phases += [WorkerPhase.SUCCEEDED] * len(world.job.status.succeeded)  # also of a failure that is ignored
    return WorkerPhase.SUCCEEDED in phases and WorkerPhase.PENDING not in phases


def _leap(world: World, operator: Operator) -> float:
    """Skip to the next reconciliation that the plan requested, or by minutes; return the seconds."""
    due = world.now + 300.0 if operator.wake_at is None else operator.wake_at
    seconds = min(max(due - world.now, 5.0), 300.0)
    advance(world, seconds)
    return seconds


def pass_time(world: World, operator: Operator) -> None:
    """Let a little time pass, or the time to the next reconciliation that the plan requested."""
    due = operator.wake_at
    if due is None or due <= world.now or world.random.random() < 0.5:
        seconds = float(world.random.choice([1, 2, 5, 30]))
    else:
        seconds = due - world.now
    advance(world, seconds)
