"""Actions of queues, schedulers and kubelets on the model within one tick."""

import dataclasses
import random
from typing import Any

from megatronapp_common.job.api.progress import ProgressState
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import Deletion, HubPhase, Progress, WorkerPhase
from plan_fuzz.pods import Node, Pod, whole
from plan_fuzz.world import World

EVICTED_AFTER_S = 300.0
"""Seconds without a report from a node after which the cluster deletes its pods."""
EVICTION_GRACE_S = 30.0
STANDBY_S, GATHER_S = 1800.0, 3600.0
"""Seconds for which launchers wait for an order, and for the others."""
STATES: tuple[ProgressState, ...] = ("training", "training", "training", "training", "saving", "starting")


def tick(world: World) -> None:
    """Everybody does a part of what is to be done."""
    admit(world)
    place(world)
    let_go(world)
    evict_waiting(world)
    for pod in list(world.pods.values()):
        evict(world, pod)
        run(world, pod)
        continue_in_place(world, pod)
        go(world, pod)
    lose_peers(world)
    initialize(world)
    serve_hub(world)
    crash(world)
    make_progress(world)


def admit(world: World) -> None:
    """A queue takes a gang that is whole."""
    gated = [pod for pod in world.pods.values() if pod.gated and pod.deletion is None]
    if world.admits and len(gated) == world.spec.workers and world.random.random() < 0.7:
        for pod in gated:
            pod.gated = False


def place(world: World) -> None:
    """The scheduler gives pods a node, each alone or all of them together."""
    waiting = [pod for pod in world.pods.values() if waits_for_node(pod)]
    if not waiting or world.random.random() < 0.3:
        return
    chosen = _choose(world, waiting)
    if world.queue == "whole" and (len(chosen) < world.spec.workers or not world.admits):
        chosen = {}
    for pod in waiting:
        pod.node = chosen.get(pod.uid)
        pod.unplaced = pod.node is None
        if pod.node is not None:
            world.note("placed", pod.index, pod.attempt, pod.node)


def waits_for_node(pod: Pod) -> bool:
    """Return whether a scheduler has to place the pod."""
    return pod.node is None and pod.live and pod.deletion is None and not pod.gated


def _choose(world: World, waiting: list[Pod]) -> dict[str, str]:
    """Return nodes by uid of a pod."""
    used = {pod.node for pod in world.pods.values() if pod.live}
    free = [node.name for node in world.nodes.values() if node.up and not node.cordoned and node.name not in used]
    world.random.shuffle(free)
    chosen: dict[str, str] = {}
    for pod in waiting:
        fits = next((name for name in free if name not in pod.avoids), None)
        if fits is not None:
            free.remove(fits)
            chosen[pod.uid] = fits
    return chosen


def let_go(world: World) -> None:
    """A queue takes its finalizers off once no pod of a gang that is never filled up again may still run."""
    for pod in list(world.pods.values()):
        gang = _gang(world, pod)
        if pod.has_finalizer and not any(member.live for member in gang):
            pod.has_finalizer = False
            if pod.deletion is not None and pod.deletion.grace_s == 0:
                world.try_remove(pod)


def evict(world: World, pod: Pod) -> None:
    """Delete pods of nodes that do not report, as the node controller does."""
    node = None if pod.node is None else world.nodes[pod.node]
    if node is None or node.down_since is None or pod.deletion is not None:
        return
    if world.now >= node.down_since + EVICTED_AFTER_S and world.random.random() < 0.5:
        delete(world, pod, EVICTION_GRACE_S)
        pod.disrupted = "DeletionByTaintManager"


def delete(world: World, pod: Pod, grace_s: float) -> None:
    """Request the deletion of a pod, as clients other than the operator may."""
    if pod.deletion is None:
        pod.deletion = Deletion(since=whole(world.now), grace_s=grace_s)
        world.note("deleted by others", pod.index, pod.attempt)
    if grace_s == 0:
        world.try_remove(pod)


def run(world: World, pod: Pod) -> None:
    """A kubelet starts containers."""
    if pod.phase is not WorkerPhase.PENDING or pod.deletion is not None or not world.healthy(pod):
        return
    if world.image_fails or not _node(world, pod).starts_pods:
        pod.waiting = "ImagePullBackOff: no such image"
        return
    if pod.preparing or world.random.random() < 0.3:
        return
    pod.phase, pod.waiting = WorkerPhase.RUNNING, None
    pod.started = pod.reachable_since = whole(world.now)


def continue_in_place(world: World, pod: Pod) -> None:
    """A launcher follows the order for another attempt; without one it ends, as do those that wait for others.

    One that is stuck with an order follows it never; without an order its wait ends as that of others.
    """
    if pod.phase is not WorkerPhase.RUNNING or not world.healthy(pod) or pod.spare:
        return
    if pod.stuck and (pod.end is None or pod.joined < pod.attempt):
        return
    if pod.joined < pod.attempt and world.random.random() < 0.6:
        pod.joined, pod.end = pod.attempt, None
    elif pod.end is not None and pod.finished is not None and world.now > pod.finished + STANDBY_S:
        world.end(pod, pod.end.code)
    elif pod.in_place and pod.runs and _waits_in_vain(world, pod):
        world.end(pod, ExitCode.RENDEZVOUS)


def _waits_in_vain(world: World, pod: Pod) -> bool:
    """Return whether a launcher has waited for too long for one that follows no order."""
    late = any(member.joined < member.attempt for member in _gang(world, pod))
    return late and pod.joined == pod.attempt and world.now > pod.ordered + GATHER_S


def _node(world: World, pod: Pod) -> Node:
    assert pod.node is not None
    return world.nodes[pod.node]


def go(world: World, pod: Pod) -> None:
    """A pod that is to go does so: with its trainer, or when its grace is over; on a dead node it stays."""
    if pod.deletion is None:
        return
    if pod.node is None:
        world.try_remove(pod)
        return
    if not world.healthy(pod):
        return
    if pod.runs and world.random.random() < 0.5:
        world.end(pod, world.random.choice([75, 75, 75, 1, 0, 69]))
    if world.now >= pod.deletion.since + pod.deletion.grace_s or (not pod.live and world.random.random() < 0.7):
        world.try_remove(pod)


def lose_peers(world: World) -> None:
    """Ranks end when a peer has ended, and where they notice it when its machine is dead."""
    for pod in list(world.pods.values()):
        lost = pod.joined in world.broken or (world.peers_notice and not _all_alive(world, pod.attempt))
        if pod.runs and not pod.spare and world.healthy(pod) and lost and world.random.random() < 0.5:
            stopped = any(
                member.outcome is not None and member.outcome.code == ExitCode.PREEMPTED for member in _gang(world, pod)
            )
            world.end(pod, ExitCode.PREEMPTED if stopped else ExitCode.PEER_LOST)


def _gang(world: World, pod: Pod) -> list[Pod]:
    return world.gang(pod.attempt)


def _all_alive(world: World, attempt: int) -> bool:
    """Return whether no running pod of the gang is on a machine that is down."""
    gang = [pod for pod in world.gang(attempt) if pod.runs]
    return all(map(world.healthy, gang))


def initialize(world: World) -> None:
    """Advance the initializer pod to its next phase, or remove it."""
    init = world.init
    if init is None or world.random.random() < 0.5:
        return
    if init.deleting:
        world.init = None
    elif init.live and init.unreachable_since is None:
        ends = [WorkerPhase.SUCCEEDED, WorkerPhase.SUCCEEDED, WorkerPhase.FAILED]
        phase = WorkerPhase.RUNNING if init.phase is WorkerPhase.PENDING else world.random.choice(ends)
        world.init = dataclasses.replace(init, phase=phase, begun_at=world.now, finished_at=world.now)


def serve_hub(world: World) -> None:
    """Start the hub, or remove it."""
    hub = world.hub
    if hub is None:
        return
    if hub.deletion is not None and world.random.random() < 0.7:
        world.hub = None
    elif hub.phase is HubPhase.STARTING and world.random.random() < 0.6:
        world.hub = dataclasses.replace(hub, phase=HubPhase.READY)


def crash(world: World) -> None:
    """End a worker by a permanent fault of its program, again and again."""
    if world.crashes_with is None or not world.trains() or world.random.random() < 0.5:
        return
    gang = world.gang(world.job.status.attempt)
    world.end(world.random.choice(gang), world.crashes_with)


def make_progress(world: World) -> None:
    """A gang that trains says so, to hub and launcher."""
    if world.polled and world.random.random() < 0.6:
        world.last_contact = world.now
    if not world.trains() or world.random.random() < 0.4:
        return
    world.iteration += 1
    state: ProgressState = "serving" if world.spec.serves else world.random.choice(STATES)
    attempt = world.job.status.attempt
    world.progress = Progress(
        attempt=attempt, iteration=world.iteration, state=state, updated_at=whole(world.now), **_checkpoint(world)
    )
    if world.polled:
        world.last_contact = world.now
    gang = world.gang(attempt)
    ordered, late = any(pod.checkpoint for pod in gang), any(pod.withdrawn for pod in gang)
    if (ordered or late) and world.random.random() < (0.3 if ordered else 0.05):
        for pod in gang:
            world.end(pod, ExitCode.PREEMPTED)


def _checkpoint(world: World) -> dict[str, Any]:
    """Return the newest checkpoint of the attempt, by clocks that may differ: a new one now and then, or on request."""
    before, attempt = world.progress, world.job.status.attempt
    requested = any(pod.save_request is not None and pod.index == 0 for pod in world.gang(attempt))
    if world.random.random() < (0.5 if requested else 0.1):
        at = whole(world.now + world.random.choice([0, 0, 0, 90]))
        return {"checkpoint_iteration": world.iteration, "checkpoint_time": at}
    if before is None or before.attempt != attempt:
        return {}
    return {"checkpoint_iteration": before.checkpoint_iteration, "checkpoint_time": before.checkpoint_time}


def evict_waiting(world: World) -> None:
    """Evict pods of cordoned nodes as a drain does, unless a budget refuses it."""
    for pod in list(world.pods.values()):
        cordoned = pod.node is not None and world.nodes[pod.node].cordoned
        if cordoned and pod.deletion is None and not world.budget and world.random.random() < 0.5:
            delete(world, pod, EVICTION_GRACE_S)
            pod.disrupted = "EvictionByEvictionAPI"


def set_down(world: World, node: Node, random_: random.Random) -> None:
    """Let a machine stop reporting."""
    node.down_since = world.now
    for pod in world.pods.values():
        if pod.node == node.name and pod.live:
            pod.unreachable = whole(world.now - random_.choice([0, 0, 40]))
    world.note("down", node.name)


def set_up(world: World, node: Node) -> None:
    """Let a machine report again, with the pods that are still on it."""
    node.down_since = None
    for pod in world.pods.values():
        if pod.node == node.name and pod.unreachable is not None:
            pod.unreachable, pod.reachable_since = None, whole(world.now)
    world.note("up", node.name)
