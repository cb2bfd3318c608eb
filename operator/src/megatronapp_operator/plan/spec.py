"""The part of a job's spec that the plan reads."""

import dataclasses
import enum

from megatronapp_common.job import WorkerGroup
from megatronapp_common.job.api.status import FailureAction, Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pause before a restart: initial_s * factor ** (restarts - 1) seconds, at most max_s."""

    initial_s: float = 10.0
    max_s: float = 600.0
    factor: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureMatch:
    """Criteria that a rule has for the first failed worker.

    All given ones must hold; without any the rule always matches.
    """

    exit_codes: tuple[int, ...] = ()
    not_exit_codes: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    message_regex: str | None = None
    """RE2 expression, searched in the message. An invalid one matches nothing."""
    condition_types: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """Action for failures that match."""

    match: FailureMatch
    action: FailureAction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeExclusion:
    """Limits of the list of nodes that a job avoids."""

    enabled: bool = True
    max_nodes: int = 5
    """Length of the list. A full one takes no more slow nodes, so that one job cannot exclude a cluster, and restarts
    for slow nodes are bounded."""
    ttl_s: float = 86400.0
    allowed: frozenset[str] = frozenset()
    """Nodes that are never avoided."""


class SlowNodeAction(enum.StrEnum):
    """Action about a node that is confirmed to be slow."""

    REPORT = "Report"
    EXCLUDE = "Exclude"
    """The next attempt avoids the node."""
    EXCLUDE_AND_RESTART = "ExcludeAndRestart"
    """The gang saves and restarts without the node."""
    SWAP_AT_CHECKPOINT = "SwapAtCheckpoint"
    """The gang ends with its next checkpoint and restarts with a spare in place of the node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowNodePolicy:
    """Criteria of a verdict that triggers the action."""

    action: SlowNodeAction = SlowNodeAction.REPORT
    min_slowdown: float = 1.1
    min_s: float = 120.0
    """Seconds for which the verdict must last."""


class Disruption(enum.StrEnum):
    """Evictions of a gang that drains and autoscalers may make."""

    ALLOW = "Allow"
    PROTECT = "Protect"
    """None while the gang exists."""
    CHECKPOINT_FIRST = "CheckpointFirst"
    """Any while little would be lost: the newest checkpoint is young, or the attempt has just begun."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSize:
    """A size that the gang may have."""

    data: int
    """Model replicas."""
    worker_groups: tuple[WorkerGroup, ...]
    """Their workers."""

    @property
    def workers(self) -> int:
        """Number of workers in all groups."""
        return sum(group.nodes for group in self.worker_groups)

    def scaled(self, data: int) -> "ElasticSize":
        """Return the size with another number of replicas, which must fill whole workers."""
        groups = (dataclasses.replace(group, nodes=group.nodes * data // self.data) for group in self.worker_groups)
        return ElasticSize(data=data, worker_groups=tuple(groups))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Sizes that the gang may have: that of the job's spec, and smaller ones while nodes are missing."""

    full: ElasticSize
    smaller: tuple[ElasticSize, ...] = ()
    """Largest first; a change of the spec may forbid the size of an attempt that has begun."""
    patience_s: float = 300.0
    """Seconds for which a worker has no node until the gang gets smaller."""

    def current(self, status: Status) -> ElasticSize:
        """Return the size of the current attempt."""
        data = self.full.data if status.gang_size is None else status.gang_size.data
        fits = 0 < data < self.full.data and self.full.workers * data % self.full.data == 0
        return self.full.scaled(data) if fits else self.full


class SuccessPolicy(enum.StrEnum):
    """Workers whose success completes the job."""

    ALL_WORKERS = "AllWorkers"
    RANK0 = "Rank0"
    """Only the worker with rank 0; the others are stopped then."""


class CleanPodPolicy(enum.StrEnum):
    """Workers whose pods are deleted after the end of the job; none runs by then."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Limits of a job. A deadline of None never ends."""

    max_restarts: int = 3
    """Restarts before the job fails; preemptions do not count."""
    in_place: bool = False
    """Restart workers in their pods where nothing is wrong with these."""
    spares: int = 0
    """Workers beyond the gang that wait to take the places of workers whose pods are at fault."""
    disruption: Disruption = Disruption.ALLOW
    """Evictions that the cluster may make."""
    checkpoint_age_s: float = 300.0
    """Seconds up to which a checkpoint is young, for `Disruption.CHECKPOINT_FIRST`."""
    rejoin_s: float = 60.0
    """Seconds that a launcher has to join the next attempt after the time for its ranks to end."""
    backoff: Backoff = dataclasses.field(default_factory=Backoff)
    reset_after_s: float = 3600.0
    """Length of a healthy run after which the budget is whole again."""
    active_deadline_s: float | None = None
    """Seconds from the first start of the job to its end."""
    start_deadline_s: float | None = None
    """Seconds from the creation of a gang until all its workers have nodes, and from then until all run."""
    progress_deadline_s: float | None = None
    """Seconds without a new iteration after which the gang is restarted."""
    unheard_s: float = 3600.0
    """Seconds beyond the deadline for which a gang continues while its progress is not known (see `deadlines`)."""
    grace_s: float = 30.0
    """Seconds for a checkpoint when a healthy worker is stopped."""
    failed_grace_s: float = 5.0
    """Seconds to stop after a peer has failed, when no checkpoint can be agreed any more."""
    settle_s: float = 5.0
    """Seconds to wait for the true culprit when the only known failures are lost peers."""
    silent_s: float = 60.0
    """Seconds to wait if a worker on another node is silent while its peers have lost it: a cluster takes this long to
    notice a lost node (50 s since Kubernetes 1.32)."""
    silent_start_s: float = 300.0
    """Seconds without any progress after which a gang that has gathered is assumed to train: its progress document may
    be missing (shared memory is full), and training works without it."""
    lost_worker_s: float = 300.0
    """Seconds after which a worker that has not ended is removed by force."""
    rules: tuple[FailureRule, ...] = ()
    """Rules of the user, in order; the built-in ones follow."""
    exclusion: NodeExclusion = dataclasses.field(default_factory=NodeExclusion)
    clean: CleanPodPolicy = CleanPodPolicy.RUNNING
    ttl_s: float | None = None
    """Seconds after its end at which the job object is deleted; None: never."""


class PodGroupKey(enum.StrEnum):
    """Kind of object by which the scheduler of a gang recognises it."""

    NONE = "None"
    POD_GROUP = "PodGroup"
    """One object for each attempt, created by the operator."""
    WORKLOAD = "Workload"
    """Created by Kueue from the pods, which it keeps by a finalizer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The part of a MegatronJob's metadata and spec that the plan reads."""

    name: str
    uid: str
    worker_groups: tuple[WorkerGroup, ...]
    """Groups of workers, numbered on from one group to the next; all together are the gang."""
    generation: int = 1
    hub: bool = True
    hub_retain_s: float = 0.0
    """Seconds for which the hub stays after the end of the job."""
    suspend: bool = False
    serves: bool = False
    """True if the job serves a model, and so never completes by itself."""
    initializers: bool = False
    """True if an initializer pod must succeed before the first gang."""
    gang: bool = False
    """True if a queue or gang scheduler places all workers together, however long that takes."""
    group: PodGroupKey = PodGroupKey.NONE
    success: SuccessPolicy = SuccessPolicy.ALL_WORKERS
    rank_zero: int | None = 0
    """Worker that holds rank 0; None: known only after the gang has gathered."""
    template: str = ""
    """Digest of the template of a worker made now; empty: not used."""
    elastic: Elastic | None = None
    """Sizes of the gang; None: it has that of its groups only."""
    slow_node: SlowNodePolicy = dataclasses.field(default_factory=SlowNodePolicy)
    policy: RunPolicy = dataclasses.field(default_factory=RunPolicy)

    def at(self, status: Status) -> "JobSpec":
        """Return the spec with the workers of the current attempt."""
        if self.elastic is None or status.gang_size is None:
            return self
        return dataclasses.replace(self, worker_groups=self.elastic.current(status).worker_groups)

    @property
    def absent_workers(self) -> int:
        """Number of workers that the gang lacks for its full size."""
        return 0 if self.elastic is None else self.elastic.full.workers - self.workers

    @property
    def workers(self) -> int:
        """Number of workers in all groups."""
        return sum(group.nodes for group in self.worker_groups)

    @property
    def workers_text(self) -> str:
        """Number of workers with its noun, such as "3 workers"."""
        return "1 worker" if self.workers == 1 else f"{self.workers} workers"

    @property
    def all_workers_text(self) -> str:
        """All workers as the subject of a sentence, such as "all 3 workers"."""
        return "the only worker" if self.workers == 1 else f"all {self.workers} workers"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Request of a user to end the job now, such as Ctrl-C in its terminal. Without the request it continues."""

    reason: str
    message: str
    force: bool = False
    """Stop without time for a checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job and the status that the last plan gave it; the only memory between two plans."""

    spec: JobSpec
    status: Status = dataclasses.field(default_factory=Status)
    deletion_requested: bool = False
    stop: StopRequest | None = None
