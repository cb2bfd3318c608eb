"""A job, and helpers of all steps that are carried out for it."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import cachetools

from megatronapp_common.job import MegatronJob, PinnedSettings, Status
from megatronapp_operator.backends.kubernetes.client.errors import NameTakenError
from megatronapp_operator.backends.kubernetes.client.resources import Object, Resource
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.render import may_have_spares, template_hash
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings
from megatronapp_operator.keys import KeyRing

REMEMBERED = 1000
"""Most settings that are remembered: as many as jobs have images and keys."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job, and what its objects are rendered from."""

    document: Object
    """MegatronJob, as read from the API server."""
    job: MegatronJob
    owner: JobOwner
    attempt: AttemptSettings
    settings: RenderSettings
    next_settings: RenderSettings | None = None
    """Settings of the next attempt, for which spares are made; None: those of this one."""
    orders_places: bool = False
    """True if orders to restart name the place of the worker: spares may take places."""


class ContextBuilder:
    """Builder of contexts: settings stay pinned for a whole attempt, also over a change of the operator's own."""

    def __init__(self, settings: RenderSettings, *, keys: KeyRing, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._made: cachetools.LRUCache[tuple[str, str, str], RenderSettings] = cachetools.LRUCache(REMEMBERED)

    def build(self, memory: JobMemory, document: Object) -> JobContext:
        """Return the context of a job as it is known."""
        status, metadata, pinned = memory.status, document["metadata"], memory.pinned
        begun = pinned is not None and pinned.attempt == status.attempt
        settings = self._pinned_settings(pinned) if pinned is not None and begun else self._current_settings()
        current = self._current_settings()
        avoided = tuple(node.node for node in status.excluded_nodes if node.until > self._clock())
        return JobContext(
            document=document,
            job=memory.job,
            owner=JobOwner(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"]),
            attempt=AttemptSettings(
                number=status.attempt,
                excluded_nodes=avoided,
                first=next((entry.pod for entry in status.takeovers if entry.worker == 0), None),
            ),
            settings=settings,
            next_settings=current if current.key_id == settings.key_id else None,
            orders_places=bool(may_have_spares(memory.job) or status.takeovers),
        )

    def template(self, memory: JobMemory) -> str:
        """Return the digest of a worker made now. Settings stay pinned unless the job was edited."""
        status, pinned = memory.status, memory.pinned
        if status.running_time is not None or pinned is None or pinned.attempt != status.attempt:
            return ""
        edited = pinned.generation != memory.generation
        settings = self._current_settings() if edited else self._pinned_settings(pinned)
        return template_hash(memory.job, settings)

    def next_template(self, memory: JobMemory) -> str | None:
        """Return the digest of a worker of the next attempt; None if it has another secret than those of this one."""
        pinned, settings = memory.pinned, self._current_settings()
        if pinned is None or pinned.key_id != settings.key_id:
            return None
        return template_hash(memory.job, settings)

    def pin(self, memory: JobMemory, status: Status) -> None:
        """Pin what a gang is made of with the decision to create it."""
        pinned, job = memory.pinned, memory.job_at(status)
        if status.attempt_time is not None and (pinned is None or pinned.attempt != status.attempt):
            memory.pinned = PinnedSettings(
                attempt=status.attempt,
                trainer_image=job.spec.image or self._settings.trainer_image,
                analyzer_image=job.spec.analyzer.image or self._settings.analyzer_image,
                template_hash=template_hash(job, self._current_settings()),
                key_id=self._keys.current_id,
                generation=memory.generation,
                profiles=memory.profiles,
            )

    def _current_settings(self) -> RenderSettings:
        """Return the settings of an attempt that begins now."""
        own = self._settings
        return self._settings_of(own.trainer_image, own.analyzer_image, self._keys.current_id)

    def _pinned_settings(self, pinned: PinnedSettings) -> RenderSettings:
        """Return the settings of an attempt that has begun."""
        return self._settings_of(pinned.trainer_image, pinned.analyzer_image, pinned.key_id)

    def _settings_of(self, trainer_image: str, analyzer_image: str, key_id: str) -> RenderSettings:
        """Return one object for equal values: what is rendered is remembered by the identity of its settings."""
        given = trainer_image, analyzer_image, key_id
        made = self._made.get(given)
        if made is None:
            made = dataclasses.replace(
                self._settings, trainer_image=trainer_image, analyzer_image=analyzer_image, key_id=key_id
            )
            self._made[given] = made
        return made


async def run_all(steps: Sequence[Awaitable[None]]) -> None:
    """Run all steps concurrently to their ends, and then raise the first error."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def name_taken(resource: Resource, namespace: str, name: str) -> NameTakenError:
    """Return the error for an object of another owner."""
    return NameTakenError(
        f"{resource.plural} {namespace}/{name} exists and belongs to another owner; "
        "unless it vanishes with an earlier job of this name, delete it, or use another name for the job"
    )
