"""What a backend sees of a job. Times are seconds since the epoch."""

import dataclasses
import enum


class WorkerPhase(enum.StrEnum):
    """Life of a worker, named as for pods."""

    PENDING = "Pending"
    """Created; its ranks do not run yet."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


LIVE_PHASES = frozenset({WorkerPhase.PENDING, WorkerPhase.RUNNING})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
    outcome: Outcome | None = None
    deletion: Deletion | None = None

    @property
    def live(self) -> bool:
        """Whether a process of it may still run."""
        return self.phase in LIVE_PHASES


class HubPhase(enum.StrEnum):
    """Life of a hub."""

    STARTING = "Starting"
    READY = "Ready"
    ENDED = "Ended"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The job's hub."""

    phase: HubPhase
    starts: int = 1
    """How often it was started."""
    ended_at: float | None = None
    deleting: bool = False


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything of a job that exists now."""

    secret: bool = False
    hub: Hub | None = None
    workers: tuple[Worker, ...] = ()
    progress: Progress | None = None
    slow_ranks: tuple[SlowRank, ...] | None = None
    """What the hub says is slow; None: it says nothing (there is none, it starts, it was killed)."""
    hung_ranks: tuple[int, ...] | None = None
    """The same of ranks of the current attempt that hang."""
