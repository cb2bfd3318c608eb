"""Reconciling one job: observe it, plan, write the status, then act.

The job's status is the memory between two reconciles; `status_writer` says when it is written.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from megatronapp_common.errors import JobError
from megatronapp_common.job import read_status, status_document
from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator import plan
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    RetryReconcileError,
)
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PERSISTENT_VOLUME_CLAIMS, PODS, Object
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.execution.job_context import ContextBuilder, JobContext
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.leaving_nodes import LeavingNodes
from megatronapp_operator.backends.kubernetes.maintenance import JobMaintenance
from megatronapp_operator.backends.kubernetes.observe import observe
from megatronapp_operator.backends.kubernetes.pod_record import read_pod
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner, RenderSettings
from megatronapp_operator.backends.kubernetes.spec_resolution import SpecSource, resolve_spec
from megatronapp_operator.backends.kubernetes.status_writer import StatusWriter, attempt_template, rank_zero
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore
from megatronapp_operator.backends.kubernetes.surroundings import OwnedObjects
from megatronapp_operator.backends.kubernetes.volumes import claim_names, find_volume_problem
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    ConditionType,
    CreateInit,
    CreateWorker,
    EnsureHub,
    EventType,
    JobState,
    Plan,
    ProfileState,
    RecordEvent,
    Status,
)
from megatronapp_operator.plan.policies.user_actions import spent_after
from megatronapp_operator.plan_io.spec_reader import build_spec

log = logging.getLogger(__name__)

REFUSED_S = 10.0
"""Seconds until the next reconcile after an equal rejection."""
RECONCILE_RETRY_S = 2.0
"""Seconds after an action until a reconcile checks that its effect was observed."""
CLAIMS_S = 60.0
"""Seconds after an error until the volume claims are read again."""
DELETIONS_S = 30.0
"""Seconds between lists of a job's pods while some of them are being deleted."""
MANAGER = "megatronapp.io/operator"
"""Our value of spec.managedBy; a job with another one is not ours."""


@contextlib.contextmanager
def _spec_of_another_job(key: Key) -> Iterator[None]:
    """Let no spec that cannot be rendered end what is done for all jobs; `reconcile` reports it at its job.

    Templates of pods are the users', and a form of them that no rule foresees raises errors of any kind.
    """
    try:
        yield
    except JobError:
        return
    except Exception:
        log.warning("%s/%s: its objects cannot be rendered", *key, exc_info=True)


class Reconciler:
    """Reconciler of all jobs, for one event loop. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        api: KubernetesApi,
        store: ObjectStore,
        executor: Executor,
        settings: RenderSettings,
        *,
        keys: KeyRing,
        installation: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._store = store
        self._executor = executor
        self._installation = installation
        self._clock = clock
        self._contexts = ContextBuilder(settings, keys=keys, clock=clock)
        self._status = StatusWriter(
            api, store, installation=installation, cluster_domain=settings.cluster_domain, clock=clock
        )
        self._maintenance = JobMaintenance(store, executor, clock)
        self._leaving_nodes = LeavingNodes(api, clock, node_access=settings.node_access)
        self._memories: dict[Key, JobMemory] = {}
        self._troubles: dict[Key, str] = {}
        self._left: set[str] = set()
        """Uids of jobs that another installation manages and that were reported."""
        self._spent: dict[Key, float] = {}
        """When the bucket for control Events of a job is full again; kept also if its author creates the job again."""

    def memory(self, key: Key) -> JobMemory | None:
        """Return the state of a job; None before its first reconcile."""
        return self._memories.get(key)

    async def compare_owned_objects(self, namespaces: Sequence[str]) -> list[Key]:
        """List Services, policies and budgets of all jobs; return jobs that miss one or have a changed one.

        Raises ApiError.
        """
        began, differing = self._clock(), await self._compare_budgets(namespaces)
        try:
            found = await OwnedObjects.listed(self._api, namespaces)
        except ForbiddenError as error:
            if self._maintenance.lists is not False:  # once
                log.warning("deleted Services and policies are restored only within an hour: %s", error)
            self._maintenance.lists = False
            return differing
        self._maintenance.lists = True
        for key in self._store.keys:
            document, memory = self._store.job(key), self._memories.get(key)
            if document is None or memory is None or (memory.status.attempt_time or 0.0) > began:
                continue
            with _spec_of_another_job(key):
                if self._maintenance.compare(memory, self._contexts.build(memory, document), found):
                    differing.append(key)
            await asyncio.sleep(0)  # yields to other tasks between two jobs
        return list(dict.fromkeys(differing))

    async def _compare_budgets(self, namespaces: Sequence[str]) -> list[Key]:
        """Return the jobs whose disruption budget was deleted or changed. Raises ApiError."""
        having = dict[Key, JobContext]()
        for key, memory in self._memories.items():
            document = self._store.job(key)
            if document is not None and self._executor.budgets.exists(memory.uid):
                with _spec_of_another_job(key):
                    having[key] = self._contexts.build(memory, document)
        try:
            return await self._executor.budgets.compare(namespaces, having)
        except ForbiddenError as error:
            log.warning("deleted disruption budgets are not restored: %s", error)
            return []

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile a job once; return when to do so again at the latest.

        Raises RetryReconcileError, ApiError, NameTakenError, and JobError for a spec that this release cannot read.
        """
        document = self._store.job(key)
        if document is None or not self._manages(document):
            self._memories.pop(key, None)
            self._troubles.pop(key, None)
            if document is not None:
                await self._report_manager(key, document)
            return None
        memory = self._remember(key, document)
        if isinstance(memory, ProfileState):
            await self._wait_for_profile(key, document, memory)
            return None
        observe_at = _earliest(await self._see_volumes(key, memory), await self._see_lost_deletions(key, memory))
        pods = self._store.pods(key[0], memory.uid)
        observe_at = _earliest(observe_at, await self._leaving_nodes.read(memory, pods))
        made = self._plan(key, memory, document)
        if _ends_attempt(memory.status, made.status):
            await self._see_pods_afresh(key, memory)
            made = self._plan(key, memory, document)
        self._contexts.pin(memory, made.status)
        try:
            written, wake_at = await self._status.write(key, memory, made)
        except ConflictError as error:
            await self._see_job_afresh(key)
            raise RetryReconcileError(f"{key[0]}/{key[1]}: the job has changed meanwhile") from error
        if made.actions:
            self._spend(key, made)
            wake_at = _earliest(wake_at, await self._act(key, memory, made, verified=written))
        wake_at = _earliest(
            wake_at, observe_at, await self._maintenance.run(memory, self._contexts.build(memory, document))
        )
        self._troubles.pop(key, None)  # an error that returns after a success is reported again
        return wake_at

    def _manages(self, document: Object) -> bool:
        """Return True if a job is ours: neither an external controller's, nor another installation's.

        Of two installations that watch a namespace the first to write the status manages the job; the other one's write
        fails, because the object has changed meanwhile.
        """
        manager = self._manager(document)
        return manager == self._installation and document["spec"].get("managedBy", MANAGER) == MANAGER

    def _manager(self, document: Object) -> str:
        """Return the installation that manages a job; ours if none does yet."""
        return (document.get("status") or {}).get("manager") or self._installation

    async def _report_manager(self, key: Key, document: Object) -> None:
        """Report the other installation at its job, once.

        After a change of our own name no operator manages the job.
        """
        uid, manager = document["metadata"]["uid"], self._manager(document)
        phase = (document.get("status") or {}).get("phase")
        if manager == self._installation or uid in self._left or phase in TERMINAL_PHASES:
            return
        self._left.add(uid)
        text = (
            f"the installation {manager} (status.manager) manages this job, so {self._installation} does not; "
            f"if that operator does not exist any more, hand the job over: kubectl -n {key[0]} patch mgj {key[1]} "
            """--subresource=status --type=merge -p '{"status":{"manager":null}}'"""
        )
        log.warning("%s/%s: %s", *key, text)
        event = RecordEvent(type=EventType.WARNING, reason="OtherManager", message=text)
        await self._executor.events.record(JobOwner(namespace=key[0], name=key[1], uid=uid), event)

    def _remember(self, key: Key, document: Object) -> JobMemory | ProfileState:
        """Return the state of the job, updated from the object, or why a job that has never begun cannot begin.

        Raises JobError for a spec that we cannot read.
        """
        metadata, stored = document["metadata"], document.get("status") or {}
        known = self._memories.get(key)
        if known is not None and known.uid != metadata["uid"]:
            known = None
        status = known.status if known is not None and stored == known.written else read_status(stored)
        pinned = status.pinned if known is None else known.pinned
        source = SpecSource(document, self._store.applied(key), self._store.profiles.choose(document), status, pinned)
        if known is None or known.spec_source != source.key:
            found = resolve_spec(source)
            if found.job is None:
                assert found.state is not None, "only a profile keeps a job from beginning"
                self._memories.pop(key, None)
                return found.state
            if known is None:
                known = JobMemory(metadata["uid"], metadata["generation"], found.job, status, stored, stored)
                known.since, known.pinned = self._clock(), pinned
                self._memories[key] = known
            known.spec_job, known.profiles, known.profile_state = found.job, found.profiles, found.state
            known.unknown_fields, known.skipped_rules = found.unknown_fields, found.skipped_rules
            known.generation, known.spec_source = metadata["generation"], source.key
        if stored != known.written:  # another client wrote it
            known.status, known.written, known.sent = status, stored, stored
        return known

    async def _wait_for_profile(self, key: Key, document: Object, state: ProfileState) -> None:
        """Report at a job that has never begun why it cannot begin. A profile's change queues the job again."""
        stored, now = document.get("status") or {}, self._clock()
        made = plan.wait_for_profile(read_status(stored), state, now, generation=document["metadata"]["generation"])
        status = dataclasses.replace(made.status, manager=self._installation)
        if status_document(status) != stored:
            await self._status.replace(key, status_document(status))
        for event in made.actions:
            assert isinstance(event, RecordEvent)
            owner = JobOwner(namespace=key[0], name=key[1], uid=document["metadata"]["uid"])
            await self._executor.events.record(owner, event)

    def _plan(self, key: Key, memory: JobMemory, document: Object) -> Plan:
        deleting = document["metadata"].get("deletionTimestamp") is not None
        spec = build_spec(memory.spec_job, uid=memory.uid)
        job = JobState(
            spec=dataclasses.replace(spec, generation=memory.generation, template=self._contexts.template(memory)),
            status=memory.status,
            deletion_requested=deleting,
        )
        pods = self._store.pods(document["metadata"]["namespace"], memory.uid)
        seen = observe(
            pods,
            memory.poll_result,
            attempt=memory.status.attempt,
            refusal=memory.refusal,
            volumes=memory.volumes,
            next_template=self._contexts.next_template(memory) if spec.policy.in_place else None,
        )
        seen = dataclasses.replace(
            seen,
            profile=memory.profile_state,
            since=memory.since,
            groups_removed=self._executor.groups.removed_attempts(memory.uid),
            groups_refused=self._executor.groups.refused(memory.uid),
            disruption_budget=self._executor.budgets.exists(memory.uid),
            budget_refusal=self._executor.budgets.refusal(memory.uid),
            leaving_nodes=memory.leaving_nodes,
            controls_spent=self._spent.get(key, 0.0),
            attempt_template=attempt_template(memory.pinned),
            rank_zero=rank_zero(self._status.table(memory), memory.status.attempt),
        )
        return plan.plan(job, seen, self._clock())

    def _spend(self, key: Key, made: Plan) -> None:
        now = self._clock()
        self._spent[key] = spent_after(self._spent.get(key, 0.0), made.actions, now)
        self._spent = {job: until for job, until in self._spent.items() if until > now}

    async def _see_volumes(self, key: Key, memory: JobMemory) -> float | None:
        """Read the volume claims once before each gang is created; return when to try again after an error.

        An error is reported as the state of the claims and delays nothing: suspension, deadlines and deletion of the
        job do not depend on them.
        """
        names, status = claim_names(memory.job), memory.status
        if not names or status.phase in TERMINAL_PHASES:
            return None
        mark, again_at = (memory.generation, status.attempt), memory.volumes_again_at
        due = status.attempt_time is None and memory.volumes_seen != mark
        if not due and (again_at is None or self._clock() < again_at):
            return again_at
        memory.volumes_seen, memory.volumes_again_at = mark, None
        try:
            claims = {name: await self._api.get(PERSISTENT_VOLUME_CLAIMS, key[0], name) for name in names}
        except ApiError as error:
            memory.volumes = f"the volume claims cannot be read: {error}"
            memory.volumes_again_at = self._clock() + CLAIMS_S
            return memory.volumes_again_at
        memory.volumes = find_volume_problem(memory.job, claims)
        return None

    async def _see_pods_afresh(self, key: Key, memory: JobMemory) -> None:
        """List the pods of a job: no attempt is ended for an event that a watch has lost or not yet delivered."""
        fresh = await self._api.list_objects(PODS, key[0], labels=f"{LABEL_JOB_UID}={memory.uid}")
        self._store.replace_pods(map(read_pod, fresh.items), int(fresh.resource_version), only=(key[0], memory.uid))

    async def _see_lost_deletions(self, key: Key, memory: JobMemory) -> float | None:
        """List the pods at intervals while some are being deleted; return when to do so next.

        A watch that is rejected as too old begins again with a list, and does not report what was deleted before that.
        """
        deleted = [pod.deleted_at for pod in self._store.pods(key[0], memory.uid) if pod.deleted_at is not None]
        if not deleted:
            return None
        now = self._clock()
        if now >= max(min(deleted), memory.pods_listed_at) + DELETIONS_S:
            await self._see_pods_afresh(key, memory)
            memory.pods_listed_at = now
        return max(min(deleted), memory.pods_listed_at) + DELETIONS_S

    async def _see_job_afresh(self, key: Key) -> None:
        """Read the job again, and drop our memory of its status, which another process has replaced."""
        fresh, known = await self._api.get(JOBS, *key), self._store.job(key)
        if fresh is not None:
            self._store.put_job(fresh)
        elif known is not None:
            self._store.drop_job(known)
        self._memories.pop(key, None)

    async def _act(self, key: Key, memory: JobMemory, made: Plan, *, verified: bool) -> float | None:
        """Carry the plan out; return when to reconcile again.

        `verified`: the server has confirmed the job as we know it.
        """
        if not verified and any(isinstance(action, CreateWorker | CreateInit) for action in made.actions):
            await self._verify(key)
        document = self._store.job(key)
        assert document is not None, "a job is dropped only between two reconciles"
        before = memory.refusal
        memory.refusal = await self._executor.run(self._contexts.build(memory, document), made.actions)
        if memory.refusal is not None:
            return self._clock() + (0.0 if memory.refusal != before else REFUSED_S)
        changes = [action for action in made.actions if not isinstance(action, RecordEvent)]
        if not changes:
            return None
        if all(isinstance(action, EnsureHub) for action in changes):
            # retries are useless while a rejected hub is deferred
            return self._clock() + max(RECONCILE_RETRY_S, self._executor.hub_pause_s(memory.uid))
        return self._clock() + RECONCILE_RETRY_S

    async def report_trouble(self, key: Key, error: Exception) -> None:
        """Report at the job why it makes no progress, once for each reason."""
        document, text = self._store.job(key), str(error)
        if document is None or self._troubles.get(key) == text:
            return
        self._troubles[key] = text
        owner = JobOwner(namespace=key[0], name=key[1], uid=document["metadata"]["uid"])
        reason = type(error).__name__.removesuffix("Error")
        await self._executor.events.record(owner, RecordEvent(type=EventType.WARNING, reason=reason, message=text))

    async def _verify(self, key: Key) -> None:
        """Read the job before creating pods. Raises RetryReconcileError if it has changed or does not exist."""
        fresh, known = await self._api.get(JOBS, *key), self._store.job(key)
        assert known is not None, "a job is dropped only between two reconciles"
        if fresh is None:
            self._store.drop_job(known)
        elif self._store.put_job(fresh) is None:
            return
        raise RetryReconcileError(f"{key[0]}/{key[1]}: the job has changed meanwhile")


def _ends_attempt(before: Status, after: Status) -> bool:
    """Return True if the plan gives something up that a new list of the pods might save."""
    ends = after.phase in TERMINAL_PHASES and before.phase not in TERMINAL_PHASES
    fails = after.is_true(ConditionType.FAILURE_TARGET) and not before.is_true(ConditionType.FAILURE_TARGET)
    return ends or fails or after.attempt != before.attempt


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)
