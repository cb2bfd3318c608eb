"""Execution of the plan's actions. Every step may be done twice: again after a failure, or by the next leader."""

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import API_VERSION, KIND, LABEL_JOB_UID, ReplicaType
from megatronapp_common.web import tokens
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.api import (
    EVENTS,
    JOBS,
    NODES,
    PODS,
    KubernetesApi,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.client.errors import (
    AlreadyExistsError,
    ApiError,
    ForbiddenError,
    NamespaceTerminatingError,
    NameTakenError,
    NotFoundError,
)
from megatronapp_operator.backends.kubernetes.client.rejections import classify_rejection
from megatronapp_operator.backends.kubernetes.groups import PodGroupRemover
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.backends.kubernetes.surroundings import LISTED
from megatronapp_operator.errors import OperatorError
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import (
    Action,
    CreateInit,
    CreateWorker,
    DeleteHub,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    EnsureHub,
    EventType,
    PodRejection,
    RecordEvent,
    RemoveGroup,
)

log = logging.getLogger(__name__)

REMEMBERED = 20_000
"""Most attempts of which this process remembers that their objects were applied."""
MAX_NOTE = 1024
"""Most bytes of the text of an Event (events.k8s.io/v1)."""
HUB_SHORT_PAUSE_S, HUB_PAUSE_S = 3.0, 60.0
"""Seconds until a rejected hub is tried again: the first time that its name is taken, and otherwise."""
ENDED = frozenset({"Succeeded", "Failed"})
NO_PLACE = "-"
"""Topology of a node without the label, sorted before all others; workers wait until they have a value."""
MAX_INSTANCE = 128
"""Most characters of the name of the reporting process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job, and what its objects are rendered from."""

    document: Object
    """MegatronJob, as read from the API server."""
    job: MegatronJob
    owner: JobOwner
    attempt: AttemptSettings
    settings: RenderSettings


class Executor:
    """Executor for all jobs of one process."""

    def __init__(self, api: KubernetesApi, store: ObjectStore, *, keys: KeyRing, identity: str) -> None:
        self._api = api
        self._store = store
        self.groups = PodGroupRemover(api)
        self._keys = keys
        self._identity = identity
        self._hub_pauses: dict[str, float] = {}
        """Until when (monotonic) a rejected hub is not tried again, by the job's uid."""
        self._applied: OrderedDict[tuple[str, int, int, str], None] = OrderedDict()

    async def run(self, work: JobContext, actions: Sequence[Action]) -> PodRejection | None:
        """Carry out the actions; return the rejection of a pod, if any. Raises ApiError, NameTakenError."""
        await self._all(
            [self.record_event(work.owner, action) for action in actions if isinstance(action, RecordEvent)]
        )
        await self._all([self._remove(work, action) for action in actions])
        if any(isinstance(action, EnsureHub) for action in actions):
            await self._try_hub(work)
        starting = [action for action in actions if isinstance(action, CreateInit | CreateWorker)]
        try:
            if starting:
                await self._ensure_objects(work)
                await self._retire_hub(work)
                await self._start(work, [_pod(work, action) for action in starting])
        except ApiError as error:
            refusal = classify_rejection(error, work.attempt.number)
            if refusal is None:
                raise
            return refusal
        return None

    async def _try_hub(self, work: JobContext) -> None:
        """Create the hub, and retry later if the API server rejects it; the gang does not wait for it."""
        if time.monotonic() < self._hub_pauses.get(work.owner.uid, 0.0):
            return
        try:
            await self._ensure_objects(work)  # a name of these that is taken keeps the gang, too
            try:
                await self._ensure_hub(work)
            except NameTakenError as error:
                await self._pause_hub(work.owner, error)
        except ApiError as error:
            if classify_rejection(error, work.attempt.number) is None:
                raise
            await self._pause_hub(work.owner, error)

    def hub_pause_s(self, uid: str) -> float:
        """Return the seconds until a rejected hub of a job is tried again."""
        return max(0.0, self._hub_pauses.get(uid, 0.0) - time.monotonic())

    async def _pause_hub(self, owner: JobOwner, error: OperatorError) -> None:
        """Defer the hub after a rejection.

        Leftovers of the hub of an earlier job of this name vanish within seconds.
        """
        now, first = time.monotonic(), owner.uid not in self._hub_pauses
        short = first and isinstance(error, NameTakenError)
        pauses = {uid: until for uid, until in self._hub_pauses.items() if until > now - HUB_PAUSE_S}
        self._hub_pauses = pauses | {owner.uid: now + (HUB_SHORT_PAUSE_S if short else HUB_PAUSE_S)}
        if not short:
            await self.record_event(owner, RecordEvent(type=EventType.WARNING, reason="HubRefused", message=str(error)))

    async def write_rank_table(self, work: JobContext, table: Object) -> None:
        """Store a rank table that is too long for the status."""
        await self._put(work, [render.ranks(work.owner, table)])

    async def write_topology(self, work: JobContext) -> None:
        """Annotate workers with the topology of their nodes: they wait for it, and may not read nodes themselves."""
        key = work.job.spec.network.topology_key
        if key is None or not work.settings.node_access:
            return
        waiting = [one for one in self._of_type(work, ReplicaType.WORKER) if one.node and not one.topology]
        await self._all([self._place(record, key) for record in waiting])

    async def _place(self, record: PodRecord, key: str) -> None:
        node = await self._api.get(NODES, None, record.node or "")
        place = ((node or {}).get("metadata", {}).get("labels") or {}).get(key) or NO_PLACE
        annotations = {render.ANNOTATION_TOPOLOGY: place}
        with contextlib.suppress(NotFoundError):
            self._store.put_pod(await self._api.annotate(PODS, record.namespace, record.name, annotations))

    async def _remove(self, work: JobContext, action: Action) -> None:
        match action:
            case DeleteHub():
                await self._delete_all(self._of_type(work, ReplicaType.HUB))
            case DeleteInit():
                grace_s = 0.0 if action.force else None
                await self._delete_all(self._of_type(work, ReplicaType.INIT), grace_s)
            case DeleteWorker():
                found = [one for one in self._of_type(work, ReplicaType.WORKER) if one.index == action.index]
                await self._delete_all([one for one in found if one.attempt == action.attempt], action.grace_s)
            case RemoveGroup():
                await self._remove_group(work, action.attempt)
            case DeleteJob():
                await self._api.delete(JOBS, work.document)

    async def _remove_group(self, work: JobContext, attempt: int) -> None:
        pods = [one.uid for one in self._of_type(work, ReplicaType.WORKER) if one.attempt == attempt]
        refused = await self.groups.remove(work.owner, work.job.spec.scheduling.gang, attempt, pods)
        if refused is not None:
            await self.record_event(
                work.owner, RecordEvent(type=EventType.WARNING, reason="GroupNotRemoved", message=refused)
            )

    async def _all(self, steps: Sequence[Awaitable[None]]) -> None:
        """Run all steps concurrently to their ends, and then raise the first error."""
        results = await asyncio.gather(*steps, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _ensure_objects(self, work: JobContext) -> None:
        """Ensure the objects that must exist before any pod, in order, once per attempt and process."""
        generation = int(work.document["metadata"]["generation"])
        mark = work.owner.uid, work.attempt.number, generation, work.settings.key_id  # of which the Secret is one
        if mark in self._applied:
            return
        await self._put(work, render.gang_objects(work.job, work.owner, work.attempt, work.settings))
        await self._ensure_secret(work)
        if generation > 1:
            await self._remove_unwanted(work)
        self._applied[mark] = None
        if len(self._applied) > REMEMBERED:
            self._applied.popitem(last=False)

    async def reapply_objects(self, work: JobContext, *, edited: bool, whole: bool) -> None:
        """Apply the objects of a running attempt again; after an edit remove those that it no longer has.

        Unless `whole`, those that can be listed are skipped.
        """
        rendered = surroundings_of(work)
        await self._put(work, rendered if whole else [one for one in rendered if one[0] not in LISTED])
        await self._ensure_secret(work)
        if edited:
            await self._remove_unwanted(work)

    async def _remove_unwanted(self, work: JobContext) -> None:
        """Delete objects of an earlier spec of the job. Without the right to do so they stay and are reported."""
        namespace = work.owner.namespace
        try:
            for resource, name in render.unwanted_hub_objects(work.job, work.owner, work.settings):
                found = await self._api.find_labelled(resource, namespace, name, LABEL_JOB_UID, work.owner.uid)
                if found is not None:
                    await self._api.delete(resource, found)
        except ForbiddenError as error:
            event = RecordEvent(type=EventType.WARNING, reason="LeftoverNotDeleted", message=str(error))
            await self.record_event(work.owner, event)

    async def _ensure_secret(self, work: JobContext) -> None:
        """Create the job's Secret. The name follows from uid and key, so an existing one is right."""
        key = self._keys.find(work.settings.key_id)
        if key is None:  # the attempt has begun under it, so its Secret was created then
            log.warning("%s/%s: key %s is not in the key file", *_place(work.owner), work.settings.key_id)
            return
        resource, obj = render.secret(work.owner, tokens.job_secret(key, work.owner.uid), work.settings)
        with contextlib.suppress(AlreadyExistsError):
            await self._api.create(resource, obj)

    async def _put(self, work: JobContext, rendered: Sequence[tuple[Resource, Object]]) -> None:
        """Apply the objects, in their order, after a check that none of them belongs to another owner."""
        await self._all([self._see_free(work, resource, obj) for resource, obj in rendered])
        for resource, obj in rendered:
            await self._api.apply(resource, obj)

    async def _see_free(self, work: JobContext, resource: Resource, obj: Object) -> None:
        """Check by a label of our objects that the name is free: this needs no right to read ConfigMaps."""
        namespace, name = obj["metadata"]["namespace"], obj["metadata"]["name"]
        if await self._api.has_label(resource, namespace, name, LABEL_JOB_UID, work.owner.uid) is False:
            raise _taken(resource, namespace, name)

    async def _start(self, work: JobContext, pods: Sequence[Object]) -> None:
        """Create all pods concurrently; of several, one is tried before by a dry run."""
        if len(pods) > 1:
            with contextlib.suppress(AlreadyExistsError):
                await self._api.create(PODS, pods[0], dry_run=True)
        await self._all([self._create(work, pod) for pod in pods])

    async def _create(self, work: JobContext, pod: Object) -> None:
        made: Object | None
        try:
            made = await self._api.create(PODS, pod)
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
        if any(one["uid"] == work.owner.uid for one in found["metadata"].get("ownerReferences") or ()):
            return found
        raise _taken(PODS, metadata["namespace"], metadata["name"])

    async def _ensure_hub(self, work: JobContext) -> None:
        """Ensure the hub's Service, and its pod, which replaces one that has ended."""
        await self._put(work, render.hub_objects(work.job, work.owner, work.settings))
        ended = [one for one in self._of_type(work, ReplicaType.HUB) if one.phase in ENDED or one.deleted_at]
        await self._delete_all(ended, 0)
        starts = 1 + max((one.starts for one in ended), default=0)
        await self._create(work, render.hub_pod(work.job, work.owner, work.settings, starts=starts))

    async def _retire_hub(self, work: JobContext) -> None:
        """Delete a hub with another spec, or one that the job no longer has, before a gang starts.

        The plan then creates the right one. The old one may be of an earlier release, whose hub does not understand the
        agents of this gang. Once a worker of the attempt exists, the hub stays: what it knows of the attempt is worth
        more.
        """
        workers = self._of_type(work, ReplicaType.WORKER)
        hubs = [one for one in self._of_type(work, ReplicaType.HUB) if one.deleted_at is None]
        if not hubs or any(one.attempt == work.attempt.number for one in workers):
            return
        enabled = work.job.spec.analyzer.enabled
        wanted = render.hub_hash(work.job, work.owner, work.settings) if enabled else None
        await self._delete_all([one for one in hubs if one.template != wanted])

    async def _delete_all(self, records: Sequence[PodRecord], grace_s: float | None = None) -> None:
        await self._all([self._delete(record, grace_s) for record in records])

    async def _delete(self, record: PodRecord, grace_s: float | None) -> None:
        grace = None if grace_s is None else math.ceil(grace_s)
        answer = await self._api.delete(PODS, record.reference, grace_s=grace)
        if answer is None:
            await self._drop_if_absent(record)
        elif answer.get("kind") == "Pod":
            self._store.put_pod(answer)

    async def _drop_if_absent(self, record: PodRecord) -> None:
        """Forget a pod that a delete did not find, after a read: what is forgotten here is never added again."""
        found = await self._api.get(PODS, record.namespace, record.name)
        if found is None or found["metadata"]["uid"] != record.uid:
            self._store.drop_record(record)

    def _of_type(self, work: JobContext, kind: ReplicaType) -> list[PodRecord]:
        return [one for one in self._store.pods(work.owner.namespace, work.owner.uid) if one.type is kind]

    async def record_event(self, owner: JobOwner, event: RecordEvent) -> None:
        """Write an Event for users; if that fails, only log it."""
        try:
            await self._api.create(EVENTS, _event(owner, event, self._identity))
        except NamespaceTerminatingError:
            return
        except ApiError as error:
            log.warning("%s/%s: writing an Event failed: %s", owner.namespace, owner.name, error)


def surroundings_of(work: JobContext) -> list[tuple[Resource, Object]]:
    """Return the objects around the pods of a running attempt, without its Secret."""
    hub = render.hub_objects(work.job, work.owner, work.settings) if work.job.spec.analyzer.enabled else ()
    return [*render.gang_objects(work.job, work.owner, work.attempt, work.settings), *hub]


def _place(owner: JobOwner) -> tuple[str, str]:
    return owner.namespace, owner.name


def _taken(resource: Resource, namespace: str, name: str) -> NameTakenError:
    return NameTakenError(
        f"{resource.plural} {namespace}/{name} exists and belongs to another owner; "
        "unless it vanishes with an earlier job of this name, delete it, or use another name for the job"
    )


def _pod(work: JobContext, action: CreateInit | CreateWorker) -> Object:
    if isinstance(action, CreateWorker):
        return render.worker_pod(work.job, work.owner, work.attempt, action.index, work.settings)
    pod = render.init_pod(work.job, work.owner, work.settings)
    assert pod is not None, "the plan wants initializers only where there are some"
    return pod


def _event(owner: JobOwner, event: RecordEvent, identity: str) -> Object:
    now = datetime.datetime.now(datetime.UTC)
    name = {"namespace": owner.namespace, "name": owner.name}
    return {
        "apiVersion": EVENTS.api_version,
        "kind": "Event",
        "metadata": {"namespace": owner.namespace, "name": f"{owner.name}.{secrets.token_hex(8)}"},
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": "megatronapp.io/operator",
        "reportingInstance": identity[:MAX_INSTANCE],
        "action": event.reason,
        "reason": event.reason,
        "type": event.type.value,
        "note": event.message.encode("utf-8", "replace")[:MAX_NOTE].decode("utf-8", "ignore"),
        "regarding": {"apiVersion": API_VERSION, "kind": KIND, "uid": owner.uid} | name,
    }
