"""Disruption budgets of gangs: set, removed, and compared with what exists."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import cachetools

from megatronapp_common.errors import JobError
from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import (
    ApiError,
    ForbiddenError,
    NamespaceTerminatingError,
    NameTakenError,
)
from megatronapp_operator.backends.kubernetes.client.resources import DISRUPTION_BUDGETS
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.execution.objects import ObjectApplier
from megatronapp_operator.backends.kubernetes.store import Key
from megatronapp_operator.backends.kubernetes.surroundings import OwnedObjects
from megatronapp_operator.plan.policies.disruption import RETRY_S

REMEMBERED = 20_000
"""Most jobs whose budgets this process remembers."""
LASTING = frozenset({400, 403, 404, 413, 422})
"""HTTP statuses of answers that do not change by themselves: no right, no such kind, or a policy of the cluster, which
chooses its status. The gang trains without a budget meanwhile."""


@dataclasses.dataclass(slots=True)
class DisruptionBudgets:
    """Budgets of all jobs, as far as this process has set or removed them."""

    api: KubernetesApi
    objects: ObjectApplier
    clock: Callable[[], float] = time.monotonic
    _known: cachetools.LRUCache[str, bool] = dataclasses.field(default_factory=lambda: cachetools.LRUCache(REMEMBERED))
    """True for each job (uid) whose budget exists, False if it does not."""
    _refused: cachetools.LRUCache[str, tuple[float, str]] = dataclasses.field(
        default_factory=lambda: cachetools.LRUCache(REMEMBERED)
    )
    """When and why a budget could not be set, by the job's uid."""

    def exists(self, uid: str) -> bool | None:
        """Return whether the budget of a job exists; None: this process has neither set nor removed it."""
        return self._known.get(uid)

    def refusal(self, uid: str) -> str:
        """Return why the budget of a job could not be set during the last minutes; empty: it was not refused."""
        at, why = self._refused.get(uid, (0.0, ""))
        return why if self.clock() < at + RETRY_S else ""

    async def ensure(self, work: JobContext) -> None:
        """Set the budget of a job; if that is refused, remember why. Raises ApiError for what may pass by itself."""
        uid = work.owner.uid
        try:
            await self.objects.put(work, [render.disruption_budget(work.job, work.owner)])
        except (ApiError, NameTakenError) as error:
            if not _lasts(error):
                raise
            self._refused[uid] = self.clock(), str(error)
            return
        self._refused.pop(uid, None)
        self._known[uid] = True

    async def remove(self, work: JobContext) -> None:
        """Remove the budget of a job; one of another owner stays. Raises ApiError."""
        owner = work.owner
        _, budget = render.disruption_budget(work.job, owner)
        with contextlib.suppress(ForbiddenError):  # without any right there is no budget of ours
            found = await self.api.find_labelled(
                DISRUPTION_BUDGETS, owner.namespace, budget["metadata"]["name"], LABEL_JOB_UID, owner.uid
            )
            if found is not None:
                await self.api.delete(DISRUPTION_BUDGETS, found)
        self._refused.pop(owner.uid, None)
        self._known[owner.uid] = False

    async def compare(self, namespaces: Sequence[str], having: Mapping[Key, JobContext]) -> list[Key]:
        """List all budgets; return the jobs of `having` that miss theirs, or whose budget was changed, and forget it.

        Raises ApiError.
        """
        if not having:
            return []
        found = await OwnedObjects.listed(self.api, namespaces, kinds=(DISRUPTION_BUDGETS,))
        differing = list[Key]()
        for key, work in having.items():
            with contextlib.suppress(JobError):  # of a spec that cannot be rendered; `reconcile` reports it
                if found.find_differences([render.disruption_budget(work.job, work.owner)]):
                    self._known.pop(work.owner.uid, None)
                    differing.append(key)
        return differing


def _lasts(error: ApiError | NameTakenError) -> bool:
    """Return True for an error that does not pass by itself."""
    if isinstance(error, NameTakenError):
        return True
    return error.status in LASTING and not isinstance(error, NamespaceTerminatingError)
