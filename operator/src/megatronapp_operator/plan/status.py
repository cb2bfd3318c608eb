"""Status of a job as the last plan determined it. Times are seconds since the epoch."""

import dataclasses
import enum

from megatronapp_operator.plan.observed import Progress, SlowRank, Worker

MAX_FAILURES = 10
"""Newest failures that a status keeps."""
STARTING = "starting"
"""State of a progress document while the ranks have not begun to train."""


class Phase(enum.StrEnum):
    """Summary for users and table columns; programs read the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    """The workers wait for a queue or a gang scheduler to place them."""
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


TERMINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class ConditionType(enum.StrEnum):
    """Types of conditions; names follow batch/v1 Job if it has one."""

    CREATED = "Created"
    INITIALIZED = "Initialized"
    VOLUMES_SHARED = "VolumesShared"
    """False: a volume claim is missing, or cannot be mounted by all workers."""
    PODS_SCHEDULED = "PodsScheduled"
    HUB_READY = "HubReady"
    """False: the hub does not start; the gang runs without it."""
    TOKEN_ACCEPTED = "TokenAccepted"
    """False: hub or launcher reject the token that the operator derives; they have the secret of another key."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SHARED_MEMORY_FULL = "SharedMemoryFull"
    """True: rings and documents of a worker may be missing, because its shared memory has no space for them."""
    STALLED = "Stalled"
    REMOVAL_BLOCKED = "RemovalBlocked"
    """True: workers were killed but not removed."""
    SLOW_NODE_DETECTED = "SlowNodeDetected"
    FAILURE_TARGET = "FailureTarget"
    """True: the job is going to fail and its workers are being stopped. Failed follows when none is left."""
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition in the style of metav1.Condition."""

    type: ConditionType
    status: bool
    reason: str
    message: str
    since: float
    """When `status` last changed."""
    generation: int


class FailureAction(enum.StrEnum):
    """Action of the plan about a failure."""

    FAIL_JOB = "FailJob"
    RESTART = "RestartJob"
    RESTART_IGNORE_MAX = "RestartJobIgnoreMax"
    EXCLUDE_AND_RESTART = "ExcludeNodeAndRestart"
    IGNORE = "Ignore"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended; recorded before anything is deleted."""

    time: float
    attempt: int
    reason: str
    message: str
    action: FailureAction
    worker: int | None = None
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode:
    """Node that gets no worker of this job for a while."""

    node: str
    reason: str
    until: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Workers of the current attempt, by phase."""

    desired: int = 0
    pending: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The only memory between two plans; counters are here and never in child objects, which can vanish."""

    phase: Phase = Phase.PENDING
    conditions: tuple[Condition, ...] = ()
    generation: int = 0
    attempt: int = 0
    """Number of the gang's life; each is used once."""
    restarts: int = 0
    restarts_towards_max: int = 0
    """Restarts that count against the budget; 0 again after a long healthy run."""
    start_time: float | None = None
    """Time of the first gang of the job, or of the first after it was suspended."""
    attempt_time: float | None = None
    """When the gang of this attempt was created."""
    holding_time: float | None = None
    """When the first worker of this attempt had a node; from then on the gang holds what others may wait for."""
    unplaced_time: float | None = None
    """Since when a scheduler finds no node for a worker of this attempt."""
    scheduled_time: float | None = None
    """When all workers of this attempt had a node."""
    running_time: float | None = None
    """When all workers of this attempt ran."""
    active_s: float = 0.0
    """Seconds for which earlier gangs held nodes, since the job was last resumed."""
    groups: tuple[int, ...] | None = None
    """Attempts whose pod groups may exist; None: the status was written by a release without this list."""
    last_restart_time: float | None = None
    completion_time: float | None = None
    released: int = 0
    """Number of gangs released before they were whole since one last ran or failed."""
    released_time: float | None = None
    denied_time: float | None = None
    """Since when the pods of a job that has never run are denied."""
    initialized: bool = False
    """True once the initializers of the job have succeeded."""
    init_restarts: int = 0
    """Number of restarts of the initializers."""
    init_failed_time: float | None = None
    """When the initializers last failed or were disrupted."""
    init_clearing: bool = False
    """True while the pod that failed is not known to be removed."""
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes that the next workers avoid, oldest first."""
    tolerated_nodes: tuple[ExcludedNode, ...] = ()
    """Slow nodes that are used until their time all the same: without them there was no capacity for the gang."""
    succeeded: tuple[int, ...] = ()
    """Workers of this attempt that were seen to succeed; their pods may be deleted."""
    rank_zero: int | None = None
    """Worker that holds rank 0 in this attempt, if the spec does not determine it."""
    ended: tuple[Worker, ...] = ()
    """First workers of this attempt that were seen to fail, most likely culprit first."""
    progress: Progress | None = None
    progress_time: float | None = None
    """When `progress` last changed, by our clock."""
    slow_ranks: tuple[SlowRank, ...] = ()
    slow_node: str | None = None
    """Label of the slow subject: a node, or "rank 3"."""
    hung_ranks: tuple[int, ...] = ()
    last_control: int | None = None
    """Id of the newest control action with an Event."""
    replicas: Replicas = dataclasses.field(default_factory=Replicas)
    failures: tuple[Failure, ...] = ()
    """The newest ten, oldest first."""

    @property
    def current_progress(self) -> Progress | None:
        """Progress of this attempt, if its ranks have reported any."""
        return self.progress if self.progress is not None and self.progress.attempt == self.attempt else None

    @property
    def trains(self) -> bool:
        """True once the ranks of this attempt have begun: groups, model and data are ready."""
        return self.current_progress is not None and self.current_progress.state != STARTING

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type, or None if it was never set."""
        return next((one for one in self.conditions if one.type is kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Return True if the condition is set and true."""
        found = self.condition(kind)
        return found is not None and found.status
