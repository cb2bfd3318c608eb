"""Faults of the model, one at a time; each function is named after its fault."""

import dataclasses
from collections.abc import Callable

from worker_groups import worker_groups

from megatronapp_common.job import read_status, status_document
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import Deletion, Disruption, HubPhase, Phase, SlowRank, WorkerPhase
from megatronapp_operator.plan.spec import ElasticSize, NodeExclusion
from plan_fuzz.cluster import delete, set_down, set_up
from plan_fuzz.pods import Node, Pod, whole
from plan_fuzz.world import World

CODES = (1, 137, 66, 69, 68, 75, 70, 64, 65, 201, 2, 0, 143)


def _pod(world: World) -> Pod | None:
    pods = list(world.pods.values())
    return world.random.choice(pods) if pods else None


def pod_ends(world: World) -> None:
    if (pod := _pod(world)) is not None:
        world.end(pod, world.random.choice(CODES))


def pod_vanishes(world: World) -> None:
    if (pod := _pod(world)) is not None and not pod.has_finalizer:
        world.remove(pod)


def pod_is_deleted(world: World) -> None:
    if (pod := _pod(world)) is not None and pod.live:
        delete(world, pod, float(world.random.choice([0, 30, 600])))
        pod.disrupted = world.random.choice([None, "PreemptionByScheduler", "EvictionByEvictionAPI"])


def gang_stops(world: World) -> None:
    """Delete a pod, for which all ranks of its gang stop in order; its own may take longer."""
    gang = world.gang(world.job.status.attempt)
    if not gang or not world.trains():
        return
    leaving = world.random.choice(gang)
    delete(world, leaving, 30.0)
    for pod in gang:
        if pod is not leaving or world.random.random() < 0.7:
            world.end(pod, ExitCode.PREEMPTED)


def node_changes(world: World) -> None:
    node = world.random.choice(list(world.nodes.values()))
    if node.up:
        set_down(world, node, world.random)
    else:
        set_up(world, node)


def all_down(world: World) -> None:
    for node in world.nodes.values():
        if node.up:
            set_down(world, node, world.random)


def all_up(world: World) -> None:
    for node in world.nodes.values():
        set_up(world, node)


def node_joins(world: World) -> None:
    if len(world.nodes) < world.spec.workers + 3:
        name = f"n{len(world.nodes)}"
        world.nodes[name] = Node(name)


def launcher_sticks(world: World) -> None:
    if (pod := _pod(world)) is not None and pod.in_place:
        pod.stuck = True


def hub_ends(world: World) -> None:
    if world.hub is not None and not world.hub.deleting:
        world.hub = dataclasses.replace(world.hub, phase=HubPhase.ENDED, ended_at=world.now)


def hub_is_deleted(world: World) -> None:
    if world.hub is not None:
        going = Deletion(since=world.now, grace_s=10.0)
        world.hub = dataclasses.replace(world.hub, deleting=True, deletion=going)


def refusals_change(world: World) -> None:
    world.refuses = world.random.choice(["", "", "quota", "quota", "denied", "denied", "final"])


def right_to_remove_workloads_changes(world: World) -> None:
    world.removes_groups = not world.removes_groups


def queue_changes(world: World) -> None:
    world.admits = not world.admits


def hub_judges(world: World) -> None:
    node = world.random.choice(list(world.nodes))
    cause = world.random.choice(["compute", "hang"])
    since = world.now - world.random.choice([0, 100])
    verdict = slow_node(world, node, cause=cause, since=since)
    world.slow_ranks = world.random.choice([None, (), (verdict,), (verdict,)])


def slow_node(world: World, node: str, *, cause: str = "compute", since: float) -> SlowRank:
    """The hub's verdict about a node in this attempt."""
    return SlowRank(
        id=f"v-{node}", subject="node", ranks=(0,), cause=cause, state="confirmed", sentence="slow", slowdown=1.5,
        node=node, since_attempt=world.job.status.attempt, since_time=round(since, 6),
    )  # fmt: skip


def ranks_hang(world: World) -> None:
    world.hung_ranks = world.random.choice([None, (), (0,)])


def suspend(world: World) -> None:
    if not world.job_removed and world.random.random() < 0.5:
        edit(world, suspend=not world.spec.suspend)


def template_is_edited(world: World) -> None:
    if not world.job_removed:
        edit(world, template=f"template-{world.spec.generation}")


def profile_changes(world: World) -> None:
    """The profiles of the next attempt become right or wrong, or are edited."""
    if world.profile is not None:
        world.profile = world.random.choice(["applied", "refused"])
        world.note("profile", world.profile)


def profile_is_edited(world: World) -> None:
    """Profiles have another image, or restart in another way; that reaches no attempt that has begun."""
    if world.profile is None or world.job_removed or world.job.status.attempt_time is not None:
        return
    policy = dataclasses.replace(world.spec.policy, in_place=world.random.random() < 0.5)
    template = world.random.choice([world.spec.template, f"profile-{world.random.randrange(100)}"])
    spec = dataclasses.replace(world.job.spec, template=template, policy=policy)
    world.job = dataclasses.replace(world.job, spec=spec)
    world.note("profile is edited", template, policy.in_place)


def node_is_allowed(world: World) -> None:
    limits = world.spec.policy.exclusion
    names = frozenset(world.random.sample(sorted(world.nodes), k=world.random.choice([0, 1])))
    exclusion = NodeExclusion(enabled=limits.enabled, max_nodes=limits.max_nodes, ttl_s=limits.ttl_s, allowed=names)
    edit(world, policy=dataclasses.replace(world.spec.policy, exclusion=exclusion))


def edit(world: World, **changes: object) -> None:
    """Edit the job as a user may."""
    generation = world.spec.generation + 1
    spec = dataclasses.replace(world.job.spec, generation=generation, **changes)  # type: ignore[arg-type]
    world.job = dataclasses.replace(world.job, spec=spec)
    world.note("edit", sorted(changes))


def job_is_deleted(world: World) -> None:
    if world.random.random() < 0.15:
        world.job = dataclasses.replace(world.job, deletion_requested=True)
        world.note("job deleted")


def all_succeed(world: World) -> None:
    for pod in world.pods.values():
        if pod.runs:
            world.end(pod, 0)


def init_changes(world: World) -> None:
    if world.init is None:
        return
    changes = world.random.choice(
        [
            {"deleting": True},
            {"disrupted": "Evicted", "phase": WorkerPhase.FAILED},
            {"unreachable_since": world.now},
            {"preparing": True},
        ]
    )
    world.init = dataclasses.replace(world.init, **changes) if world.random.random() < 0.8 else None  # type: ignore[arg-type]


def operator_restarts(world: World) -> None:
    """Start a new operator, which remembers the status alone, as the last one wrote it."""
    world.since = world.now
    world.refusal = world.last_contact = world.budget_known = None
    world.budget_refusal = ""
    world.job = dataclasses.replace(world.job, status=read_status(status_document(world.job.status)))
    world.note("operator restarts")


def polls_change(world: World) -> None:
    world.polled = not world.polled


def gathering_changes(world: World) -> None:
    world.missing = world.random.choice([(), (0,), (world.spec.workers - 1,)])


def pod_waits(world: World) -> None:
    if (pod := _pod(world)) is not None:
        pod.waiting = world.random.choice([None, "ImagePullBackOff: x"])


def pod_prepares(world: World) -> None:
    pod = _pod(world)
    if pod is not None and pod.phase is WorkerPhase.PENDING and pod.node is not None:
        pod.preparing, pod.prepared = not pod.preparing, whole(world.now)


def agent_stays(world: World) -> None:
    if (pod := _pod(world)) is not None:
        pod.occupies = world.random.random() < 0.5


def budget_vanishes(world: World) -> None:
    """Delete the budget as another client may; the operator compares what exists at intervals."""
    if world.budget:
        world.budget, world.budget_known = False, None


def right_to_set_budgets_changes(world: World) -> None:
    world.budget_forbidden = not world.budget_forbidden
    world.budget_refusal = ""


def disruption_is_edited(world: World) -> None:
    if not world.job_removed:
        edit(world, policy=dataclasses.replace(world.spec.policy, disruption=world.random.choice(list(Disruption))))


def node_is_drained(world: World) -> None:
    node = world.random.choice(list(world.nodes.values()))
    node.cordoned = not node.cordoned
    world.note("cordoned" if node.cordoned else "uncordoned", node.name)


def resize(world: World) -> None:
    if world.spec.suspend and world.job.status.phase is Phase.SUSPENDED:
        groups, elastic = worker_groups(world.random.choice([1, 2, 3, 4])), world.spec.elastic
        if elastic is not None:  # a worker for each replica
            full = ElasticSize(data=groups[0].nodes, worker_groups=groups)
            smaller = tuple(full.scaled(size.data) for size in elastic.smaller if size.data < full.data)
            elastic = dataclasses.replace(elastic, full=full, smaller=smaller)
        edit(world, worker_groups=groups, elastic=elastic)
        while len(world.nodes) < world.spec.workers:
            node_joins(world)


FAULTS: tuple[Callable[[World], None], ...] = (
    pod_ends, pod_vanishes, pod_is_deleted, gang_stops, node_changes, all_down, all_up, all_up, hub_ends,
    hub_is_deleted, refusals_change, right_to_remove_workloads_changes, queue_changes, hub_judges, ranks_hang, suspend,
    template_is_edited, profile_changes, profile_is_edited,
    node_is_allowed, job_is_deleted, all_succeed, init_changes, operator_restarts, polls_change,
    gathering_changes, launcher_sticks, pod_waits, pod_prepares, agent_stays, resize,
    node_is_drained, budget_vanishes, right_to_set_budgets_changes, disruption_is_edited,
)  # fmt: skip
