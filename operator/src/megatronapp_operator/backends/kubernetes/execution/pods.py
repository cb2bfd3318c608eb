"""Creation and deletion of a job's pods."""

import contextlib
import math
from collections.abc import Sequence

from megatronapp_common.attempt_order import AttemptOrder
from megatronapp_common.names import (
    ANNOTATION_RESTART,
    ANNOTATION_SAVE,
    LABEL_ATTEMPT,
    LABEL_REPLICA_INDEX,
    LABEL_SPARE,
    ReplicaType,
)
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.decoding import decode_pod
from megatronapp_operator.backends.kubernetes.client.errors import AlreadyExistsError, ConflictError, NotFoundError
from megatronapp_operator.backends.kubernetes.client.resources import NODES, PODS, Object
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext, name_taken, run_all
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.plan import RequestCheckpoint

NO_PLACE = "-"
"""Topology of a node without the label, sorted before all others; workers wait until they have a value."""


class PodWriter:
    """Writer of the pods of all jobs; what it has written is in the store at once."""

    def __init__(self, api: KubernetesApi, store: ObjectStore) -> None:
        self._api = api
        self._store = store

    def of_type(self, work: JobContext, kind: ReplicaType) -> list[PodRecord]:
        return [pod for pod in self._store.pods(work.owner.namespace, work.owner.uid) if pod.type is kind]

    async def start(self, work: JobContext, pods: Sequence[Object]) -> None:
        """Create all pods concurrently; of several, one is tried before by a dry run."""
        if len(pods) > 1:
            with contextlib.suppress(AlreadyExistsError):
                await self._api.create(PODS, pods[0], dry_run=True)
        await run_all([self.create(work, pod) for pod in pods])

    async def create(self, work: JobContext, pod: Object) -> None:
        made: Object | None
        try:
            made = await self._api.create(PODS, pod, decode=decode_pod)
        except AlreadyExistsError:
            made = await self._present(work, pod)
        if made is not None:
            self._store.put_pod(made)

    async def _present(self, work: JobContext, pod: Object) -> Object | None:
        """Return the pod that has the name already: ours, of this attempt or an older one that must end first."""
        metadata = pod["metadata"]
        found = await self._api.get(PODS, metadata["namespace"], metadata["name"])
        if found is None:
            return None  # it was just deleted; the next reconcile creates it
        if any(reference["uid"] == work.owner.uid for reference in found["metadata"].get("ownerReferences") or ()):
            return found
        raise name_taken(PODS, metadata["namespace"], metadata["name"])

    async def order_all(self, orders: Sequence[tuple[PodRecord, AttemptOrder]]) -> None:
        """Give pods their orders; a pod that is removed meanwhile is seen to be missing."""
        await run_all([self._give(record, order) for record, order in orders])

    async def _give(self, record: PodRecord, order: AttemptOrder) -> None:
        """Write an order together with the labels that it changes: a spare is a worker from then on."""
        labels: dict[str, str | None] = {LABEL_ATTEMPT: str(order.attempt)}
        if record.spare and order.worker is not None:
            labels |= {LABEL_REPLICA_INDEX: str(order.worker), LABEL_SPARE: None}
        annotations = {ANNOTATION_RESTART: order.text}
        with contextlib.suppress(NotFoundError, ConflictError):
            made = await self._api.mark(PODS, record.reference, labels=labels, annotations=annotations)
            self._store.put_pod(made)

    async def request_checkpoint(self, work: JobContext, action: RequestCheckpoint) -> None:
        """Write the request on the pod of a worker; one that is removed meanwhile is seen to be missing."""
        for record in self.of_type(work, ReplicaType.WORKER):
            if not record.spare and (record.index, record.attempt) == (action.index, action.request.attempt):
                annotations = {ANNOTATION_SAVE: action.request.text}
                with contextlib.suppress(NotFoundError, ConflictError):
                    self._store.put_pod(
                        await self._api.mark(PODS, record.reference, labels={}, annotations=annotations)
                    )

    async def delete_all(self, records: Sequence[PodRecord], grace_s: float | None = None) -> None:
        await run_all([self._delete(record, grace_s) for record in records])

    async def _delete(self, record: PodRecord, grace_s: float | None) -> None:
        grace = None if grace_s is None else math.ceil(grace_s)
        answer = await self._api.delete(PODS, record.reference, grace_s=grace, decode=decode_pod)
        if answer is None:
            await self._drop_if_absent(record)
        elif answer.get("kind") == "Pod":
            self._store.put_pod(answer)

    async def _drop_if_absent(self, record: PodRecord) -> None:
        """Forget a pod that a delete did not find, after a read: what is forgotten here is never added again."""
        found = await self._api.get(PODS, record.namespace, record.name)
        if found is None or found["metadata"]["uid"] != record.uid:
            self._store.drop_record(record)

    async def write_topology(self, work: JobContext) -> None:
        """Annotate workers with the topology of their nodes: they wait for it, and may not read nodes themselves."""
        key = work.job.spec.network.topology_key
        if key is None or not work.settings.node_access:
            return
        waiting = [worker for worker in self.of_type(work, ReplicaType.WORKER) if worker.node and not worker.topology]
        await run_all([self._annotate_topology(record, key) for record in waiting])

    async def _annotate_topology(self, record: PodRecord, key: str) -> None:
        node = await self._api.get(NODES, None, record.node or "")
        place = ((node or {}).get("metadata", {}).get("labels") or {}).get(key) or NO_PLACE
        annotations = {render.ANNOTATION_TOPOLOGY: place}
        with contextlib.suppress(NotFoundError):
            self._store.put_pod(await self._api.annotate(PODS, record.namespace, record.name, annotations))
