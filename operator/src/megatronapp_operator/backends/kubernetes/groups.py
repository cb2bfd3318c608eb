"""Removing the groups of attempts that are over: pod groups of ours, and workloads that Kueue made of our pods."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.api import WORKLOADS, Api, Object, Resource
from megatronapp_operator.backends.kubernetes.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.render.objects import Names
from megatronapp_operator.backends.kubernetes.render.queueing import GROUPS
from megatronapp_operator.backends.kubernetes.render.settings import Owner

KUEUE = "Kueue"
REMEMBERED = 20_000
"""So many jobs whose groups were removed by this process are remembered."""


@dataclasses.dataclass(slots=True)
class Groups:
    """For all jobs of one process."""

    api: Api
    _gone: OrderedDict[str, AbstractSet[int]] = dataclasses.field(default_factory=OrderedDict)

    def gone(self, uid: str) -> AbstractSet[int]:
        """Attempts of a job whose groups this process has removed, or may not remove."""
        return self._gone.get(uid, frozenset())

    async def remove(self, owner: Owner, gang: str, attempt: int, pods: Iterable[str]) -> str | None:
        """Remove the group of an attempt; `pods` are uids of its pods. Returns why it may not be, when that is news."""
        resource = WORKLOADS if gang == KUEUE else GROUPS.get(gang)
        if resource is None:
            return None
        refused = await self._delete(resource, owner, attempt, frozenset(pods))
        known = attempt in self.gone(owner.uid)
        if resource != WORKLOADS or refused:  # Kueue may make the workload after we have looked
            self._gone[owner.uid] = self.gone(owner.uid) | {attempt}
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)
        return None if known else refused

    async def _delete(self, resource: Resource, owner: Owner, attempt: int, pods: frozenset[str]) -> str | None:
        name = Names(owner.name).group(attempt)
        try:
            found = await self.api.get(resource, owner.namespace, name)
            if found is not None and _is_of_job(found, owner, pods) and not found["metadata"].get("deletionTimestamp"):
                await self.api.delete(resource, found)
        except ForbiddenError as error:
            return f"{resource.plural} {name} of an attempt that is over stays: {error}"
        return None


def _is_of_job(found: Object, owner: Owner, pods: frozenset[str]) -> bool:
    """A pod group of ours has our label; the owners of a workload are its pods."""
    metadata = found["metadata"]
    owners = {one["uid"] for one in metadata.get("ownerReferences") or ()}
    return (metadata.get("labels") or {}).get(LABEL_JOB_UID) == owner.uid or bool(owners & pods)
