"""What the user wants, as far as the plan needs to know it."""

import dataclasses
import enum

from megatronapp_operator.plan.status import FailureAction, Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pause before a restart: initial_s * factor ** (restarts - 1), at most max_s."""

    initial_s: float = 10.0
    max_s: float = 600.0
    factor: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureMatch:
    """What a rule asks of the first failed worker; all that is given must hold, and nothing given holds always."""

    exit_codes: tuple[int, ...] = ()
    not_exit_codes: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    message_regex: str | None = None
    """Python's `re`, searched in the message. One that is no expression matches nothing."""
    condition_types: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """An action for failures that match."""

    match: FailureMatch
    action: FailureAction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeExclusion:
    """Limits of the list of machines that a job avoids."""

    enabled: bool = True
    max_nodes: int = 5
    """A full list takes no more, so that one job cannot exclude a cluster, and restarts for slow nodes are bounded."""
    ttl_s: float = 86400.0
    allowed: frozenset[str] = frozenset()
    """Machines that are never avoided, whatever is known of them."""


class SlowNodeAction(enum.StrEnum):
    """What follows from a machine that is confirmed to be slow."""

    REPORT = "Report"
    EXCLUDE = "Exclude"
    """The next attempt avoids it."""
    EXCLUDE_AND_RESTART = "ExcludeAndRestart"
    """The gang saves and starts again without it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowNodePolicy:
    """When a verdict of the hub is bad enough for its action."""

    action: SlowNodeAction = SlowNodeAction.REPORT
    min_slowdown: float = 1.1
    min_s: float = 120.0
    """It has stood for so long."""


class SuccessPolicy(enum.StrEnum):
    """Whose success is the success of the job."""

    ALL_WORKERS = "AllWorkers"
    RANK0 = "Rank0"
    """That of the worker with rank 0; the others are stopped then."""


class CleanPodPolicy(enum.StrEnum):
    """Which workers are removed after the end of the job; none runs by then."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Limits of a job. A deadline of None never ends."""

    max_restarts: int = 3
    """Restarts before the job fails; preemptions do not count."""
    backoff: Backoff = dataclasses.field(default_factory=Backoff)
    reset_after_s: float = 3600.0
    """After so long a healthy run the budget is whole again."""
    active_deadline_s: float | None = None
    """From the first start of the job to its end."""
    start_deadline_s: float | None = None
    """From the creation of a gang until all its workers have machines, and from then until all run."""
    progress_deadline_s: float | None = None
    """Without a new iteration for so long, the gang is restarted."""
    unheard_s: float = 3600.0
    """How much longer a gang whose progress nobody can be asked about goes on (see `deadlines`)."""
    grace_s: float = 30.0
    """Time for a checkpoint when a healthy worker is stopped."""
    failed_grace_s: float = 5.0
    """The same when a peer has failed: a checkpoint cannot be agreed any more."""
    settle_s: float = 5.0
    """How long to wait for the true culprit when all that is known is that somebody lost a peer."""
    silent_s: float = 60.0
    """The same where a worker on another machine says nothing while its peers have lost it: so long it takes until a
    cluster notices that a machine is gone (50 s since Kubernetes 1.32), and its pod is in the way until then."""
    silent_start_s: float = 300.0
    """How long a gang that has gathered may tell no progress at all before it is taken to train: its page may be
    missing (no room in shared memory), and training goes on without."""
    lost_worker_s: float = 300.0
    """A worker that is still there so long after it was asked to stop is removed by force."""
    rules: tuple[FailureRule, ...] = ()
    """The user's, asked in order before our own."""
    exclusion: NodeExclusion = dataclasses.field(default_factory=NodeExclusion)
    clean: CleanPodPolicy = CleanPodPolicy.RUNNING
    ttl_s: float | None = None
    """So long after its end the job object is deleted; None: never."""


class PodGroupKey(enum.StrEnum):
    """What the scheduler of a gang knows it by."""

    NONE = "None"
    POD_GROUP = "PodGroup"
    """An object of ours for each attempt."""
    WORKLOAD = "Workload"
    """An object that Kueue makes of the pods, which it holds by a finalizer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The part of a MegatronJob's metadata and spec that the plan reads."""

    name: str
    uid: str
    workers: int
    generation: int = 1
    hub: bool = True
    hub_retain_s: float = 0.0
    """How long the hub stays after the end of the job."""
    suspend: bool = False
    serves: bool = False
    """Whether it serves a model, and so never completes by itself."""
    initializers: bool = False
    """Whether an initializer pod must succeed before the first gang."""
    gang: bool = False
    """Whether a queue or gang scheduler places the workers all together, however long that takes."""
    group: PodGroupKey = PodGroupKey.NONE
    success: SuccessPolicy = SuccessPolicy.ALL_WORKERS
    rank_zero: int | None = 0
    """Worker that holds rank 0; None: that is known only once the gang has gathered."""
    template: str = ""
    """Digest of what a worker would be made of now; empty: nobody asks."""
    slow_node: SlowNodePolicy = dataclasses.field(default_factory=SlowNodePolicy)
    policy: RunPolicy = dataclasses.field(default_factory=RunPolicy)

    @property
    def workers_text(self) -> str:
        """The number of workers in words for people."""
        return "1 worker" if self.workers == 1 else f"{self.workers} workers"

    @property
    def all_workers_text(self) -> str:
        """The same as the subject of a sentence."""
        return "the only worker" if self.workers == 1 else f"all {self.workers} workers"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Somebody asked the job to end now, such as by Ctrl-C in front of it. Without this wish it goes on."""

    reason: str
    message: str
    force: bool = False
    """Without time for a checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job and the status that the last plan gave it; the only memory between two plans."""

    spec: JobSpec
    status: Status = dataclasses.field(default_factory=Status)
    deletion_requested: bool = False
    stop: StopRequest | None = None
