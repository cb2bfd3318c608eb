"""The operator while it leads: news go into the store, jobs into a queue, workers look at them one by one."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import httpx

from megatronapp_common.errors import JobError
from megatronapp_common.job.crd import PLURAL
from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.api import JOBS, PODS, KubernetesApi, Object
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
from megatronapp_operator.backends.kubernetes.executor import Executor
from megatronapp_operator.backends.kubernetes.hub_poller import POLL_S, HubPoller
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.keyed_queue import KeyedQueue
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod
from megatronapp_operator.backends.kubernetes.reconciler import Reconciler
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore
from megatronapp_operator.controller.clock import ServerClock
from megatronapp_operator.controller.settings import ControllerSettings
from megatronapp_operator.errors import OperatorError
from megatronapp_operator.metrics import JobFacts, OperatorMetrics
from megatronapp_operator.plan import TERMINAL_PHASES

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 300.0)
"""First and longest pause after a look that failed."""
PAUSE_PER_LOOK, PAUSE_S = 2.0, 0.5
"""A key rests for so many times the length of its last look, at most so long in seconds."""
POLLERS = 32
TELLING = (JobError, NameTakenError, ForbiddenError, InvalidError, NotFoundError)
"""What does not pass by itself, so that people should know."""
ENDING_S = 60.0
"""How often a job is looked at whose namespace is being terminated."""
FIRST_RESYNC_S, RESYNC_RETRY_S = 30.0, 5.0
POLL_PER_JOB_S = 0.015
"""Of many jobs each is asked less often: five hundred every 7.5 s."""
STUCK_S = 600.0
"""So long a job may wait while no look at any job comes to an end; each request ends within half a minute."""
LOOP_LATE_S = 120.0
"""The watches' loop turns every second, if it is not stuck."""


@dataclasses.dataclass(slots=True)
class ControllerHealth:
    """What probes and metrics are told."""

    synced: bool = False
    """Everything was listed once since we lead."""
    leads: bool = False
    finished_at: float = 0.0
    """When a look at a job last came to its end, on the monotonic clock."""
    oldest_s: Callable[[], float] = lambda: 0.0
    """How long the first job in the queue has waited."""
    turned_at: Callable[[], float] = time.monotonic
    """When the loop of the watches last turned."""

    def stuck(self) -> str | None:
        """Why a new process would do better than this one; None: it would not.

        Whoever asks is answered by the loop that also looks at jobs: if that is stuck, there is no answer.
        """
        if not self.leads:
            return None
        now = time.monotonic()
        late_s, waited_s = now - self.turned_at(), min(self.oldest_s(), now - self.finished_at)
        if late_s > LOOP_LATE_S:
            return f"the watches have not turned for {late_s:.0f} s"
        if self.synced and waited_s > STUCK_S:
            return f"jobs wait, and no look at a job has come to its end for {waited_s:.0f} s"
        return None


class LeaderService:
    """Lives as long as the lease is held; a new lease means a new process."""

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
        """Jobs that are asked now and then."""
        self._failures: dict[Key, int] = {}
        self._ending: set[str] = set()
        """Namespaces that are being terminated."""
        health.oldest_s = lambda: self._queue.oldest_s

    def on_watch_event(self, resource: str, kind: str | None, obj: Object) -> None:
        """What a watch brings (`watches.News`)."""
        self._metrics.watch_event(resource, time.time())
        gone = kind == "DELETED"
        if resource == PLURAL:
            key = self._store.drop_job(obj) if gone else self._store.put_job(obj)
        else:
            key = self._store.drop_pod(obj) if gone else self._store.put_pod(obj)
        if key is not None:
            self._queue.add(key)
            self._metrics.queue(self._queue.depth, self._queue.oldest_s)

    async def begin(self) -> None:
        """List everything. Raises ApiError."""
        await self._sync()
        self._health.synced, self._health.finished_at = True, time.monotonic()

    async def run(self) -> NoReturn:
        """Look after the jobs for ever, once everything is listed. Raises LeaseLostError from whatever notices it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync())
            for _ in range(self._settings.workers):
                group.create_task(self._work(self._queue, self._reconcile))
            for _ in range(POLLERS):
                group.create_task(self._work(self._polls, self._poll))
        raise AssertionError("these tasks end by an error only")

    async def _sync(self) -> None:
        """List everything, and look at what turned out to be different from what we knew."""
        jobs, version = await self._list_jobs()
        changed = self._store.replace_jobs(jobs, version)
        pods, version = await self._list_pods()
        changed_pods = self._store.replace_pods(pods, version)
        if self._health.synced:  # what watches should have brought
            self._metrics.missed(PLURAL, len(changed))
            self._metrics.missed("pods", len(changed_pods))
        for key in changed | changed_pods:
            self._queue.add(key)

    async def _list_jobs(self) -> tuple[list[Object], int]:
        found: list[Object] = []
        versions = []
        for namespace in self._settings.namespaces or (None,):
            listing = await self._api.list_objects(JOBS, namespace)
            found += listing.items
            versions.append(int(listing.resource_version))
        return found, min(versions)

    async def _list_pods(self) -> tuple[list[PodRecord | None], int]:
        """Records only: the pods of a large cluster do not fit into memory at once."""
        found: list[PodRecord | None] = []
        versions = []
        for namespace in self._settings.namespaces or (None,):
            async for page in self._api.pages(PODS, namespace, labels=LABEL_JOB_UID):
                found += map(read_pod, page.items)
                versions.append(int(page.resource_version))
        return found, min(versions)

    async def _resync(self) -> None:
        """List everything now and then. What went between the first list and the watches' own, only a list can tell."""
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
                log.warning("everything could not be listed, it is tried again in %g s: %s", RESYNC_RETRY_S, error)
                pause = RESYNC_RETRY_S
            except Exception:  # one object of a shape that nobody foresaw must not end the whole operator
                log.exception("everything could not be listed, it is tried again in %g s", RESYNC_RETRY_S)
                pause = RESYNC_RETRY_S

    async def _work(self, queue: KeyedQueue[Key], look: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            key, began = await queue.take(), time.monotonic()
            try:
                await look(key)
            finally:  # a look at a large gang takes time: news that come close together are worth one look
                pause = min(PAUSE_S, PAUSE_PER_LOOK * (time.monotonic() - began))
                asyncio.get_running_loop().call_later(pause, queue.done, key)

    async def _reconcile(self, key: Key) -> None:
        """One look at a job; what goes wrong there is tried again later and stops nobody else."""
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
                log.info("namespace %s is being terminated, its jobs wait for that: %s", key[0], error)
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
        """Name what went wrong, in the log, and at the job if it does not pass by itself."""
        if not isinstance(error, OperatorError | JobError):
            log.error("%s/%s: a look at the job failed", *key, exc_info=error)
            return
        log.warning("%s/%s: %s", *key, error)
        if not isinstance(error, TELLING):
            return
        try:
            await self._reconciler.report_trouble(key, error)
        except LeaseLostError:
            raise
        except Exception:
            log.exception("%s/%s: that could not be told at the job", *key)

    def _retry_at(self, key: Key, error: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        first, longest = BACKOFF_S
        pause = min(longest, first * 2.0 ** min(failures - 1, 32)) * random.uniform(0.8, 1.2)
        least = error.retry_after_s if isinstance(error, ThrottledError) else 0.0
        return self._clock() + max(pause, least)

    def _after(self, key: Key) -> None:
        """What others are told of a job that was looked at."""
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
        gang = {"attempt": status.attempt, "workers": status.replicas.desired}
        key_id = memory.pinned.key_id if memory.pinned is not None else self._settings.keys.current_id
        try:
            told = await self._poller.poll(memory.uid, pods, memory.poll_result, key_id=key_id, **gang)
        except Exception:
            log.exception("%s/%s: hub and launcher could not be asked", *key)
            told = memory.poll_result
        changed = told != memory.poll_result or told.refused != memory.poll_result.refused
        memory.poll_result = told  # also the same words as before: that they were said now is kept beside them
        if changed:
            self._queue.add(key)
        if memory.status.phase not in TERMINAL_PHASES:
            self._poll_later(key)


def _facts(memory: JobMemory) -> JobFacts:
    """What metrics show beside the status."""
    world, table = memory.job.world, memory.poll_result.rank_table or {}
    nodes = {rank: str(one.get("node", "")) for one in table.get("workers") or () for rank in one.get("ranks") or ()}
    queue = memory.job.spec.scheduling.queue or ""
    return JobFacts(
        mode=memory.job.spec.mode, workers=world.nodes, world_size=world.world_size, queue=queue, nodes=nodes
    )


def describe_namespaces(namespaces: Sequence[str]) -> str:
    """Which namespaces are watched, for people."""
    return ", ".join(namespaces) if namespaces else "all namespaces"
