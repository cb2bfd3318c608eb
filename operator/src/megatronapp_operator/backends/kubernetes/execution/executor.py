"""Execution of the plan's actions. Every step may be done twice: again after a failure, or by the next leader."""

import dataclasses
import time
from collections.abc import Sequence

from megatronapp_common.attempt_order import AttemptOrder
from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, NameTakenError
from megatronapp_operator.backends.kubernetes.client.rejections import classify_rejection
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, WORKLOADS, Object
from megatronapp_operator.backends.kubernetes.execution.budgets import DisruptionBudgets
from megatronapp_operator.backends.kubernetes.execution.events import EventWriter
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext, run_all
from megatronapp_operator.backends.kubernetes.execution.objects import ObjectApplier
from megatronapp_operator.backends.kubernetes.execution.pods import PodWriter
from megatronapp_operator.backends.kubernetes.group_removal import KUEUE, PodGroupRemover
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner
from megatronapp_operator.backends.kubernetes.store import ObjectStore
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
    EndAtCheckpoint,
    EnsureDisruptionBudget,
    EnsureHub,
    EventType,
    PodRejection,
    RecordEvent,
    RemoveDisruptionBudget,
    RemoveGroup,
    RequestCheckpoint,
    RestartWorker,
)

HUB_SHORT_PAUSE_S, HUB_PAUSE_S = 3.0, 60.0
"""Seconds until a rejected hub is tried again: the first time that its name is taken, and otherwise."""
ENDED = frozenset({"Succeeded", "Failed"})


class Executor:
    """Executor for all jobs of one process."""

    def __init__(self, api: KubernetesApi, store: ObjectStore, *, keys: KeyRing, identity: str) -> None:
        self._api = api
        self.groups = PodGroupRemover(api)
        self.events = EventWriter(api, identity)
        self.objects = ObjectApplier(api, keys, self.events)
        self.budgets = DisruptionBudgets(api, self.objects)
        self.pods = PodWriter(api, store)
        self._hub_pauses: dict[str, float] = {}
        """Until when (monotonic) a rejected hub is not tried again, by the job's uid."""

    async def run(self, work: JobContext, actions: Sequence[Action]) -> PodRejection | None:
        """Carry out the actions; return the rejection of a pod, if any. Raises ApiError, NameTakenError."""
        await run_all([self.events.record(work.owner, action) for action in actions if isinstance(action, RecordEvent)])
        await run_all([self._change(work, action) for action in actions])
        if any(isinstance(action, EnsureHub) for action in actions):
            await self._try_hub(work)
        if any(isinstance(action, RestartWorker) for action in actions):
            await self._retire_hub(work)  # orders mark workers as of the attempt, with which a hub stays
        await self._order(work, [action for action in actions if isinstance(action, RestartWorker | EndAtCheckpoint)])
        starting = [action for action in actions if isinstance(action, CreateInit | CreateWorker)]
        try:
            if starting:
                await self.objects.ensure(work)
                await self._retire_hub(work)
                await self.pods.start(work, [_pod(work, action) for action in starting])
        except ApiError as error:
            refusal = classify_rejection(error, work.attempt.number)
            if refusal is None:
                raise
            return refusal
        return None

    async def _order(self, work: JobContext, actions: Sequence[RestartWorker | EndAtCheckpoint]) -> None:
        """Restart workers in place, let spares take their places, and let ranks end with their checkpoint."""
        if not actions:
            return
        given: list[tuple[PodRecord, AttemptOrder]] = []
        for pod in self.pods.of_type(work, ReplicaType.WORKER):
            action = next((action for action in actions if _is_for(action, pod)), None)
            if action is not None:
                given.append((pod, _order_of(work, action)))
        await self.pods.order_all(given)

    async def _try_hub(self, work: JobContext) -> None:
        """Create the hub, and retry later if the API server rejects it; the gang does not wait for it."""
        if time.monotonic() < self._hub_pauses.get(work.owner.uid, 0.0):
            return
        try:
            await self.objects.ensure(work)  # a name of these that is taken keeps the gang, too
            try:
                await self._ensure_hub(work)
            except NameTakenError as error:
                await self._pause_hub(work.owner, error)
        except ApiError as error:
            if classify_rejection(error, work.attempt.number) is None:
                raise
            await self._pause_hub(work.owner, error)

    async def _ensure_hub(self, work: JobContext) -> None:
        """Ensure the hub's Service, and its pod, which replaces one that has ended."""
        await self.objects.put(work, render.hub_objects(work.job, work.owner, work.settings))
        ended = [pod for pod in self.pods.of_type(work, ReplicaType.HUB) if pod.phase in ENDED or pod.deleted_at]
        await self.pods.delete_all(ended, 0)
        starts = 1 + max((pod.starts for pod in ended), default=0)
        await self.pods.create(work, render.hub_pod(work.job, work.owner, work.settings, starts=starts))

    async def _retire_hub(self, work: JobContext) -> None:
        """Delete a hub with another spec or manifest, or one that the job no longer has, before a gang starts.

        The plan then creates the right one. The old one may be of an earlier release, whose hub does not understand the
        agents of this gang, or may have read a manifest without what an edit gives to the ranks. Once a worker of the
        attempt exists, the hub stays: what it knows of the attempt is worth more.
        """
        workers = self.pods.of_type(work, ReplicaType.WORKER)
        hubs = [pod for pod in self.pods.of_type(work, ReplicaType.HUB) if pod.deleted_at is None]
        if not hubs or any(worker.attempt == work.attempt.number for worker in workers):
            return
        enabled = work.job.spec.analyzer.enabled
        template = render.hub_hash(work.job, work.owner, work.settings) if enabled else None
        await self.pods.delete_all([hub for hub in hubs if hub.template != template])

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
            await self.events.record(
                owner, RecordEvent(type=EventType.WARNING, reason="HubRefused", message=str(error))
            )

    async def _change(self, work: JobContext, action: Action) -> None:
        """Remove pods, groups and the job, set or remove the disruption budget, and request checkpoints."""
        match action:
            case DeleteHub():
                await self.pods.delete_all(self.pods.of_type(work, ReplicaType.HUB))
            case DeleteInit():
                grace_s = 0.0 if action.force else None
                await self.pods.delete_all(self.pods.of_type(work, ReplicaType.INIT), grace_s)
            case DeleteWorker():
                key = action.index, action.attempt, action.spare
                found = [
                    pod
                    for pod in self.pods.of_type(work, ReplicaType.WORKER)
                    if (pod.index, pod.attempt, pod.spare) == key
                ]
                await self.pods.delete_all(found, action.grace_s)
            case RemoveGroup():
                await self._remove_group(work, action.attempt)
            case EnsureDisruptionBudget():
                await self.budgets.ensure(work)
            case RemoveDisruptionBudget():
                await self.budgets.remove(work)
            case RequestCheckpoint():
                await self.pods.request_checkpoint(work, action)
            case DeleteJob():
                await self._api.delete(JOBS, work.document)

    async def _remove_group(self, work: JobContext, attempt: int) -> None:
        pods = [pod.uid for pod in self.pods.of_type(work, ReplicaType.WORKER) if pod.attempt == attempt]
        gang = work.job.spec.scheduling.gang
        resource = WORKLOADS if gang == KUEUE else render.group_resource(gang, work.settings)
        refused = await self.groups.remove(work.owner, resource, attempt, pods)
        if refused is not None:
            await self.events.record(
                work.owner, RecordEvent(type=EventType.WARNING, reason="GroupNotRemoved", message=refused)
            )


def _is_for(action: RestartWorker | EndAtCheckpoint, pod: PodRecord) -> bool:
    """Return True if a pod is to get this order and has not had it yet."""
    if isinstance(action, RestartWorker) and action.spare is not None:
        return pod.spare and pod.name == action.spare
    if pod.spare or pod.index != action.index:
        return False
    return pod.attempt == action.attempt if isinstance(action, EndAtCheckpoint) else pod.attempt < action.attempt


def _order_of(work: JobContext, action: RestartWorker | EndAtCheckpoint) -> AttemptOrder:
    """Return the order of an action; with spares it names the place of the worker, and where worker 0 gathers."""
    if isinstance(action, RestartWorker):
        order = AttemptOrder(attempt=action.attempt, grace_s=action.grace_s)
    else:
        order = AttemptOrder(
            attempt=action.attempt, grace_s=0.0, at_checkpoint=not action.withdrawn, withdrawn=action.withdrawn
        )
    if not work.orders_places:
        return order
    first = work.attempt.first or render.ObjectNames(work.owner.name).worker(0)
    where = render.coordinator(work.owner, first, work.settings.cluster_domain)
    return dataclasses.replace(order, worker=action.index, coordinator=where)


def _pod(work: JobContext, action: CreateInit | CreateWorker) -> Object:
    if isinstance(action, CreateWorker):
        settings = work.next_settings or work.settings if action.spare else work.settings
        return render.worker_pod(work.job, work.owner, work.attempt, action.index, settings, spare=action.spare)
    pod = render.init_pod(work.job, work.owner)
    assert pod is not None, "the plan wants initializers only where there are some"
    return pod
