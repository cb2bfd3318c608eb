"""Types of the progress that the status holds, as the reporting rank publishes it, and of the time that it took."""

import dataclasses
import enum
from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.status_fields import (
    CONFIG,
    TEXT,
    Count,
    Flag,
    OptionalText,
    Size,
    StatusType,
    Time,
    WholeTime,
    is_falsy,
    requires,
)

STARTING = "starting"
"""State of a progress document while the ranks have not begun to train."""
PAUSED = "paused"
"""State of a progress document while the ranks wait for an order."""
ProgressState = Literal["starting", "training", "evaluating", "saving", "paused", "done", "serving"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan(StatusType):
    """Plan of MegaDPP for the steps of one batch size; times are those of the pipeline of the reporting rank."""

    __pydantic_config__ = CONFIG | requires("fromStep", "schedule", "plan")

    from_step: Count
    """First step under it, counted from 0."""
    schedule: str
    """Value of dpp.schedule."""
    plan: str
    """Order of the passes in words."""
    microbatches: Count = 0
    """Microbatches of a step."""
    chunks: Count = 1
    """Model chunks of each rank."""
    cap_chunks: Count = 0
    """Most chunks whose activations a rank keeps at a time."""
    spare_chunks: Count = 0
    """Chunks of these beyond what the order alone needs."""
    chosen: Flag = False
    """True if measured times have decided on it."""
    simulated_seconds: float | None = None
    """Simulated length of the passes of a step."""
    simulated_bubble: float | None = None
    """Share of that in which a rank waits, mean over the ranks, 0 to 1."""
    static_seconds: float | None = None
    """Simulated length under the static order."""
    static_bubble: float | None = None
    """Share of that in which a rank waits, 0 to 1."""
    measured_seconds: float | None = None
    """Median length in the first steps under it."""


ShipMode = Literal["saved", "selective", "full"]
"""Saved tensors that MegaFBD ships: all of them, or those that selective or full recomputation keeps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShipModeCost(StatusType):
    """Cost of a mode of shipping that MegaFBD has tried or knows the size of."""

    __pydantic_config__ = CONFIG | requires("ship")

    ship: ShipMode
    """Value of fbd.ship."""
    ship_bytes: Size = 0
    """Bytes of the saved tensors of a microbatch, from a forward rank to a backward rank."""
    step_seconds: float | None = None
    """Measured length of a step in this mode."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward(StatusType):
    """State of MegaFBD as the reporting rank publishes it. Times are means over microbatches."""

    __pydantic_config__ = CONFIG | requires("fromStep", "ship")

    from_step: Count
    """First step in this mode, counted from 0."""
    ship: ShipMode
    """Mode of shipping in force."""
    chosen: Flag = False
    """True if the ranks chose the mode by measured times."""
    merged: Flag = False
    """True if one forward rank serves a whole tensor group."""
    backward_per_forward: Count = 1
    """Replicas of backward ranks that a forward rank serves in turns."""
    ship_bytes: Size = 0
    """Bytes of the saved tensors of a microbatch, from a forward rank to a backward rank."""
    forward_seconds: float | None = None
    """Length of a forward pass."""
    backward_seconds: float | None = None
    """Length of a backward pass, weight gradients included."""
    ship_seconds: float | None = None
    """Time to ship the saved tensors of a microbatch."""
    modes: Annotated[tuple[ShipModeCost, ...], Field(exclude_if=is_falsy)] = ()
    """Modes and their costs."""
    advised_backward_per_forward: Count | None = None
    """Value of fbd.backwardPerForward that the measured times suggest."""
    advice: OptionalText = None
    """The advice in words."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress(StatusType):
    """Progress of the training, from its progress document. Absent values are null."""

    __pydantic_config__ = CONFIG | requires()

    attempt: int = 0
    """Attempt that reported."""
    iteration: int
    """Number of finished steps; for a served model, of answered prompts."""
    total_iterations: int | None = None
    """Steps of the whole training."""
    loss: float | None = None
    """Loss of the newest step."""
    learning_rate: float | None = None
    """Learning rate of the newest step."""
    grad_norm: float | None = None
    """Norm of all gradients of the newest step."""
    tokens_per_second: float | None = None
    """Throughput over all ranks."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s of each rank as Megatron-LM counts them: half of the attention, no recomputation."""
    seconds_left: float | None = None
    """Estimated time to the end."""
    consumed_samples: int | None = None
    """Number of samples consumed."""
    validation_loss: float | None = None
    """Loss of the newest evaluation."""
    state: ProgressState = "training"
    """Activity of the ranks."""
    checkpoint_iteration: int | None = None
    """Step of the newest checkpoint of this attempt."""
    checkpoint_time: WholeTime | None = None
    """When its state was taken."""
    updated_at: WholeTime | None = None
    """Real time of the report, RFC 3339."""
    plans: Annotated[tuple[PipelinePlan, ...], Field(exclude_if=is_falsy)] = ()
    """Plans of MegaDPP, the newest 8, oldest first; the last one is in force."""
    forward_backward: ForwardBackward | None = None
    """Mode, ratio and times of MegaFBD; absent without it."""


class TimeUse(enum.StrEnum):
    """Uses of time; the values name fields of `TimeSpent`."""

    TRAINED = "trained"
    """Steps that were kept."""
    QUEUEING = "queueing"
    """Waiting for nodes."""
    STARTING = "starting"
    """From the nodes of the first gang to its first step."""
    FAILURES = "failures"
    """Steps that were lost, and the time until a failure was found."""
    RESTARTS = "restarts"
    """From a failure until the next gang trains: ends, back-off, gathering, loading."""
    SLOW = "slow"
    """Cost of slow ranks in steps that were kept, by the verdicts of the hub."""
    CHECKPOINTS = "checkpoints"
    """Waiting for checkpoints."""
    SUSPENDED = "suspended"
    """Suspended or paused by a user."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangSize(StatusType):
    """Size of the gang with runPolicy.elastic, since it first changed."""

    data: Count
    """Model replicas."""
    since_attempt: Count
    """First attempt with this size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent(StatusType):
    """Seconds by use, and what is needed to continue counting them."""

    since: Time
    """Time up to which everything is counted."""
    use: Annotated[TimeUse | None, TEXT] = None
    """Use of the time since then; absent: the job has ended."""
    attempt: int = -1
    """Attempt whose steps were counted last."""
    iteration: Count = 0
    """Newest step that was counted."""
    steps: Count = 0
    """Steps of this attempt that were counted."""
    step_seconds: float = 0.0
    """Seconds of these steps."""
    trained: float = 0.0
    queueing: float = 0.0
    starting: float = 0.0
    failures: float = 0.0
    restarts: float = 0.0
    slow: float = 0.0
    checkpoints: float = 0.0
    suspended: float = 0.0
    spares: Count = 0
    """Spares that hold a node since `sparesSince`."""
    spares_since: Time | None = None
    """Time up to which spares are counted."""
    spare_seconds: float = 0.0
    """Sum over spares of the time for which each held a node without training."""
    spare_gpu_seconds: float = 0.0
    """The same for each of their GPUs."""
    absent: Count = 0
    """Workers that the gang has trained without since `absentSince` (runPolicy.elastic)."""
    absent_since: Time | None = None
    """Time up to which they are counted."""
    absent_seconds: float = 0.0
    """Sum over them of the time for which the gang ran without each."""
    absent_gpu_seconds: float = 0.0
    """The same for each of their GPUs."""

    def seconds(self) -> dict[TimeUse, float]:
        """Return the seconds of each use."""
        return {use: getattr(self, use.value) for use in TimeUse}

    @property
    def ratio(self) -> float | None:
        """Effective training time ratio, from 0 to 1; None: no time has passed."""
        total = sum(self.seconds().values())
        return self.trained / total if total > 0 else None
