"""The operator while it leads: watch events change the store and queue jobs, which workers reconcile one by one."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NoReturn

import httpx

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.crd import PLURAL
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import (
    ApiError,
    ForbiddenError,
    InvalidError,
    LeaseLostError,
    NamespaceTerminatingError,
    NameTakenError,
    NotFoundError,
    RetryReconcileError,
    ThrottledError,
)
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PODS, PROFILES, Object
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.hub_poller import POLL_S, HubPoller
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.keyed_queue import KeyedQueue
from megatronapp_operator.backends.kubernetes.profile_store import KINDS
from megatronapp_operator.backends.kubernetes.reconciler import Reconciler
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore
from megatronapp_operator.controller.clock import ServerClock
from megatronapp_operator.controller.pod_watch import PodWatch
from megatronapp_operator.controller.settings import ControllerSettings
from megatronapp_operator.errors import OperatorError
from megatronapp_operator.metrics import JobFacts, OperatorMetrics
from megatronapp_operator.plan import TERMINAL_PHASES

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 300.0)
"""First and longest pause in seconds after a reconcile that failed."""
PAUSE_FACTOR, PAUSE_S = 2.0, 0.5
"""Pause of a key as a multiple of the length of its last reconcile, and its limit in seconds."""
POLLERS = 32
"""Jobs that are polled at a time; a poll takes three seconds at most."""
TELLING = (JobError, NameTakenError, ForbiddenError, InvalidError, NotFoundError)
"""Errors that do not pass by themselves, and are reported at the job for its user."""
ENDING_S = 60.0
"""Seconds between reconciles of a job whose namespace is being terminated."""
FIRST_RESYNC_S, RESYNC_RETRY_S = 30.0, 5.0
"""Seconds until the first full list after that of the start, and until the next attempt after an error."""
POLL_PER_JOB_S = 0.015
"""Seconds between polls of a hub for each known job: five hundred jobs are polled every 7.5 s."""
STUCK_S = 600.0
"""Seconds that a job may wait while no reconcile finishes; each request ends within half a minute."""
LOOP_LATE_S = 120.0
"""Seconds without a turn after which the loop of the watches is stuck; it turns every second."""


@dataclasses.dataclass(slots=True)
class ControllerHealth:
    """State of the operator for probes and metrics."""

    synced: bool = False
    """True once all objects were listed since this process leads."""
    leads: bool = False
    finished_at: float = 0.0
    """When a reconcile last finished, on the monotonic clock."""
    oldest_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds that the first job in the queue has waited."""
    turned_at: Callable[[], float] = time.monotonic
    """Returns when the loop of the watches last turned, on the monotonic clock."""

    def stuck(self) -> str | None:
        """Return why a restart would help this process; None: it would not.

        The loop that answers probes also reconciles jobs: if it is stuck, there is no answer.
        """
        if not self.leads:
            return None
        now = time.monotonic()
        late_s, waited_s = now - self.turned_at(), min(self.oldest_s(), now - self.finished_at)
        if late_s > LOOP_LATE_S:
            return f"the watches have not turned for {late_s:.0f} s"
        if self.synced and waited_s > STUCK_S:
            return f"jobs wait, and no reconcile has finished for {waited_s:.0f} s"
        return None


class LeaderService:
    """Service that lives as long as the lease is held; a new lease means a new process."""

    def __init__(
        self,
        api: KubernetesApi,
        client: httpx.AsyncClient,
        settings: ControllerSettings,
        metrics: OperatorMetrics,
        health: ControllerHealth,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._health = health
        self._clock = clock or ServerClock()
        self._store = ObjectStore()
        self._pod_watches = [
            PodWatch(api, self._store, namespace, on_change=self._on_pods)
            for namespace in settings.namespaces or (None,)
        ]
        executor = Executor(api, self._store, keys=settings.keys, identity=settings.identity)
        self._reconciler = Reconciler(
            api,
            self._store,
            executor,
            settings.render,
            keys=settings.keys,
            installation=f"{settings.lease_namespace}/{settings.lease_name}",
            clock=self._clock,
        )
        self._poller = HubPoller(client, keys=settings.keys, clock=self._clock)
        self._queue: KeyedQueue[Key] = KeyedQueue(self._clock)
        self._polls: KeyedQueue[Key] = KeyedQueue(self._clock)
        self._polled: set[Key] = set()
        """Jobs whose hub and launcher are polled."""
        self._failures: dict[Key, int] = {}
        self._ending: set[str] = set()
        """Namespaces that are being terminated."""
        health.oldest_s = lambda: self._queue.oldest_s

    def on_watch_event(self, resource: str, kind: str | None, obj: Object) -> None:
        """Store a job or profile of a watch and queue the jobs that it concerns (`watches.WatchCallback`)."""
        self._metrics.watch_event(resource, time.time())
        deleted = kind == "DELETED"
        if resource in KINDS:
            self._on_profile(KINDS[resource], obj, deleted=deleted)
            return
        key = self._store.drop_job(obj) if deleted else self._store.put_job(obj)
        if key is not None:
            self._enqueue([key])

    def _on_pods(self, keys: Collection[Key]) -> None:
        """Queue the jobs of pods that a watch has changed; none after a bookmark."""
        self._metrics.watch_event(PODS.plural, time.time())
        self._enqueue(keys)

    def _enqueue(self, keys: Collection[Key]) -> None:
        for key in keys:
            self._queue.add(key)
        self._metrics.queue(self._queue.depth, self._queue.oldest_s)

    def _on_profile(self, kind: ProfileKind, obj: Object, *, deleted: bool) -> None:
        """Store a profile and queue the jobs that are merged over it."""
        profiles = self._store.profiles
        profile = profiles.drop(kind, obj) if deleted else profiles.put(kind, obj)
        for key in () if profile is None else self._store.jobs_over(profile):
            self._queue.add(key)

    @property
    def readable_profiles(self) -> frozenset[ProfileKind]:
        """Kinds of profiles that the API server serves, and lets this operator list."""
        return frozenset(self._store.profiles.readable)

    async def begin(self) -> None:
        """List all objects. Raises ApiError."""
        await self._sync()
        self._health.synced, self._health.finished_at = True, time.monotonic()

    async def run(self) -> NoReturn:
        """Reconcile jobs until an error, after all objects were listed. Raises LeaseLostError."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync())
            for watch in self._pod_watches:
                group.create_task(watch.follow())
            for _ in range(self._settings.workers):
                group.create_task(self._work(self._queue, self._reconcile))
            for _ in range(POLLERS):
                group.create_task(self._work(self._polls, self._poll))
        raise AssertionError("these tasks end by an error only")

    async def _sync(self) -> None:
        """List all objects, and queue jobs that differ from what was known, or whose profiles do."""
        await self._sync_profiles()  # before the jobs that are merged over them
        jobs, version = await self._list_jobs()
        changed = self._store.replace_jobs(jobs, version)
        changed_pods = set[Key]()
        for watch in self._pod_watches:
            changed_pods |= await watch.list_pods()
        if self._health.synced:  # what watches should have reported
            self._metrics.missed(PLURAL, len(changed))
            self._metrics.missed(PODS.plural, len(changed_pods))
        for key in changed | changed_pods:
            self._queue.add(key)

    async def _sync_profiles(self) -> None:
        """List all profiles. A cluster with an older definition or role has none that this process can read."""
        for kind in sorted(self._store.profiles.readable):
            try:
                await self._sync_kind(kind)
            except (NotFoundError, ForbiddenError) as error:
                log.warning("jobs are merged over no %s until the operator is restarted: %s", kind, error)
                self._store.profiles.readable.discard(kind)

    async def _sync_kind(self, kind: ProfileKind) -> None:
        places = (None,) if kind is ProfileKind.CLUSTER else self._settings.namespaces or (None,)
        listings = [await self._api.list_objects(PROFILES[kind], place) for place in places]
        version = min(int(listing.resource_version) for listing in listings)
        items = [item for listing in listings for item in listing.items]
        for profile in self._store.profiles.replace(kind, items, version):
            for key in self._store.jobs_over(profile):
                self._queue.add(key)

    async def _list_jobs(self) -> tuple[list[Object], int]:
        found: list[Object] = []
        versions = []
        for namespace in self._settings.namespaces or (None,):
            listing = await self._api.list_objects(JOBS, namespace)
            found += listing.items
            versions.append(int(listing.resource_version))
        return found, min(versions)

    async def _resync(self) -> None:
        """List all objects at intervals.

        Only a list shows deletions between the first list and those of the watches.
        """
        pause = min(FIRST_RESYNC_S, self._settings.resync_s)
        while True:
            await asyncio.sleep(pause)
            try:
                await self._sync()
                for key in await self._reconciler.compare_owned_objects(self._settings.namespaces):
                    self._queue.add(key)
                pause = self._settings.resync_s
            except LeaseLostError:
                raise
            except ApiError as error:
                log.warning("listing all objects failed, retry in %g s: %s", RESYNC_RETRY_S, error)
                pause = RESYNC_RETRY_S
            except Exception:  # one object of an unexpected shape must not end the whole operator
                log.exception("listing all objects failed, retry in %g s", RESYNC_RETRY_S)
                pause = RESYNC_RETRY_S

    async def _work(self, queue: KeyedQueue[Key], handle: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            key, began = await queue.take(), time.monotonic()
            try:
                await handle(key)
            finally:  # a large gang takes time: events close together need one reconcile
                pause = min(PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began))
                asyncio.get_running_loop().call_later(pause, queue.done, key)

    async def _reconcile(self, key: Key) -> None:
        """Reconcile a job; an error is retried later and does not affect other jobs."""
        began, outcome = time.monotonic(), "ok"
        try:
            wake_at = await self._reconciler.reconcile(key)
            self._after(key)
        except LeaseLostError:
            raise
        except RetryReconcileError:
            self._queue.add(key)
            return
        except NamespaceTerminatingError as error:
            wake_at = self._clock() + ENDING_S
            if key[0] not in self._ending:
                log.info("namespace %s is being terminated; its jobs wait: %s", key[0], error)
            self._ending.add(key[0])
        except Exception as error:
            outcome, wake_at = "error", self._retry_at(key, error)
            await self._report_error(key, error)
        else:
            self._failures.pop(key, None)
            self._ending.discard(key[0])
        finally:
            self._health.finished_at = time.monotonic()
        self._metrics.reconciled(time.monotonic() - began, outcome)
        if wake_at is not None:
            self._queue.add_at(key, wake_at)
        self._metrics.queue(self._queue.depth, self._queue.oldest_s)

    async def _report_error(self, key: Key, error: Exception) -> None:
        """Log an error, and report it at the job if it does not pass by itself."""
        if not isinstance(error, OperatorError | JobError):
            log.error("%s/%s: reconciling failed", *key, exc_info=error)
            return
        log.warning("%s/%s: %s", *key, error)
        if not isinstance(error, TELLING):
            return
        try:
            await self._reconciler.report_trouble(key, error)
        except LeaseLostError:
            raise
        except Exception:
            log.exception("%s/%s: the error could not be reported at the job", *key)

    def _retry_at(self, key: Key, error: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        first, longest = BACKOFF_S
        pause = min(longest, first * 2.0 ** min(failures - 1, 32)) * random.uniform(0.8, 1.2)
        least = error.retry_after_s if isinstance(error, ThrottledError) else 0.0
        return self._clock() + max(pause, least)

    def _after(self, key: Key) -> None:
        """Update metrics and polls after a job was reconciled."""
        memory = self._reconciler.memory(key)
        if memory is None:
            self._failures.pop(key, None)
            self._metrics.forget_job(*key)
            return
        self._metrics.observe_job(*key, memory.status, now=self._clock(), facts=_facts(memory))
        if memory.status.attempt_time is not None and memory.status.phase not in TERMINAL_PHASES:
            self._poll_later(key)

    def _poll_later(self, key: Key) -> None:
        self._polled.add(key)
        self._polls.add_at(key, self._clock() + max(POLL_S, POLL_PER_JOB_S * len(self._polled)))

    async def _poll(self, key: Key) -> None:
        self._polled.discard(key)
        memory = self._reconciler.memory(key)
        if memory is None:
            return
        pods, status = self._store.pods(key[0], memory.uid), memory.status
        most_ranks = max(memory.job.world.world_size, memory.spec_job.world.world_size)
        gang = {"attempt": status.attempt, "workers": status.replicas.desired, "ranks": most_ranks}
        key_id = memory.pinned.key_id if memory.pinned is not None else self._settings.keys.current_id
        try:
            polled = await self._poller.poll(memory.uid, pods, memory.poll_result, key_id=key_id, **gang)
        except Exception:
            log.exception("%s/%s: polling hub and launcher failed", *key)
            polled = memory.poll_result
        changed = polled != memory.poll_result or polled.refused != memory.poll_result.refused
        memory.poll_result = polled  # also an equal result: it has a newer time
        if changed:
            self._queue.add(key)
        if memory.status.phase not in TERMINAL_PHASES:
            self._poll_later(key)


def _facts(memory: JobMemory) -> JobFacts:
    """Return the labels of metrics that the status does not have."""
    world, table = memory.job.world, memory.poll_result.rank_table or {}
    nodes = {
        rank: str(worker.get("node", "")) for worker in table.get("workers") or () for rank in worker.get("ranks") or ()
    }
    queue = memory.job.spec.scheduling.queue or ""
    return JobFacts(
        mode=memory.job.spec.mode,
        workers=world.nodes,
        world_size=world.world_size,
        data_parallel_size=world.data_parallel_size,
        desired_data_parallel_size=memory.spec_job.world.data_parallel_size,
        queue=queue,
        gpus=world.gpus,
        nodes=nodes,
    )


def describe_namespaces(namespaces: Sequence[str]) -> str:
    """Describe the watched namespaces for the log."""
    return ", ".join(namespaces) if namespaces else "all namespaces"
