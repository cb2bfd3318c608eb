"""Conversion of pods and poll results to the plan's view of a job. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.plan import (
    Deletion,
    HubPhase,
    HubState,
    InitPod,
    Observed,
    PodRejection,
    Progress,
    Worker,
    WorkerOutcome,
    WorkerPhase,
)
from megatronapp_operator.plan_io.hub_summary import HubSummary, newest

MAX_WAITING = 512
"""Most characters of why a hub does not start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PollHealth:
    """Recent results of polling a pod."""

    uid: str = ""
    """UID of the pod; another pod starts with a clean state."""
    misses: int = 0
    """Number of late answers in a row."""
    due: float = 0.0
    """Time before which it is not polled again."""
    refused: bool = False
    """True if its last answer rejected our token as that of another job."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatheringStatus:
    """Answer of the launcher of worker 0 while it waits for others."""

    attempt: int
    missing: tuple[int, ...]
    """Workers that have not joined."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEnd:
    """How the ranks of a worker ended whose launcher waits for the next attempt."""

    attempt: int
    outcome: WorkerOutcome
    finished_at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """Last results of polling a job's hub and launcher."""

    summary: HubSummary | None = None
    """Summary of the hub; None: no answer."""
    progress: Progress | None = None
    """Progress from the launcher."""
    rank_table: dict[str, Any] | None = None
    gathering: GatheringStatus | None = None
    launcher_attempt: int | None = None
    """Attempt that the launcher of worker 0 runs; None: no answer."""
    ends: Mapping[int, ReportedEnd] = dataclasses.field(default_factory=dict)
    """Ends by worker, as the launcher of worker 0 reports them."""
    unknown_key: str | None = None
    """Id of the job's key if the key file does not have it, so that neither was polled."""
    received_at: float = dataclasses.field(default=0.0, compare=False)
    """When a source of progress last answered; not compared, so that it alone is no change."""
    page: tuple[int, float] | None = dataclasses.field(default=None, compare=False)
    """Attempt and time of the newest progress that a hub had."""
    hub: PollHealth = dataclasses.field(default=PollHealth(), compare=False)
    launcher: PollHealth = dataclasses.field(default=PollHealth(), compare=False)

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of those that reject our token."""
        return tuple(name for name, health in (("hub", self.hub), ("launcher", self.launcher)) if health.refused)


def observe(
    pods: Iterable[PodRecord],
    polled: PollResult,
    *,
    attempt: int,
    refusal: PodRejection | None,
    volumes: str | None = None,
    next_template: str | None = None,
) -> Observed:
    """Return the plan's view of a job. The job's secret is derived from its uid, so it always exists.

    `next_template`: digest of a worker of the next attempt, if those of this one may continue with it in place.
    """
    by_type: dict[ReplicaType, list[PodRecord]] = {kind: [] for kind in ReplicaType}
    for pod in pods:
        by_type[pod.type].append(pod)
    summary = polled.summary
    known = sorted(
        (worker(pod, polled.ends, next_template) for pod in by_type[ReplicaType.WORKER]),
        key=lambda found: (found.attempt, found.index),
    )
    current = summary is not None and summary.attempt == attempt
    gathering = polled.gathering if polled.gathering is not None and polled.gathering.attempt == attempt else None
    return Observed(
        secret=True,
        hub=_hub(by_type[ReplicaType.HUB]),
        workers=tuple(found for found in known if not found.spare),
        spares=tuple(found for found in known if found.spare),
        init=_init(by_type[ReplicaType.INIT]),
        volumes=volumes,
        refusal=refusal,
        last_contact=polled.received_at,
        token_refused=polled.refused,
        unknown_key=polled.unknown_key,
        launcher_attempt=polled.launcher_attempt,
        missing=gathering.missing if gathering is not None else (),
        progress=newest([summary.progress if summary else None, polled.progress]),
        slow_ranks=summary.slow_ranks if summary else None,
        hung_ranks=summary.hung_ranks if summary and current else None,
        full_shared_memory=summary.full_shared_memory if summary else None,
        controls=summary.controls if summary else (),
    )


def worker(
    pod: PodRecord, ends: Mapping[int, ReportedEnd] = MappingProxyType({}), next_template: str | None = None
) -> Worker:
    """Return the worker of a pod. It has ended when its trainer has, even if the agent still runs."""
    end = ends.get(pod.index) if pod.main.running and not pod.spare else None
    standby = end is not None and end.attempt == pod.attempt
    return Worker(
        index=pod.index,
        attempt=pod.attempt,
        phase=WorkerPhase.FAILED if standby else phase_of(pod),
        started_at=pod.main.started_at,
        finished_at=end.finished_at if end is not None and standby else pod.main.finished_at,
        outcome=end.outcome if end is not None and standby else pod.main.outcome,
        standby=standby,
        reusable=next_template is not None and pod.template == next_template,
        name=pod.name,
        spare=pod.spare,
        ends_at_checkpoint=pod.ends_at_checkpoint,
        end_withdrawn=pod.end_withdrawn,
        save_request=pod.save_request,
        deletion=_deletion(pod),
        node=pod.node,
        uid=pod.uid,
        occupies=pod.phase not in {"Succeeded", "Failed"},
        scheduled=pod.scheduled,
        unplaced=pod.unplaced is not None,
        avoids=pod.avoids,
        waiting=pod.main.waiting,
        preparing=pod.main.preparing,
        prepared_at=pod.main.prepared_at,
        unreachable_since=pod.unreachable_since,
        reachable_since=pod.reachable_since,
        finalizers=pod.finalizers,
        disrupted=pod.disrupted,
    )


def _deletion(pod: PodRecord) -> Deletion | None:
    return None if pod.deleted_at is None else Deletion(since=pod.deleted_at, grace_s=pod.grace_s)


def phase_of(pod: PodRecord) -> WorkerPhase:
    """Return the phase of a pod by its main container."""
    if pod.main.outcome is not None:
        return WorkerPhase.SUCCEEDED if pod.main.outcome.code == 0 else WorkerPhase.FAILED
    return WorkerPhase.RUNNING if pod.main.running else WorkerPhase.PENDING


def _hub(pods: list[PodRecord]) -> HubState | None:
    if not pods:
        return None
    pod = pods[0]
    phase = HubPhase.READY if pod.ready else HubPhase.STARTING
    if pod.phase in {"Succeeded", "Failed"}:  # its container is started again in place; this pod has lost its node
        phase = HubPhase.ENDED
    return HubState(
        phase=phase,
        starts=pod.starts,
        ended_at=pod.main.finished_at,
        deleting=pod.deleted_at is not None,
        deletion=_deletion(pod),
        waiting=_hub_waits(pod),
    )


def _hub_waits(pod: PodRecord) -> str | None:
    """Return why a hub does not start, without the name of its only container; None if it runs."""
    if pod.unplaced is not None:
        return f"Unschedulable: {pod.unplaced}"[:MAX_WAITING]
    return None if pod.main.waiting is None else pod.main.waiting.partition(": ")[2][:MAX_WAITING]


def _init(pods: list[PodRecord]) -> InitPod | None:
    if not pods:
        return None
    pod = pods[0]
    outcome = pod.main.outcome
    ended = {"Succeeded": WorkerPhase.SUCCEEDED, "Failed": WorkerPhase.FAILED}
    begun = [at for at in (pod.scheduled_at, pod.main.prepared_at) if at is not None]
    return InitPod(
        phase=ended.get(pod.phase, phase_of(pod)),
        message=(outcome.message or outcome.reason) if outcome is not None else pod.main.waiting or pod.unplaced or "",
        created_at=pod.created_at,
        begun_at=max(begun, default=None),
        finished_at=pod.main.finished_at,
        deleting=pod.deleted_at is not None,
        scheduled=pod.scheduled,
        preparing=pod.main.preparing,
        disrupted=pod.disrupted,
        unreachable_since=pod.unreachable_since,
    )
