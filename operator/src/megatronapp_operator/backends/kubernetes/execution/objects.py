"""Objects around the pods of a job: Services, policies, pod groups, rank table, Secret."""

import contextlib
import logging
from collections.abc import Sequence

import cachetools

from megatronapp_common.errors import JobError
from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_common.web import tokens
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from megatronapp_operator.backends.kubernetes.client.resources import CREATOR, Object, Resource
from megatronapp_operator.backends.kubernetes.execution.events import EventWriter
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext, name_taken
from megatronapp_operator.backends.kubernetes.surroundings import LISTED
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import EventType, RecordEvent

log = logging.getLogger(__name__)

REMEMBERED = 20_000
"""Most attempts of which this process remembers that their objects were applied."""


class ObjectApplier:
    """Applier of the objects of all jobs."""

    def __init__(self, api: KubernetesApi, keys: KeyRing, events: EventWriter) -> None:
        self._api = api
        self._keys = keys
        self._events = events
        self._applied: cachetools.LRUCache[tuple[str, int, int, str], None] = cachetools.LRUCache(REMEMBERED)
        self._created: cachetools.LRUCache[tuple[str, str, str], None] = cachetools.LRUCache(REMEMBERED)
        """Objects that exist, by uid of the job, kind and name: those are applied, not created."""

    async def ensure(self, work: JobContext) -> None:
        """Ensure the objects that must exist before any pod, in order, once per attempt and process.

        Raises JobError if the cluster lacks a feature that the job needs.
        """
        if missing := render.missing_features(work.job, work.settings):
            raise JobError(*missing)
        generation = int(work.document["metadata"]["generation"])
        mark = work.owner.uid, work.attempt.number, generation, work.settings.key_id  # of which the Secret is one
        if mark in self._applied:
            return
        await self.put(work, render.gang_objects(work.job, work.owner, work.attempt, work.settings))
        await self._ensure_secret(work)
        if generation > 1:
            await self._remove_unwanted(work)
        self._applied[mark] = None

    async def reapply(self, work: JobContext, *, edited: bool, whole: bool) -> None:
        """Apply the objects of a running attempt again; after an edit remove those that it no longer has.

        Unless `whole`, those that can be listed are skipped.
        """
        rendered = surroundings_of(work)
        await self.put(work, rendered if whole else [item for item in rendered if item[0] not in LISTED])
        await self._ensure_secret(work)
        if edited:
            await self._remove_unwanted(work)

    async def write_rank_table(self, work: JobContext, table: Object) -> None:
        """Store a rank table that is too long for the status."""
        await self.put(work, [render.ranks(work.owner, table)])

    async def put(self, work: JobContext, rendered: Sequence[tuple[Resource, Object]]) -> None:
        """Create the objects, in their order; apply those that exist. Raises NameTakenError for another owner's."""
        for resource, obj in rendered:
            made = work.owner.uid, resource.plural, str(obj["metadata"]["name"])
            if made in self._created or not await self._create(work, resource, obj):
                await self._apply(work, resource, obj)
            self._created[made] = None

    async def _create(self, work: JobContext, resource: Resource, obj: Object) -> bool:
        """Create an object; return False if it exists and is ours. Raises NameTakenError, ApiError.

        A quota or a policy may refuse it before the server finds that it exists.
        """
        try:
            await self._api.create(resource, obj, manager=CREATOR)
        except (AlreadyExistsError, ForbiddenError, InvalidError) as error:
            if await self._find(work, resource, obj) is not None:
                return False
            if isinstance(error, AlreadyExistsError):  # deleted meanwhile
                return False
            raise
        return True

    async def _apply(self, work: JobContext, resource: Resource, obj: Object) -> None:
        """Apply an object, which exists or not. Raises NameTakenError for another owner's, ApiError."""
        found = await self._find(work, resource, obj)
        if found is not None:
            await self._api.own_by_apply(resource, found)
        await self._api.apply(resource, obj)

    async def _find(self, work: JobContext, resource: Resource, obj: Object) -> Object | None:
        """Return our object of this name by a label of ours: this needs no right to read ConfigMaps.

        Raises NameTakenError for another owner's.
        """
        namespace, name = obj["metadata"]["namespace"], obj["metadata"]["name"]
        try:
            return await self._api.read_labelled(resource, namespace, name, LABEL_JOB_UID, work.owner.uid)
        except NotFoundError:
            return None
        except InvalidError:
            raise name_taken(resource, namespace, name) from None

    async def _ensure_secret(self, work: JobContext) -> None:
        """Create the job's Secret. The name follows from uid and key, so an existing one is right."""
        key = self._keys.find(work.settings.key_id)
        if key is None:  # the attempt has begun under it, so its Secret was created then
            log.warning(
                "%s/%s: key %s is not in the key file", work.owner.namespace, work.owner.name, work.settings.key_id
            )
            return
        resource, obj = render.secret(work.owner, tokens.job_secret(key, work.owner.uid), work.settings)
        with contextlib.suppress(AlreadyExistsError):
            await self._api.create(resource, obj)

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
            await self._events.record(work.owner, event)


def surroundings_of(work: JobContext) -> list[tuple[Resource, Object]]:
    """Return the objects around the pods of a running attempt, without its Secret."""
    hub = render.hub_objects(work.job, work.owner, work.settings) if work.job.spec.analyzer.enabled else ()
    return [*render.gang_objects(work.job, work.owner, work.attempt, work.settings), *hub]
