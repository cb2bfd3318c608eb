"""Writing of statuses, with the fields that are not the plan's: sizes, the nodes of ranks, and settings of an attempt.

A change of progress alone is written every `PROGRESS_S` seconds at most. A change only of where pods are, without
actions, waits `COUNTS_S` for more of the kind. Every other change is written at once, before any action.
"""

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from megatronapp_common.job import TERMINAL_PHASES, FbdRanks, MegatronJob, PinnedSettings, Status, status_document
from megatronapp_common.names import HUB_PORT
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import NotFoundError, RetryReconcileError
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.render import serve_url
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore
from megatronapp_operator.plan import AttemptTemplate, Plan

PROGRESS_S = 15.0
"""Seconds between writes of a status in which only progress has changed."""
COUNTS_S = 1.0
"""Seconds for which a change of pods alone waits for more of the kind."""
PROGRESS_FIELDS = frozenset({"progress", "progressTime", "timeSpent"})
COUNT_FIELDS = PROGRESS_FIELDS | {"replicaStatuses"}
PLACE_FIELDS = COUNT_FIELDS | {"conditions", "holdingTime", "unplacedTime", "scheduledTime"}
"""Fields that the next leader derives again from the pods. If more has happened, other fields change, too, or there
are actions."""
TABLE_ENTRIES = 32
"""Most entries of a rank table in the status; of a longer one, in a ConfigMap, the status has digest and reference."""


class StatusWriter:
    """Writer of the statuses of all jobs. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        api: KubernetesApi,
        store: ObjectStore,
        *,
        installation: str,
        cluster_domain: str,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._store = store
        self._installation = installation
        self._cluster_domain = cluster_domain
        self._clock = clock

    async def write(self, key: Key, memory: JobMemory, made: Plan) -> tuple[bool, float | None]:
        """Write the new status, now or when it is due; return True if it was written, and when to reconcile again.

        Raises ConflictError if the job has changed meanwhile, RetryReconcileError if it was deleted.
        """
        status = self._with_facts(memory, made.status)
        document = status_document(status)
        changed = {name for name in document.keys() | memory.sent.keys() if document.get(name) != memory.sent.get(name)}
        due = self._due(memory, changed, made)
        if not changed or self._clock() < due:
            memory.status = status
            times = [at for at in (due if changed else None, made.wake_at) if at is not None]
            return False, min(times, default=None)
        await self._replace(key, memory, document)
        memory.status = status  # not before: events of a status that was not written are still due
        return True, made.wake_at

    def _due(self, memory: JobMemory, changed: AbstractSet[str], made: Plan) -> float:
        """Return when a change of these fields is to be written; the plan's actions follow the write."""
        if changed <= PROGRESS_FIELDS:
            memory.unwritten_since = None
            return memory.written_at + PROGRESS_S
        if not changed <= (COUNT_FIELDS if made.actions else PLACE_FIELDS):
            return float("-inf")
        if memory.unwritten_since is None:
            memory.unwritten_since = self._clock()
        return memory.unwritten_since + COUNTS_S

    @staticmethod
    def table(memory: JobMemory) -> Object | None:
        """Return the newest rank table that is known."""
        return memory.poll_result.rank_table or memory.status.rank_table

    def _with_facts(self, memory: JobMemory, status: Status) -> Status:
        """Return the status with the fields that are not the plan's."""
        return with_facts(
            memory.job_at(status),
            status,
            manager=self._installation,
            table=self.table(memory),
            pinned=memory.pinned,
            urls={} if status.phase in TERMINAL_PHASES else self._urls(memory.job),
        )

    def _urls(self, job: MegatronJob) -> dict[str, str]:
        """Return the addresses of hub and API."""
        name, namespace, domain = job.metadata.name, job.metadata.namespace, self._cluster_domain
        hub = {"hub_url": f"http://{name}-hub.{namespace}.svc.{domain}:{HUB_PORT}"}
        serve = {"serve_url": serve_url(namespace, name, domain)}
        return (hub if job.spec.analyzer.enabled else {}) | (serve if job.spec.mode == "serve" else {})

    async def _replace(self, key: Key, memory: JobMemory, document: Object) -> None:
        stored = await self.replace(key, document)
        memory.sent, memory.written, memory.written_at = document, stored["status"], self._clock()
        memory.unwritten_since = None

    async def replace(self, key: Key, document: Object) -> Object:
        """Write a status as a document; return the job as stored. Raises as `write`."""
        known = self._store.job(key)
        assert known is not None, "a job is dropped only between two reconciles"
        try:
            stored = await self._api.replace(JOBS, known | {"status": document}, subresource="status")
        except NotFoundError as error:
            self._store.drop_job(known)
            raise RetryReconcileError(f"{key[0]}/{key[1]}: the job was deleted") from error
        self._store.put_job(stored)
        return stored


def attempt_template(pinned: PinnedSettings | None) -> AttemptTemplate | None:
    """Return the template of an attempt for the plan."""
    if pinned is None:
        return None
    return AttemptTemplate(attempt=pinned.attempt, template=pinned.template_hash, generation=pinned.generation)


def with_facts(
    job: MegatronJob,
    status: Status,
    *,
    manager: str,
    table: Object | None,
    pinned: PinnedSettings | None,
    urls: Mapping[str, str],
) -> Status:
    """Return the status with the fields that are not the plan's; `urls` has `hub_url` and `serve_url` if they exist."""
    current_table = None
    if table is not None and table.get("attempt") == status.attempt:
        current_table = shortened(table, f"{job.metadata.name}-ranks")
    return dataclasses.replace(
        status,
        world_size=job.world.world_size,
        data_parallel_size=job.world.data_parallel_size,
        fbd=FbdRanks.of(job.world.fbd),
        manager=manager,
        pinned=pinned,
        rank_table=current_table,
        hub_url=urls.get("hub_url"),
        serve_url=urls.get("serve_url"),
    )


def rank_zero(table: Mapping[str, Any] | None, attempt: int) -> int | None:
    """Return the worker that holds rank 0 by this table; None for another attempt, or a table without workers."""
    if table is None or table.get("attempt") != attempt:
        return None
    return next((worker["index"] for worker in table.get("workers") or () if 0 in (worker.get("ranks") or ())), None)


def is_long(table: Mapping[str, Any]) -> bool:
    """Return True if the table needs a ConfigMap."""
    return len(table.get("workers") or ()) > TABLE_ENTRIES


def shortened(table: Mapping[str, Any], config_map: str) -> Object:
    """Return the table as written in the status."""
    if not is_long(table):
        return dict(table)
    return {key: value for key, value in table.items() if key != "workers"} | {"ref": config_map}
