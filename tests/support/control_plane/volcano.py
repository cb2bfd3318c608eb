"""A scheduler that keeps pod groups as Volcano 1.12 does, and machines that take pods when it lets them.

After its sources: a group without enough pods becomes Pending, under any owner (`jobStatus`); a Pending group becomes
Inqueue when it fits next to what is in use and what other Inqueue groups reserve (`proportion`, `enqueue`); pods are
placed when their group is Inqueue or Running.
"""

import dataclasses

from fake_nodes import FakeNodes

from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_operator.backends.kubernetes.client.resources import PODS, VOLCANO_POD_GROUPS, Object

ANNOTATION = "scheduling.k8s.io/group-name"
PENDING, INQUEUE, RUNNING = "Pending", "Inqueue", "Running"


@dataclasses.dataclass(slots=True)
class VolcanoNodes(FakeNodes):
    """Nodes with one queue of this number of CPUs."""

    cpus: int = 2
    phases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Phase of each group, by uid."""

    async def settle(self) -> bool:
        """One session of the scheduler, and what kubelets do after it."""
        listing = await self.api.list_objects(VOLCANO_POD_GROUPS, self.namespace)
        groups = {group["metadata"]["name"]: group for group in listing.items}
        pods = await self.pods()
        before = dict(self.phases)
        self.phases = {_uid(group): self._phase(group, _members(pods, name)) for name, group in groups.items()}
        self._enqueue(sorted(groups.values(), key=lambda group: str(group["metadata"]["creationTimestamp"])))
        changed = self.phases != before
        for pod in pods.values():
            group = groups.get(pod["metadata"]["annotations"].get(ANNOTATION, ""))
            if pod["metadata"].get("deletionTimestamp"):
                await self.api.delete(PODS, pod, grace_s=0)
                changed = True
            elif pod["status"]["phase"] == "Pending" and group and self.phases[_uid(group)] != PENDING:
                await self.start(pod)
                changed = True
        return changed

    def _phase(self, group: Object, members: list[Object]) -> str:
        if sum(bool(member["spec"].get("nodeName")) for member in members) >= group["spec"]["minMember"]:
            return RUNNING
        return INQUEUE if self.phases.get(_uid(group)) == INQUEUE else PENDING

    def _enqueue(self, groups: list[Object]) -> None:
        reserved = sum(_cpus(group) for group in groups if self.phases[_uid(group)] != PENDING)
        for group in groups:
            if self.phases[_uid(group)] == PENDING and reserved + _cpus(group) <= self.cpus:
                self.phases[_uid(group)] = INQUEUE
                reserved += _cpus(group)


def _members(pods: dict[str, Object], group: str) -> list[Object]:
    return [pod for pod in pods.values() if pod["metadata"]["annotations"].get(ANNOTATION) == group]


def _uid(group: Object) -> str:
    return str(group["metadata"]["uid"])


def _cpus(group: Object) -> float:
    return float(quantity_value(str(group["spec"]["minResources"]["cpu"])))
