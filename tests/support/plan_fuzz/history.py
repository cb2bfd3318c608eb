"""One generated history: a job, its cluster, its faults, and whether the job reaches its end."""

import dataclasses
import random

from worker_groups import worker_groups

from megatronapp_operator.plan import (
    Backoff,
    CleanPodPolicy,
    Disruption,
    Elastic,
    ElasticSize,
    FailureAction,
    FailureMatch,
    FailureRule,
    JobSpec,
    JobState,
    NodeExclusion,
    PodGroupKey,
    RunPolicy,
    SlowNodeAction,
    SlowNodePolicy,
    SuccessPolicy,
)
from plan_fuzz import liveness
from plan_fuzz.cluster import tick
from plan_fuzz.faults import FAULTS
from plan_fuzz.pods import Node
from plan_fuzz.promises import Broken
from plan_fuzz.simulated_operator import Operator
from plan_fuzz.world import World, advance

STEPS = 60
BEGIN = 1_700_000_000.0
RULES: tuple[tuple[FailureRule, ...], ...] = (
    (),
    (),
    (),
    (FailureRule(match=FailureMatch(exit_codes=(137,)), action=FailureAction.IGNORE),),
    (FailureRule(match=FailureMatch(workers=(0,)), action=FailureAction.EXCLUDE_AND_RESTART),),
    (FailureRule(match=FailureMatch(exit_codes=(1,)), action=FailureAction.FAIL_JOB),),
)


GROUPS = {
    "none": (PodGroupKey.NONE,),
    "gated": (PodGroupKey.WORKLOAD,),
    "whole": (PodGroupKey.POD_GROUP,),
}
"""How the queue knows a gang."""


def play(seed: int, *, spares: int | None = None, elastic: bool = False) -> str:
    """Play one history; returns the kind of its end. Raises Broken with the seed and what happened last.

    `spares`: restart in place with this number of spares, and without a queue; None: as drawn. `elastic`: the gang may
    get smaller; with `spares` only.
    """
    draw = random.Random(seed)
    world = make_world(draw, seed)
    if spares is not None:
        policy = dataclasses.replace(world.spec.policy, in_place=True, spares=spares)
        spec = dataclasses.replace(world.spec, policy=policy, gang=False, group=PodGroupKey.NONE)
        world.job, world.queue = dataclasses.replace(world.job, spec=spec), "none"
        world.nodes |= {name: Node(name) for name in (f"s{number}" for number in range(spares))}
        if elastic:
            world.job = dataclasses.replace(world.job, spec=make_elastic(draw, spec))
            world.nodes |= {name: Node(name) for name in (f"n{number}" for number in range(world.spec.workers))}
    operator = Operator(world)
    try:
        for _ in range(draw.randrange(STEPS)):
            if world.job_removed:
                break
            step(world, operator)
        operator.wait_frozen()
        return liveness.end(world, operator)
    except Exception as error:
        happened = "\n".join(world.log)
        raise Broken(f"history {seed}: {error}\n{describe(world)}\n{happened}") from error


def step(world: World, operator: Operator) -> None:
    """Maybe inject a fault, advance the cluster and reconcile; then let time pass."""
    draw = world.random
    if draw.random() < 0.35:
        draw.choice(FAULTS)(world)
    if draw.random() < 0.75:
        tick(world)
    if draw.random() < 0.8:
        stop_after = None if draw.random() < 0.85 else draw.randrange(4)
        operator.reconcile(stop_after=stop_after, stale=draw.random() < 0.3)
    due = operator.wake_at
    if due is None or due <= world.now or draw.random() < 0.6:
        advance(world, draw.choice([0.001, 0.3, 1, 5, 5, 20]))
    else:
        advance(world, min(due - world.now, 4000.0))


def make_world(draw: random.Random, seed: int) -> World:
    """A job and its cluster; of the nodes there may be none to spare."""
    workers = draw.choice([1, 1, 2, 2, 3, 4])
    queue = draw.choice(["none", "none", "gated", "whole"])
    now = round(BEGIN + draw.random(), 6)
    world = World(
        random=draw,
        job=JobState(spec=make_spec(draw, seed, workers, queue)),
        now=now,
        since=now,
        nodes={name: Node(name) for name in (f"n{number}" for number in range(workers + draw.choice([0, 0, 1, 3])))},
        queue=queue,
        peers_notice=draw.random() < 0.7,
        polled=draw.random() < 0.8,
        table_known=draw.random() < 0.8,
        image_fails=draw.random() < 0.05,
        profile=draw.choice([None, "applied", "refused"]),
    )
    if draw.random() < 0.15:
        world.crashes_with = draw.choice([1, 137, 66, 69, 75, 64, 201])
    return world


def make_spec(draw: random.Random, seed: int, workers: int, queue: str) -> JobSpec:
    """Return the spec that the user writes; the job's rules refuse a restart in place where a queue places pods."""
    spec = JobSpec(
        name="job",
        uid=f"uid-{seed}",
        worker_groups=worker_groups(workers, forward=workers // 2 if seed % 2 else 0),
        hub=draw.random() < 0.5,
        hub_retain_s=30,
        initializers=draw.random() < 0.25,
        gang=queue != "none",
        group=draw.choice(GROUPS[queue]),
        serves=draw.random() < 0.1,
        success=draw.choice([SuccessPolicy.ALL_WORKERS] * 3 + [SuccessPolicy.RANK0]),
        rank_zero=draw.choice([0, None]),
        template="first",
        slow_node=SlowNodePolicy(action=draw.choice(list(SlowNodeAction)), min_s=30),
        policy=make_policy(draw),
    )
    in_place = spec.policy.in_place and not spec.gang
    return dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, in_place=in_place))


def make_elastic(draw: random.Random, spec: JobSpec) -> JobSpec:
    """Return the spec with two to four replicas of a worker each, of which some may be missing."""
    data = draw.choice([2, 3, 4])
    full = ElasticSize(data=data, worker_groups=worker_groups(data))
    allowed = sorted(draw.sample(range(1, data), draw.randrange(1, data)), reverse=True)
    elastic = Elastic(full=full, smaller=tuple(map(full.scaled, allowed)), patience_s=draw.choice([20, 50]))
    return dataclasses.replace(spec, worker_groups=full.worker_groups, elastic=elastic, serves=False)


def make_policy(draw: random.Random) -> RunPolicy:
    """Limits, short and long ones."""
    exclusion = NodeExclusion(
        enabled=draw.random() < 0.8, max_nodes=draw.choice([1, 2, 5]), ttl_s=draw.choice([200, 86400])
    )
    policy = RunPolicy(
        max_restarts=draw.choice([0, 1, 3]),
        backoff=Backoff(initial_s=draw.choice([0, 5, 10]), max_s=draw.choice([20, 600])),
        reset_after_s=draw.choice([50, 3600]),
        active_deadline_s=draw.choice([None, None, 2000]),
        start_deadline_s=draw.choice([60, 900]),
        progress_deadline_s=draw.choice([None, 90, 1800]),
        in_place=draw.random() < 0.5,
        spares=draw.choice([0, 0, 1, 2]),
        disruption=draw.choice(list(Disruption)),
        checkpoint_age_s=draw.choice([20, 300]),
        grace_s=draw.choice([30, 600]),
        failed_grace_s=30,
        lost_worker_s=draw.choice([60, 300]),
        rules=draw.choice(RULES),
        exclusion=exclusion,
    )
    clean, ttl_s = draw.choice(list(CleanPodPolicy)), draw.choice([None, None, None, 0, 100])
    return dataclasses.replace(policy, clean=clean, ttl_s=ttl_s)


def describe(world: World) -> str:
    """The state of the world for a report."""
    pods = [(pod.index, pod.attempt, pod.phase.value, pod.node, pod.deletion) for pod in world.pods.values()]
    nodes = [(node.name, node.up) for node in world.nodes.values()]
    status = world.job.status
    lines = [f"spec {world.spec}", f"queue {world.queue}, nodes {nodes}", f"pods {pods}, init {world.init}"]
    lines += [f"phase {status.phase}, attempt {status.attempt}, released {status.released}"]
    lines += [f"excluded {status.excluded_nodes}, tolerated {status.tolerated_nodes}"]
    for condition in status.conditions:
        lines.append(f"{condition.type.value}={condition.status} {condition.reason}: {condition.message}")
    return "\n".join(lines)
