"""Nodes of a gang that are to be emptied: closed to new pods, marked by an autoscaler, or being deleted.

An eviction that a budget refuses leaves no trace in the cluster, so what precedes it is read instead.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.backends.kubernetes.client.resources import NODES, Object
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.plan import Disruption, LeavingNode, Phase

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
RETRY_S = 60.0
"""Seconds after an error until nodes are read again."""


class LeavingNodes:
    """Reader of the nodes of gangs that would be evicted only after a checkpoint."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float], *, node_access: bool) -> None:
        self._api = api
        self._clock = clock
        self._node_access = node_access

    async def read(self, memory: JobMemory, pods: Iterable[PodRecord]) -> float | None:
        """Read the nodes of a gang if that is due; return when to do so next, None while it is not needed."""
        policy, status = memory.job.spec.run_policy, memory.status
        runs = status.phase is Phase.RUNNING and status.running_time is not None
        if not self._node_access or policy.disruption != Disruption.CHECKPOINT_FIRST.value or not runs:
            memory.leaving_nodes = ()
            return None
        if self._clock() < memory.nodes_again_at:
            return memory.nodes_again_at
        names = sorted({pod.node for pod in pods if pod.node is not None})
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


def why_leaving(node: Object) -> str | None:
    """Return how it is known that a node is to be emptied, as the end of a sentence; None if it is not."""
    if node["metadata"].get("deletionTimestamp") is not None:
        return "is being deleted"
    spec = node.get("spec") or {}
    keys = {taint.get("key") for taint in spec.get("taints") or ()}
    by_autoscaler = next((text for key, text in TAINTS.items() if key in keys), None)
    return by_autoscaler or ("is cordoned" if spec.get("unschedulable") else None)
