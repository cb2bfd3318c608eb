"""The progress document of the reporting rank, which the interface passes on as it is."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from megatronapp_common.web.models import ApiModel


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""Number for JSON, which has no NaN and no Inf, as a loss may well become: they are null."""
MAX_BYTES = (1 << 53) - 1
"""Largest number of bytes; JSON readers differ about larger integers."""
ShipMode = Literal["saved", "selective", "full"]
"""Saved tensors that MegaFBD ships: all of them, or those that selective or full recomputation keeps."""


class PipelinePlan(ApiModel):
    """Plan of MegaDPP for the steps of one batch size, of the pipeline of the reporting rank."""

    model_config = ConfigDict(extra="ignore")

    from_step: Annotated[int, Field(description="First step under it, counted from 0.")]
    schedule: Annotated[str, Field(description="Value of dpp.schedule.")]
    plan: Annotated[str, Field(description="Order of the passes in words.")]
    microbatches: int = 0
    chunks: Annotated[int, Field(description="Model chunks of each rank.")] = 1
    cap_chunks: Annotated[int, Field(description="Most chunks whose activations a rank keeps at a time.")] = 0
    spare_chunks: Annotated[int, Field(description="Chunks of these beyond what the order alone needs.")] = 0
    chosen: Annotated[bool, Field(description="Whether measured times have decided on it.")] = False
    simulated_seconds: Annotated[FiniteOrNone, Field(description="Simulated length of the passes of a step.")] = None
    simulated_bubble: Annotated[
        FiniteOrNone, Field(description="Share of that in which a rank waits, mean over the ranks.")
    ] = None
    static_seconds: Annotated[FiniteOrNone, Field(description="Simulated length under the static order.")] = None
    static_bubble: Annotated[FiniteOrNone, Field(description="Share of that in which a rank waits.")] = None
    measured_seconds: Annotated[FiniteOrNone, Field(description="Median length in the first steps under it.")] = None


class ShipModeCost(ApiModel):
    """Cost of a mode of shipping of MegaFBD."""

    model_config = ConfigDict(extra="ignore")

    ship: Annotated[ShipMode, Field(description="Value of fbd.ship.")]
    ship_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES, description="Bytes of the saved tensors of a microbatch.")] = 0
    step_seconds: Annotated[FiniteOrNone, Field(description="Measured length of a step in this mode.")] = None


class ForwardBackward(ApiModel):
    """State of MegaFBD as the reporting rank publishes it. Times are means over microbatches."""

    model_config = ConfigDict(extra="ignore")

    from_step: Annotated[int, Field(ge=0, description="First step in this mode, counted from 0.")]
    ship: Annotated[ShipMode, Field(description="Mode of shipping in force; value of fbd.ship.")]
    chosen: Annotated[bool, Field(description="Whether the ranks chose the mode by measured times.")] = False
    merged: Annotated[bool, Field(description="Whether one forward rank serves a whole tensor group.")] = False
    backward_per_forward: Annotated[
        int, Field(ge=1, description="Replicas of backward ranks that a forward rank serves in turns.")
    ] = 1
    ship_bytes: Annotated[
        int,
        Field(
            ge=0, le=MAX_BYTES, description="Bytes of a microbatch's saved tensors, from a forward to a backward rank."
        ),
    ] = 0
    forward_seconds: Annotated[FiniteOrNone, Field(description="Length of a forward pass.")] = None
    backward_seconds: Annotated[
        FiniteOrNone, Field(description="Length of a backward pass, weight gradients included.")
    ] = None
    ship_seconds: Annotated[FiniteOrNone, Field(description="Time to ship the tensors of a microbatch.")] = None
    modes: Annotated[list[ShipModeCost], Field(description="Modes and their costs.")] = Field(default_factory=list)
    advised_backward_per_forward: Annotated[
        int | None, Field(description="Value of fbd.backwardPerForward that the measured times suggest.")
    ] = None
    advice: Annotated[str | None, Field(description="The advice in words.")] = None


class DecidedOrder(ApiModel):
    """An order that all ranks have decided on, at the same step boundary."""

    model_config = ConfigDict(extra="ignore")

    number: Annotated[int, Field(description="0: given by rank 0 itself, as no client controlled the training.")]
    step: Annotated[int, Field(ge=0, description="Steps done when it took effect.")]
    refusal: Annotated[str | None, Field(description="Reason why it has no effect.")] = None


class PerturbedSteps(ApiModel):
    """Consecutive steps that were computed with a perturbation."""

    model_config = ConfigDict(extra="ignore")

    digest: str
    parameters: str | None = None
    replica: int | None = None
    first_step: int
    last_step: int | None = None


class ControlProgress(ApiModel):
    """State of a training that obeys orders, as the reporting rank publishes it."""

    model_config = ConfigDict(extra="ignore")

    state: Annotated[
        Literal["running", "paused", "stepping", "stopping"], Field(description="State at the newest step boundary.")
    ]
    steps_left: Annotated[int, Field(ge=0, description="Steps of a step order that are left.")] = 0
    paused_since: Annotated[str | None, Field(description="RFC 3339; null outside of a pause.")] = None
    paused_seconds: Annotated[float, Field(description="Length of the earlier pauses of this attempt.")] = 0.0
    saves: Annotated[bool, Field(description="Whether a stop can write a checkpoint.")] = False
    resume_after_seconds: Annotated[
        float | None, Field(description="Length after which a pause ends in which no client controls the training.")
    ] = None
    capture_every: Annotated[int | None, Field(description="Steps from one capture to the next; null: none.")] = None
    perturbation: Annotated[str | None, Field(description="Digest of the recipe in force; null: none is.")] = None
    perturbed: Annotated[list[PerturbedSteps], Field(description="Steps that were perturbed, the newest 8.")] = Field(
        default_factory=list
    )
    orders: Annotated[list[DecidedOrder], Field(description="The newest 8, oldest first.")] = Field(
        default_factory=list
    )


class ExpertLayer(ApiModel):
    """Load of the experts of a layer in the newest step."""

    model_config = ConfigDict(extra="ignore")

    layer: Annotated[int, Field(ge=0, description="Layer of the model, counted from 0.")]
    load: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(max_length=4096, description="Tokens of each expert over the mean of the layer, in thousandths."),
    ]


class ExpertsProgress(ApiModel):
    """Mixture of experts in the newest step, over all ranks."""

    model_config = ConfigDict(extra="ignore")

    losses: Annotated[
        dict[str, FiniteOrNone], Field(description="Mean of each loss of the routers, without its coefficient.")
    ] = Field(default_factory=dict)
    dropped: Annotated[FiniteOrNone, Field(description="Share of the choices that had no place in an expert.")] = None
    imbalance: Annotated[FiniteOrNone, Field(description="Largest load over the mean of its layer.")] = None
    layers: Annotated[
        list[ExpertLayer], Field(description="Layers with experts; of large models those with the largest load.")
    ] = Field(default_factory=list)


class MemoryCheckpointProgress(ApiModel):
    """Checkpoints of the newest attempt in the memory of workers, as the reporting rank sees them."""

    model_config = ConfigDict(extra="ignore")

    iteration: Annotated[int | None, Field(description="Newest step that is saved, with its copies.")] = None
    resumed_iteration: Annotated[
        int | None, Field(description="Step in memory that the attempt was resumed from; null: none.")
    ] = None
    blocked_seconds: Annotated[
        FiniteOrNone, Field(description="Time for which training waited for the newest save.")
    ] = None
    write_seconds: Annotated[
        FiniteOrNone, Field(description="Time from its begin until its copies were sent and received.")
    ] = None
    bytes: Annotated[int | None, Field(ge=0, le=MAX_BYTES, description="Size of the state of the rank.")] = None
    last_failure: Annotated[str | None, Field(description="Reason why saves have ended, if they have.")] = None


class CheckpointProgress(ApiModel):
    """Checkpoints of the newest attempt."""

    model_config = ConfigDict(extra="ignore")

    iteration: Annotated[int | None, Field(description="Newest step whose checkpoint is on the disk.")] = None
    taken_at: Annotated[str | None, Field(description="When the state of that step was taken, RFC 3339.")] = None
    pending_iteration: Annotated[int | None, Field(description="Step whose checkpoint is being written.")] = None
    blocked_seconds: Annotated[
        FiniteOrNone, Field(description="Time for which training waited for the newest checkpoint.")
    ] = None
    write_seconds: Annotated[FiniteOrNone, Field(description="Time from its begin until it was on the disk.")] = None
    failures: Annotated[int, Field(ge=0, description="Failed writes of the attempt, which were tried again.")] = 0
    last_failure: Annotated[str | None, Field(description="Reason of the newest of them.")] = None
    memory: Annotated[
        MemoryCheckpointProgress | None, Field(description="Checkpoints in memory; null: there are none.")
    ] = None


def _checkpoint_or_none(value: object) -> object:
    """Return the state of checkpoints, or None for one of another shape: the rest of the progress is right."""
    try:
        return None if value is None else CheckpointProgress.model_validate(value)
    except ValidationError:
        return None


def _experts_or_none(value: object) -> object:
    """Return the state of the experts, or None for one of another shape: the rest of the progress is right."""
    try:
        return None if value is None else ExpertsProgress.model_validate(value)
    except ValidationError:
        return None


def _control_or_none(value: object) -> object:
    """Return the state of the control, or None for one of another shape: the rest of the progress is right."""
    try:
        return None if value is None else ControlProgress.model_validate(value)
    except ValidationError:
        return None


def _forward_backward_or_none(value: object) -> object:
    """Return the state of MegaFBD, or None for one of another shape: the rest of the progress is right."""
    try:
        return None if value is None else ForwardBackward.model_validate(value)
    except ValidationError:
        return None


def _losses_or_none(value: object) -> object:
    """Return losses by name, or none of another shape: the rest of the progress is right."""
    named = value if isinstance(value, dict) else {}
    return {name: loss for name, loss in named.items() if isinstance(loss, int | float | None)}


class Progress(ApiModel):
    """The progress document of the reporting rank."""

    model_config = ConfigDict(extra="ignore")

    attempt: int | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    loss: FiniteOrNone = None
    learning_rate: FiniteOrNone = None
    grad_norm: FiniteOrNone = None
    tokens_per_second: FiniteOrNone = None
    tflops_per_gpu: FiniteOrNone = None
    mfu: Annotated[
        FiniteOrNone, Field(description="tflopsPerGpu as a share of the device's peak, where it is known.")
    ] = None
    seconds_left: FiniteOrNone = None
    consumed_samples: int | None = None
    validation_loss: FiniteOrNone = None
    source_losses: Annotated[
        dict[str, FiniteOrNone],
        BeforeValidator(_losses_or_none),
        Field(description="Loss of each corpus of the newest step, with --log-loss-per-source."),
    ] = Field(default_factory=dict)
    validation_losses: Annotated[
        dict[str, FiniteOrNone],
        BeforeValidator(_losses_or_none),
        Field(description="Loss of each of several validation sets in the newest evaluation."),
    ] = Field(default_factory=dict)
    state: str | None = None
    updated_at: Annotated[str | None, Field(description="Real time of the report, RFC 3339.")] = None
    plans: Annotated[
        list[PipelinePlan], Field(description="Plans of MegaDPP, the newest 8, oldest first; the last is in force.")
    ] = Field(default_factory=list)
    forward_backward: Annotated[
        ForwardBackward | None,
        BeforeValidator(_forward_backward_or_none),
        Field(description="State of MegaFBD; null without it."),
    ] = None
    experts: Annotated[
        ExpertsProgress | None,
        BeforeValidator(_experts_or_none),
        Field(description="Load of the experts; null for models without any."),
    ] = None
    checkpoint: Annotated[
        CheckpointProgress | None,
        BeforeValidator(_checkpoint_or_none),
        Field(description="State of the checkpoints; null before the first."),
    ] = None
    control: Annotated[
        ControlProgress | None,
        BeforeValidator(_control_or_none),
        Field(description="State of a training that obeys orders; null for others."),
    ] = None
