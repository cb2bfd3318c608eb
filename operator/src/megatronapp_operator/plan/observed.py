"""What a backend sees of a job. Times are seconds since the epoch."""

import dataclasses
import enum
from collections.abc import Set as AbstractSet


class WorkerPhase(enum.StrEnum):
    """Life of a worker, named as for pods."""

    PENDING = "Pending"
    """Created; its ranks do not run yet."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


LIVE_PHASES = frozenset({WorkerPhase.PENDING, WorkerPhase.RUNNING})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcome:
    """How a worker ended: the launcher's record, or what the backend makes of its exit status."""

    code: int
    reason: str = ""
    message: str = ""
    rank: int | None = None
    signal: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """The worker was asked to go."""

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
    """Machine that it was placed on."""
    uid: str = ""
    """Of this pod; a later one of the same name has another. Empty where names are never used again."""
    occupies: bool = False
    """Whether something of it still holds a machine after its trainer has ended."""
    scheduled: bool = True
    """Whether it has a machine."""
    unplaced: bool = False
    """Whether a scheduler has looked for one and found none."""
    avoids: frozenset[str] = frozenset()
    """Machines that it was made to avoid: a list that has changed since does not change a worker."""
    waiting: str | None = None
    """Why its container does not start, such as ImagePullBackOff with the message."""
    preparing: bool = False
    """Whether an initializer of its own runs: it has begun, however long it takes until its ranks do."""
    prepared_at: float | None = None
    """When the last of them ended."""
    unreachable_since: float | None = None
    """Since when nothing is heard of its machine; None: it is, or has no machine."""
    reachable_since: float | None = None
    """Since when something is heard of it, at least; None: always, as far as is known."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that keep it from going, once it was asked to."""
    disrupted: str | None = None
    """Why the cluster takes it away: reason of a DisruptionTarget condition, or Preempted, Evicted, NodeShutdown."""

    @property
    def live(self) -> bool:
        """Whether a process of it may still run."""
        return self.phase in LIVE_PHASES

    @property
    def taken(self) -> bool:
        """Whether somebody else than its own program ends it: the cluster, a hand, the loss of its machine."""
        return self.disrupted is not None or self.deletion is not None or self.unreachable_since is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitPod:
    """The pod that makes what the job shares, once, before any worker."""

    phase: WorkerPhase
    message: str = ""
    """How it ended, or why it does not start."""
    created_at: float | None = None
    finished_at: float | None = None
    deleting: bool = False
    scheduled: bool = True
    """Whether it has a machine."""
    preparing: bool = False
    """Whether one of several initializers runs already."""
    begun_at: float | None = None
    """When it got its machine, or the last of its initializers that have ended did so."""
    disrupted: str | None = None
    """As of a worker."""
    unreachable_since: float | None = None
    """As of a worker."""

    @property
    def live(self) -> bool:
        """Whether it may still run."""
        return self.phase in LIVE_PHASES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodRejection:
    """The API server refused a pod of an attempt, or something that must be there before it."""

    attempt: int
    final: bool
    """It can never be accepted: it is not valid, or pod security forbids it."""
    denied: bool = False
    """Something that may change denies it, such as an account that is missing or a policy of the cluster.
    Neither `final` nor `denied`: there is no room for it now (quota)."""
    reason: str
    """One CamelCase word for programs."""
    message: str


class HubPhase(enum.StrEnum):
    """Life of a hub."""

    STARTING = "Starting"
    READY = "Ready"
    ENDED = "Ended"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubState:
    """The job's hub."""

    phase: HubPhase
    starts: int = 1
    """How often it was started."""
    ended_at: float | None = None
    deleting: bool = False
    deletion: Deletion | None = None
    """Where it is known since when: on a machine that is gone a hub never ends by itself."""
    waiting: str | None = None
    """Why it does not start: one CamelCase word, and after a colon what more is known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Newest progress page of the job."""

    attempt: int
    iteration: int
    total_iterations: int | None = None
    state: str = "training"
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None
    seconds_left: float | None = None
    consumed_samples: int | None = None
    validation_loss: float | None = None
    updated_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A verdict of the hub, shortened for the status."""

    id: str
    subject: str
    """rank, link, worker, node or stage."""
    ranks: tuple[int, ...]
    cause: str
    state: str
    sentence: str
    since_step: int | None = None
    slowdown: float | None = None
    seconds_per_step: float | None = None
    worker: int | None = None
    node: str | None = None
    """Machine of the subject in the attempt that it was judged in."""
    since_attempt: int | None = None
    since_time: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlAction:
    """What somebody changed through the hub."""

    id: int
    """About the time in milliseconds since 1970. Grows, over restarts of the hub, too."""
    text: str
    """Who did what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTemplate:
    """What the workers of an attempt were made of."""

    attempt: int
    template: str
    """Digest, as in the job's spec."""
    generation: int = 0
    """Of the job's spec; 0: not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything of a job that exists now."""

    secret: bool = False
    hub: HubState | None = None
    workers: tuple[Worker, ...] = ()
    init: InitPod | None = None
    """The initializer pod; None: none exists."""
    attempt_template: AttemptTemplate | None = None
    rank_zero: int | None = None
    """Worker that holds rank 0 in the current attempt, by the table that its launchers agreed on."""
    groups_removed: AbstractSet[int] = frozenset()
    """Attempts whose pod groups are known to be removed, or must stay."""
    groups_refused: AbstractSet[int] = frozenset()
    """Attempts whose groups the operator may not remove; asked for again after some minutes."""
    volumes: str | None = None
    """What is wrong with the volume claims of the job; empty: nothing; None: nobody has looked."""
    refusal: PodRejection | None = None
    """Newest refusal; one of an older attempt says nothing any more."""
    since: float = 0.0
    """When this process began to look: before, nobody could have heard of progress."""
    last_contact: float | None = None
    """When somebody who knows of progress last answered; None: progress is always there to be read."""
    token_refused: tuple[str, ...] = ()
    """Which of hub and launcher answer that our token is not the job's: they live, and tell us nothing else."""
    unknown_key: str | None = None
    """Id of the installation key that the attempt was started with, where the backend does not have it any more."""
    missing: tuple[int, ...] = ()
    """Workers of the current attempt that have not come to the one that gathers them, as that one said last."""
    progress: Progress | None = None
    slow_ranks: tuple[SlowRank, ...] | None = None
    """What the hub says is slow; None: it says nothing (there is none, it starts, it was killed)."""
    hung_ranks: tuple[int, ...] | None = None
    """The same of ranks of the current attempt that hang."""
    full_shared_memory: tuple[str, ...] | None = None
    """Where shared memory has no room left, one sentence for each; None: nothing is known."""
    controls: tuple[ControlAction, ...] = ()
    """The newest that the hub has taken down, oldest first (by id)."""
    controls_spent: float = 0.0
    """When the turns that their events have used up will have come back; a backend that does not count gives all."""

    @property
    def locked(self) -> bool:
        """True if hub or launcher cannot be read without the job's key, which says nothing about the gang."""
        return bool(self.token_refused) or self.unknown_key is not None
