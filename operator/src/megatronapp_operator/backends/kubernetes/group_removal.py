"""Removal of the groups of attempts that are over: the operator's pod groups, and the workloads that Kueue created."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

import cachetools

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import WORKLOADS, Object, Resource
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner

KUEUE = "Kueue"
REMEMBERED = 20_000
"""Most jobs of which this process remembers that their groups were removed."""
RETRY_S = 600.0
"""Seconds until a rejected removal is tried again. The rights may change while a job runs."""


@dataclasses.dataclass(slots=True)
class PodGroupRemover:
    """Remover of groups for all jobs of one process."""

    api: KubernetesApi
    clock: Callable[[], float] = time.monotonic
    _removed: cachetools.LRUCache[str, AbstractSet[int]] = dataclasses.field(
        default_factory=lambda: cachetools.LRUCache(REMEMBERED)
    )
    _refused: cachetools.LRUCache[str, dict[int, float]] = dataclasses.field(
        default_factory=lambda: cachetools.LRUCache(REMEMBERED)
    )
    """When the removal of a group was rejected, by the job's uid and the attempt."""

    def removed_attempts(self, uid: str) -> AbstractSet[int]:
        """Return attempts of a job whose groups this process has removed, or may not remove."""
        return self._removed.get(uid, frozenset())

    def refused(self, uid: str) -> AbstractSet[int]:
        """Return attempts of a job whose groups this process was not allowed to remove during the last minutes."""
        since = self.clock() - RETRY_S
        return frozenset(attempt for attempt, at in self._refused.get(uid, {}).items() if at > since)

    async def remove(self, owner: JobOwner, resource: Resource | None, attempt: int, pods: Iterable[str]) -> str | None:
        """Remove the group of an attempt; `pods` are uids of its pods. Return why it was rejected, the first time.

        Without a `resource` the cluster serves no such groups, and none is left.
        """
        refused = None if resource is None else await self._delete(resource, owner, attempt, frozenset(pods))
        known = attempt in self.removed_attempts(owner.uid)
        if resource != WORKLOADS or refused:  # Kueue may create the workload later
            self._removed[owner.uid] = self.removed_attempts(owner.uid) | {attempt}
        if refused:
            self._refused.setdefault(owner.uid, {})[attempt] = self.clock()
        return None if known else refused

    async def _delete(self, resource: Resource, owner: JobOwner, attempt: int, pods: frozenset[str]) -> str | None:
        name = ObjectNames(owner.name).group(attempt)
        try:
            found = await self.api.get(resource, owner.namespace, name)
            if found is not None and _is_of_job(found, owner, pods) and not found["metadata"].get("deletionTimestamp"):
                await self.api.delete(resource, found)
        except ForbiddenError as error:
            return f"{resource.plural} {name} of an attempt that is over stays: {error}"
        return None


def _is_of_job(found: Object, owner: JobOwner, pods: frozenset[str]) -> bool:
    """Return True for a pod group with the job's label, or a workload that is owned by the job's pods."""
    metadata = found["metadata"]
    owners = {reference["uid"] for reference in metadata.get("ownerReferences") or ()}
    return (metadata.get("labels") or {}).get(LABEL_JOB_UID) == owner.uid or bool(owners & pods)
