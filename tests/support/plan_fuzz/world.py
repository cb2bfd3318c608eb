"""The model's state, what the plan sees of it, and what its actions do to it."""

import collections
import dataclasses
import random

from megatronapp_operator.plan import (
    Action,
    AttemptTemplate,
    CreateInit,
    CreateWorker,
    DeleteHub,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    Deletion,
    EndAtCheckpoint,
    EnsureDisruptionBudget,
    EnsureHub,
    HubPhase,
    HubState,
    InitPod,
    JobSpec,
    JobState,
    LeavingNode,
    Observed,
    PodGroupKey,
    PodRejection,
    ProfileState,
    Progress,
    RecordEvent,
    RemoveDisruptionBudget,
    RemoveGroup,
    RequestCheckpoint,
    RestartWorker,
    SlowRank,
    WorkerOutcome,
    WorkerPhase,
)
from plan_fuzz.pods import Node, Pod, new_uid, whole

FINAL = frozenset({0, 64, 65, 66, 68, 70})
"""Codes after which no launcher waits for another attempt."""
HUB_GRACE_S = 30.0
GROUP_RETRY_S = 600.0
"""So long after a refusal the operator asks again to remove a group."""


@dataclasses.dataclass(slots=True)
class World:
    """One job, its cluster, and the operator's memory of it."""

    random: random.Random
    job: JobState
    now: float
    nodes: dict[str, Node]
    queue: str = "none"
    """none; gated: pods wait for admission, then are placed one by one; whole: all are placed together or none."""
    admits: bool = True
    """True while the queue has capacity."""
    refuses: str = ""
    """Reaction of the API server to new pods: nothing, "quota", "denied" or "final"."""
    removes_groups: bool = True
    """True if the operator may remove workloads."""
    refused_groups: dict[int, float] = dataclasses.field(default_factory=dict)
    """Attempts whose workloads it was not allowed to remove, with the time."""
    image_fails: bool = False
    """No container of the job ever starts."""
    peers_notice: bool = True
    """True if ranks notice the loss of a peer; if not, they hang."""
    crashes_with: int | None = None
    """Exit code that ends every gang soon."""
    profile: str | None = None
    """State of the profiles below the job: None: it has none; "applied"; "refused": no attempt begins with them."""
    polled: bool = True
    """True while hub and launcher answer requests."""
    table_known: bool = True
    pods: dict[str, Pod] = dataclasses.field(default_factory=dict)
    """Pods by name: a spare may have the index of a worker of a larger gang."""
    broken: set[int] = dataclasses.field(default_factory=set)
    """Attempts that have lost a rank whose machine still works: the others notice it, and they never train again."""
    hung: set[int] = dataclasses.field(default_factory=set)
    """Attempts whose ranks hang."""
    groups: set[int] = dataclasses.field(default_factory=set)
    """Attempts whose pod group exists."""
    budget: bool = False
    """True while a budget refuses evictions."""
    budget_known: bool | None = None
    """True if the operator remembers to have set it, False to have removed it; None: neither."""
    budget_forbidden: bool = False
    """True while the operator may not set budgets."""
    budget_refusal: str = ""
    hub: HubState | None = None
    hub_starts: int = 0
    init: InitPod | None = None
    refusal: PodRejection | None = None
    made: AttemptTemplate | None = None
    progress: Progress | None = None
    slow_ranks: tuple[SlowRank, ...] | None = None
    hung_ranks: tuple[int, ...] | None = None
    missing: tuple[int, ...] = ()
    missing_in: int | None = None
    """Attempt that they are missing in; None: whichever."""
    last_contact: float | None = None
    since: float = 0.0
    iteration: int = 0
    counted_from: float | None = None
    """When the plan began to count the time of the job."""
    job_removed: bool = False
    """The job object."""
    used: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Attempt and index of workers that a look has seen to end, or in a gang that has run whole."""
    log: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=60))

    @property
    def spec(self) -> JobSpec:
        """Spec of the job, decoded, with the workers of the current attempt."""
        return self.job.spec.at(self.job.status)

    def note(self, *details: object) -> None:
        """Keep what happened for the report of a broken promise."""
        self.log.append(f"{self.now - self.since:10.1f} {' '.join(map(str, details))}")

    def observe(self) -> Observed:
        """Return all of the job that a reconciliation sees now."""
        first, template = self._first(), template_of(self)
        reported = {pod.uid: first is not None and first.joined == pod.joined for pod in self.pods.values()}
        workers = tuple(
            pod.view(template=template, reported=reported[pod.uid])
            for pod in sorted(self.pods.values(), key=lambda pod: (pod.attempt, pod.index))
        )
        return Observed(
            secret=True,
            profile=self.profile_state(),
            hub=self.hub,
            workers=tuple(worker for worker in workers if not worker.spare),
            spares=tuple(worker for worker in workers if worker.spare),
            init=self.init,
            attempt_template=self.made,
            rank_zero=self._rank_zero(),
            groups_removed=frozenset(range(self.job.status.attempt + 1)) - self.groups,
            groups_refused=frozenset(
                attempt for attempt, at in self.refused_groups.items() if self.now < at + GROUP_RETRY_S
            ),
            disruption_budget=self.budget_known,
            leaving_nodes=tuple(
                LeavingNode(name=node.name, reason="is cordoned") for node in self.nodes.values() if node.cordoned
            ),
            budget_refusal=self.budget_refusal,
            refusal=self.refusal,
            since=self.since,
            last_contact=self.last_contact if self.polled else 0.0,
            missing=self._missing(),
            launcher_attempt=None if first is None else first.joined,
            progress=self.progress if self.polled else None,
            slow_ranks=self.slow_ranks,
            hung_ranks=self.hung_ranks,
        )

    def profile_state(self) -> ProfileState | None:
        """Return the report of the backend, which has merged the spec for the attempt that the status has."""
        if self.profile is None:
            return None
        status = self.job.status
        refused = self.profile == "refused" and status.attempt_time is None
        reason = "ProfileRefused" if refused else "ProfileApplied"
        return ProfileState(
            reason=reason, message=self.profile, applied=not refused, attempt=status.attempt, ready=not refused
        )

    def _first(self) -> Pod | None:
        """Return worker 0 of the current attempt, if its launcher answers the operator."""
        pod = worker_at(self, 0)
        answers = pod is not None and pod.phase is WorkerPhase.RUNNING and self.healthy(pod) and self.polled
        return pod if answers and pod is not None and pod.attempt == self.job.status.attempt else None

    def _missing(self) -> tuple[int, ...]:
        of_this = self.missing_in in {None, self.job.status.attempt}
        first = self._first()
        late = set[int]()
        if first is not None and first.joined == first.attempt:
            late = {pod.index for pod in self.gang(first.attempt) if pod.joined < pod.attempt}
        found = late | set(self.missing if of_this else ())
        return tuple(sorted(found)) if self.polled else ()

    def _rank_zero(self) -> int | None:
        attempt = self.job.status.attempt
        known = self.table_known and self.job.status.running_time is not None
        return attempt % self.spec.workers if known else None

    def healthy(self, pod: Pod) -> bool:
        """Return whether the pod is on a machine that works."""
        return pod.node is not None and self.nodes[pod.node].up

    def gang(self, attempt: int) -> list[Pod]:
        """Return the pods of an attempt, without spares."""
        return [pod for pod in self.pods.values() if pod.attempt == attempt and not pod.spare]

    def trains(self) -> bool:
        """Return whether the whole gang runs on machines that work, and has lost no worker."""
        gang = [pod for pod in self.gang(self.job.status.attempt) if pod.runs]
        gathered = all(pod.joined == pod.attempt for pod in gang)
        whole_gang = len(gang) == self.spec.workers and gathered and all(map(self.healthy, gang))
        return whole_gang and self.job.status.attempt not in self.broken | self.hung

    def end(self, pod: Pod, code: int, *, disrupted: str | None = None) -> None:
        """Let its trainer end."""
        if not pod.live:
            return
        ran = pod.runs
        outcome = WorkerOutcome(code=code, signal=9 if code == 137 else None, message="words", reason="Because")
        may_wait = ran and pod.in_place and not pod.spare and code not in FINAL and pod.deletion is None
        if may_wait and self.random.random() < 0.7:
            pod.end, pod.finished = outcome, whole(self.now)
            self.broken.add(pod.joined)
            self.note("stands by", pod.index, pod.attempt, code)
            return
        pod.phase = WorkerPhase.SUCCEEDED if code == 0 else WorkerPhase.FAILED
        pod.outcome = outcome
        pod.finished, pod.disrupted = whole(self.now), disrupted or pod.disrupted
        pod.occupies = False
        if ran and code and not pod.spare:
            self.broken.add(pod.joined)
        self.note("ends", pod.index, pod.attempt, code)

    def remove(self, pod: Pod) -> None:
        """Remove the object from the cluster."""
        if self.pods.get(pod.name) is pod:
            del self.pods[pod.name]
            if pod.runs and self.healthy(pod) and self.spec.workers > 1 and not pod.spare:
                self.broken.add(pod.joined)
            self.note("gone", pod.index, pod.attempt)

    def do(self, action: Action) -> None:
        """Carry out what the plan requests. An action that is repeated does no harm."""
        if isinstance(action, RecordEvent):
            return
        self.note("do", action)
        match action:
            case CreateWorker():
                self._create(action)
            case RestartWorker() | DeleteWorker() | EndAtCheckpoint() | RequestCheckpoint():
                self._change(action)
            case EnsureHub():
                self._ensure_hub()
            case CreateInit() if self.init is None and not self._refused():
                self.init = InitPod(phase=WorkerPhase.PENDING, created_at=self.now)
            case RemoveGroup() | EnsureDisruptionBudget() | RemoveDisruptionBudget():
                change_objects(self, action)
            case DeleteHub() if self.hub is not None:
                going = Deletion(since=self.now, grace_s=HUB_GRACE_S)
                self.hub = dataclasses.replace(self.hub, deleting=True, deletion=going)
            case DeleteInit() if self.init is not None:
                self.init = None if action.force else dataclasses.replace(self.init, deleting=True)
            case DeleteJob():
                self.job_removed = True

    def _refused(self) -> bool:
        if not self.refuses:
            return False
        self.refusal = PodRejection(
            attempt=self.job.status.attempt,
            final=self.refuses == "final",
            denied=self.refuses == "denied",
            reason=self.refuses,
            message=self.refuses,
        )
        return True

    def _create(self, action: CreateWorker) -> None:
        if self.spec.group is PodGroupKey.POD_GROUP and not action.spare:
            self.groups.add(action.attempt)
        name = f"spare-{action.index}-{action.attempt}" if action.spare else f"worker-{action.index}"
        if name in self.pods or (worker_at(self, action.index) is not None and not action.spare) or self._refused():
            return
        self.pods[name] = Pod(
            uid=new_uid(),
            index=action.index,
            attempt=action.attempt,
            spare=action.spare,
            name=name,
            joined=action.attempt,
            in_place=self.spec.policy.in_place,
            template=template_of(self),
            created=self.now,
            avoids=frozenset(entry.node for entry in self.job.status.excluded_nodes if entry.until > self.now),
            gated=self.queue == "gated",
            has_finalizer=self.spec.group is PodGroupKey.WORKLOAD,
        )

    def _change(self, action: RestartWorker | DeleteWorker | EndAtCheckpoint | RequestCheckpoint) -> None:
        """Delete a pod, or give it the order to continue with an attempt, which its launcher follows in its time."""
        pod = worker_at(self, action.index)
        if isinstance(action, DeleteWorker):
            self._delete(action)
        elif isinstance(action, RequestCheckpoint):
            if pod is not None and pod.attempt == action.request.attempt:
                pod.save_request = action.request
        elif isinstance(action, EndAtCheckpoint):
            if pod is not None and pod.attempt == action.attempt:
                pod.checkpoint, pod.withdrawn = not action.withdrawn, action.withdrawn
        elif action.spare is not None:
            take_place(self, action)
        elif pod is not None and pod.attempt < action.attempt:
            pod.attempt, pod.ordered, pod.checkpoint, pod.withdrawn = action.attempt, self.now, False, False

    def remove_group(self, attempt: int) -> None:
        """Remove a workload with its finalizers and its pods."""
        if not self.removes_groups and self.spec.group is PodGroupKey.WORKLOAD:
            self.refused_groups[attempt] = self.now
            return
        self.groups.discard(attempt)
        for pod in [member for member in self.pods.values() if member.attempt == attempt and member.has_finalizer]:
            pod.has_finalizer = False
            pod.deletion = pod.deletion or Deletion(since=whole(self.now), grace_s=HUB_GRACE_S)
            if pod.node is None or pod.deletion.grace_s == 0:
                self.remove(pod)

    def _delete(self, action: DeleteWorker) -> None:
        key = action.index, action.attempt
        spares = (pod for pod in self.pods.values() if pod.spare and (pod.index, pod.attempt) == key)
        pod = next(spares, None) if action.spare else worker_at(self, action.index)
        if pod is None or pod.attempt != action.attempt:
            return
        if pod.deletion is None or action.grace_s < pod.deletion.grace_s:
            pod.deletion = Deletion(since=whole(self.now), grace_s=float(action.grace_s))
        if pod.node is None or action.grace_s == 0:
            self.try_remove(pod)

    def try_remove(self, pod: Pod) -> None:
        """The API server forgets a pod that is to go, unless a finalizer keeps it."""
        if not pod.has_finalizer:
            self.remove(pod)

    def _ensure_hub(self) -> None:
        if self.hub is None or self.hub.phase is HubPhase.ENDED or self.hub.deletion is not None:
            self.hub_starts += 1
            self.hub = HubState(phase=HubPhase.STARTING, starts=self.hub_starts)


def worker_at(world: World, index: int) -> Pod | None:
    """Return the pod of a worker, which may be a former spare."""
    return next((pod for pod in world.pods.values() if pod.index == index and not pod.spare), None)


def template_of(world: World) -> str:
    """Return the template of the pods of the current attempt, which know the number of workers."""
    return f"{world.spec.template} {world.spec.workers}"


def change_objects(world: World, action: RemoveGroup | EnsureDisruptionBudget | RemoveDisruptionBudget) -> None:
    """Change the objects around the pods."""
    if isinstance(action, RemoveGroup):
        world.remove_group(action.attempt)
        return
    exists = isinstance(action, EnsureDisruptionBudget)
    world.budget_refusal = "forbidden" if exists and world.budget_forbidden else ""
    if not world.budget_refusal:
        world.budget = world.budget_known = exists


def take_place(world: World, action: RestartWorker) -> None:
    """Let a spare become a worker; the place must be free."""
    pod = next((pod for pod in world.pods.values() if pod.spare and pod.name == action.spare), None)
    if pod is None:
        return
    if any(other.index == action.index and not other.spare for other in world.pods.values()):
        raise AssertionError(f"two workers at place {action.index}")
    pod.index, pod.attempt, pod.ordered, pod.spare = action.index, action.attempt, world.now, False


def advance(world: World, seconds: float) -> None:
    """Let time pass. The clock has whole microseconds, as the times that a plan writes and reads."""
    world.now = round(world.now + seconds, 6)
