"""Nodes of a gang that are to be emptied: closed to new pods, marked by an autoscaler, or being deleted.

An eviction that a budget refuses leaves no trace in the cluster, so what precedes it is read instead. A gang that has
fewer replicas than its job must not grow onto such nodes, either.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.backends.kubernetes.client.resources import NODES, Object
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.plan import TERMINAL_PHASES, ConditionType, Disruption, LeavingNode, Phase

log = logging.getLogger(__name__)

TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "is being removed by Cluster Autoscaler",
    "karpenter.sh/disrupted": "is being removed by Karpenter",
    "karpenter.sh/disruption": "is being removed by Karpenter",
}
"""Taints that autoscalers set on a node before they evict its pods; the last one is of Karpenter before 1.0."""
READ_S = 10.0
"""Shortest time in seconds between two reads of the nodes of a gang."""
PER_NODE_S = 0.1
"""Seconds between two reads for each node of a gang: one of 1,000 nodes reads them every 100 s."""
SHARED_S = 0.02
"""Seconds that a read of a node reserves: 50 nodes a second are read for all gangs together."""
RETRY_S = 60.0
"""Seconds after an error until nodes are read again."""


class LeavingNodes:
    """Reader of the nodes of gangs that may be evicted only after a checkpoint, or that may grow, spares included."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float], *, node_access: bool) -> None:
        self._api = api
        self._clock = clock
        self._node_access = node_access
        self._free_at = float("-inf")
        """When the next read may be reserved."""

    async def read(self, memory: JobMemory, pods: Iterable[PodRecord]) -> float | None:
        """Read the nodes of a gang if that is due; return when to do so next, None while it is not needed."""
        workers = [pod for pod in pods if pod.type is ReplicaType.WORKER and pod.node is not None]
        if not self._node_access or not (_waits(memory) or _may_grow(memory, workers)):
            memory.leaving_nodes, memory.nodes_reserved_at = (), None
            return None
        names = sorted({pod.node for pod in workers if pod.node is not None})
        at = self._reserved_at(memory, len(names))
        if self._clock() < at:
            return at
        memory.nodes_reserved_at = None
        try:
            found = await asyncio.gather(*(self._api.get(NODES, None, name) for name in names))
        except ApiError as error:
            log.warning("%s: nodes cannot be read: %s", memory.job.metadata.name, error)
            memory.nodes_again_at = self._clock() + RETRY_S
            return memory.nodes_again_at
        leaving = ((name, None if node is None else why_leaving(node)) for name, node in zip(names, found, strict=True))
        memory.leaving_nodes = tuple(LeavingNode(name=name, reason=why) for name, why in leaving if why is not None)
        memory.nodes_again_at = self._clock() + max(READ_S, PER_NODE_S * len(names))
        return memory.nodes_again_at

    def _reserved_at(self, memory: JobMemory, nodes: int) -> float:
        """Return when the nodes of a gang may be read: once that is due, after those of gangs that were due before."""
        now = self._clock()
        if memory.nodes_reserved_at is None:
            if now < memory.nodes_again_at:
                return memory.nodes_again_at
            memory.nodes_reserved_at = max(now, self._free_at)
            self._free_at = memory.nodes_reserved_at + SHARED_S * nodes
        return memory.nodes_reserved_at


def _waits(memory: JobMemory) -> bool:
    """Return True while a checkpoint would let evictions of a gang pass that are refused now."""
    policy, status = memory.job.spec.run_policy, memory.status
    runs = status.phase is Phase.RUNNING and status.running_time is not None
    careful = policy.disruption == Disruption.CHECKPOINT_FIRST.value
    return careful and runs and status.is_true(ConditionType.EVICTIONS_REFUSED)


def _may_grow(memory: JobMemory, workers: Iterable[PodRecord]) -> bool:
    """Return True while a spare of a gang with fewer replicas holds a node: what the others are on decides, too."""
    status = memory.status
    if status.gang_size is None or status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}:
        return False
    return status.gang_size.data < memory.spec_job.world.data_parallel_size and any(pod.spare for pod in workers)


def why_leaving(node: Object) -> str | None:
    """Return how it is known that a node is to be emptied, as the end of a sentence; None if it is not."""
    if node["metadata"].get("deletionTimestamp") is not None:
        return "is being deleted"
    spec = node.get("spec") or {}
    keys = {taint.get("key") for taint in spec.get("taints") or ()}
    by_autoscaler = next((text for key, text in TAINTS.items() if key in keys), None)
    return by_autoscaler or ("is cordoned" if spec.get("unschedulable") else None)
