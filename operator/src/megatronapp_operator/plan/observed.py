"""State of a job as a backend observes it. Times are seconds since the epoch."""

import dataclasses
import enum
from collections.abc import Set as AbstractSet

from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.progress import Progress
from megatronapp_common.save_request import SaveRequest


class WorkerPhase(enum.StrEnum):
    """Phase of a worker, named as those of pods."""

    PENDING = "Pending"
    """Created; its ranks are not running yet."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


LIVE_PHASES = frozenset({WorkerPhase.PENDING, WorkerPhase.RUNNING})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcome:
    """How a worker ended: the record of the launcher, or the backend's reading of its exit status."""

    code: int
    reason: str = ""
    message: str = ""
    rank: int | None = None
    signal: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Request to stop a worker or a hub, with its time and its grace period in seconds."""

    since: float
    grace_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of one attempt: a pod, or a process group."""

    index: int
    attempt: int
    phase: WorkerPhase
    started_at: float | None = None
    finished_at: float | None = None
    outcome: WorkerOutcome | None = None
    deletion: Deletion | None = None
    node: str | None = None
    """Node that it was bound to."""
    uid: str = ""
    """UID of this pod; a later pod of the same name has another. Empty if the backend never reuses a name."""
    occupies: bool = False
    """True while a container still occupies the node after the trainer has ended."""
    scheduled: bool = True
    """True once the worker is bound to a node."""
    unplaced: bool = False
    """True if a scheduler has tried to place the worker and found no node."""
    avoids: frozenset[str] = frozenset()
    """Nodes that the worker was created to avoid; a later change of the list does not change the worker."""
    waiting: str | None = None
    """Why its container does not start, such as ImagePullBackOff with its message."""
    preparing: bool = False
    """True while one of its initializers runs: the worker has begun, however long it takes until its ranks run."""
    prepared_at: float | None = None
    """When the last of its initializers ended."""
    unreachable_since: float | None = None
    """Since when the kubelet of its node has not reported; None: it reports, or the worker has no node."""
    reachable_since: float | None = None
    """Since when at least the kubelet of its node has reported; None: always, as far as is known."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that keep a deleted worker from being removed."""
    disrupted: str | None = None
    """Why the cluster disrupts it: reason of a DisruptionTarget condition, or Preempted, Evicted, NodeShutdown."""
    standby: bool = False
    """True if its ranks have ended, as `outcome` says, and its launcher waits for the next attempt."""
    reusable: bool = False
    """True if its pod is as a pod of the next attempt would be, with a launcher that takes orders to restart."""
    name: str = ""
    """Name of its pod."""
    spare: bool = False
    """True for a spare, whose index follows those of the gang."""
    ends_at_checkpoint: bool = False
    """True if its ranks have the order to end with the next checkpoint of this attempt."""
    end_withdrawn: bool = False
    """True if they had that order, which was withdrawn, in time or not."""
    save_request: SaveRequest | None = None
    """Newest request to its ranks for a checkpoint of this attempt."""

    @property
    def live(self) -> bool:
        """True while one of its processes may run."""
        return self.phase in LIVE_PHASES or self.standby

    @property
    def ended(self) -> bool:
        """True once its ranks have ended."""
        return self.phase not in LIVE_PHASES

    @property
    def taken(self) -> bool:
        """True if something other than its program ends it: the cluster, a deletion, the loss of its node."""
        return self.disrupted is not None or self.deletion is not None or self.unreachable_since is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitPod:
    """Pod that prepares what the workers of a job have in common, once, before any of them."""

    phase: WorkerPhase
    message: str = ""
    """How it ended, or why it does not start."""
    created_at: float | None = None
    finished_at: float | None = None
    deleting: bool = False
    scheduled: bool = True
    """True once the pod is bound to a node."""
    preparing: bool = False
    """True while one of several initializers runs."""
    begun_at: float | None = None
    """When it was bound to a node, or when the last of its ended initializers ended."""
    disrupted: str | None = None
    """Why the cluster disrupts it, as for a worker."""
    unreachable_since: float | None = None
    """Since when the kubelet of its node has not reported, as for a worker."""

    @property
    def live(self) -> bool:
        """True while it may run."""
        return self.phase in LIVE_PHASES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodRejection:
    """Rejection by the API server of a pod of an attempt, or of an object that its pods need."""

    attempt: int
    final: bool
    """True if the object can never be accepted: it is not valid, or pod security forbids it."""
    denied: bool = False
    """True if a fixable cause denies it, such as a missing account or a policy of the cluster. With neither `final` nor
    `denied` there is no capacity for it now (quota)."""
    reason: str
    """One CamelCase term for programs."""
    message: str


class HubPhase(enum.StrEnum):
    """Phase of a hub."""

    STARTING = "Starting"
    READY = "Ready"
    ENDED = "Ended"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubState:
    """State of the job's hub."""

    phase: HubPhase
    starts: int = 1
    """Number of times that it was started."""
    ended_at: float | None = None
    deleting: bool = False
    deletion: Deletion | None = None
    """Deletion of the hub, if its time is known: on a lost node a deleted hub never ends by itself."""
    waiting: str | None = None
    """Why it does not start: a CamelCase reason, and after a colon the details."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlAction:
    """Change that a user made through the hub."""

    id: int
    """About the time in milliseconds since 1970. Ids rise, over restarts of the hub, too."""
    text: str
    """User and change, as one sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTemplate:
    """Template from which the workers of an attempt were made."""

    attempt: int
    template: str
    """Digest, the same as in the job's spec."""
    generation: int = 0
    """Generation of the job's spec; 0: not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileState:
    """State of the profiles that the job's spec is merged over."""

    reason: str
    """CamelCase term for programs."""
    message: str
    applied: bool
    """True if the spec is merged over them as it is."""
    attempt: int
    """Attempt for which the spec was merged: another one may have other profiles."""
    ready: bool
    """False: no attempt may begin."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavingNode:
    """Node that is to be emptied: evictions of its pods may wait."""

    name: str
    reason: str
    """How that is known, as the end of a sentence about the node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that exists of a job now."""

    secret: bool = False
    hub: HubState | None = None
    workers: tuple[Worker, ...] = ()
    spares: tuple[Worker, ...] = ()
    """Workers beyond the gang that wait until they take the place of one of it."""
    init: InitPod | None = None
    """The initializer pod; None: none exists."""
    attempt_template: AttemptTemplate | None = None
    rank_zero: int | None = None
    """Worker that holds rank 0 in the current attempt, by the rank table of its launchers."""
    groups_removed: AbstractSet[int] = frozenset()
    """Attempts whose pod groups are known to be removed, or must not be removed."""
    groups_refused: AbstractSet[int] = frozenset()
    """Attempts whose groups the operator lacks the right to remove; it tries again after some minutes."""
    disruption_budget: bool | None = None
    """True if the budget that refuses evictions exists, False if not; None: this process has not set or removed it."""
    budget_refusal: str = ""
    """Why the operator could not set the budget during the last minutes; empty: it was not refused."""
    leaving_nodes: tuple[LeavingNode, ...] = ()
    """Nodes of the gang that are to be emptied, as far as the backend may read nodes."""
    profile: ProfileState | None = None
    """None: no profile concerns the job."""
    volumes: str | None = None
    """Problems of the job's volume claims; empty: none; None: they were not checked."""
    refusal: PodRejection | None = None
    """Newest rejection; one of an older attempt is ignored."""
    since: float = 0.0
    """When this process began to observe: before that it could not receive progress."""
    last_contact: float | None = None
    """When a source of progress last answered; None: progress can always be read."""
    token_refused: tuple[str, ...] = ()
    """Which of hub and launcher reject our token as that of another job: they are alive, but cannot be read."""
    unknown_key: str | None = None
    """Id of the installation key that the attempt was started with, if the backend does not have it any more."""
    missing: tuple[int, ...] = ()
    """Workers of the current attempt that have not joined the rendezvous, by the last answer of worker 0."""
    launcher_attempt: int | None = None
    """Attempt that the launcher of worker 0 runs, by its last answer; None: it has not answered."""
    progress: Progress | None = None
    slow_ranks: tuple[SlowRank, ...] | None = None
    """Subjects that the hub reports as slow; None: no report (no hub, it is starting, or it was killed)."""
    hung_ranks: tuple[int, ...] | None = None
    """Ranks of the current attempt that the hub reports as hung; None: no report."""
    full_shared_memory: tuple[str, ...] | None = None
    """One sentence for each worker whose shared memory is full; None: not known."""
    controls: tuple[ControlAction, ...] = ()
    """Newest control actions that the hub has recorded, oldest first (by id)."""
    controls_spent: float = 0.0
    """When all tokens of the bucket for their Events are available again. A backend without a bucket leaves this at 0.
    """

    @property
    def pods(self) -> tuple[Worker, ...]:
        """All workers of the job, those that wait as spares included."""
        return (*self.workers, *self.spares)

    @property
    def locked(self) -> bool:
        """True if hub or launcher cannot be read without the job's key; this proves nothing about the gang."""
        return bool(self.token_refused) or self.unknown_key is not None
