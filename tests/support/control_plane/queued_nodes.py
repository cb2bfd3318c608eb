"""Nodes under a queue: they take no pod with a scheduling gate, and a pod that a finalizer holds stays."""

import dataclasses

from fake_nodes import FakeNodes

from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object

TERMINATED = 143
ENDED = frozenset({"Succeeded", "Failed"})


@dataclasses.dataclass(slots=True)
class QueuedNodes(FakeNodes):
    """Nodes with a few faults."""

    full: frozenset[str] = frozenset()
    """Workers that no node takes."""
    lost: frozenset[str] = frozenset()
    """Pods (uids) whose node does not answer any more."""

    async def settle(self) -> bool:
        """Settle as kubelets do it: end containers before a pod is removed. A pod without a node is not theirs to
        remove."""
        changed = False
        for name, pod in (await self.pods()).items():
            if pod["metadata"]["uid"] in self.lost:
                continue
            placed = bool(pod["spec"].get("nodeName"))
            if pod["metadata"].get("deletionTimestamp"):
                changed |= placed and await self._stop(name, pod)
            elif pod["status"]["phase"] == "Pending" and self._takes(name, pod):
                await self.start(pod)
                changed = True
        return changed

    def _takes(self, name: str, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeName")) or (not pod["spec"].get("schedulingGates") and name not in self.full)

    async def _stop(self, name: str, pod: Object) -> bool:
        """End the containers, and remove the pod the next time: its operator sees why it is deleted in between."""
        if pod["status"]["phase"] not in ENDED:
            await self.end(name, TERMINATED)
            return True
        if pod["metadata"].get("deletionGracePeriodSeconds") == 0:
            return False  # only its finalizers hold it
        await self.api.delete(PODS, pod, grace_s=0)
        return True
