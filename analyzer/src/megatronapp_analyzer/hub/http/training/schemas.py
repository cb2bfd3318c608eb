"""Models of the control of a running training."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from megatronapp_common.control.orders import MAX_STEPS
from megatronapp_common.web.models import ApiModel

OrderKindName = Literal["pause", "resume", "step", "stop", "capture", "perturb", "undo"]
TargetName = Literal["model", "master"]
TrainingStateName = Literal["starting", "running", "pausing", "paused", "stepping", "stopping", "ended"]
KEY_LENGTH = 64
Key = Annotated[str, Field(min_length=1, max_length=KEY_LENGTH, pattern=r"^[A-Za-z0-9._-]+$")]


class LeaseView(ApiModel):
    """Client that controls the training."""

    who: Annotated[str, Field(description="User that the gateway names, otherwise `controller token`.")]
    client: Annotated[str, Field(description="Kind of client as the client names it, such as page.")]
    expires_at: Annotated[float, Field(description="Seconds of real time at which the control is free again.")]


class LeaseRequest(ApiModel):
    """Request for the control of the training."""

    model_config = ConfigDict(strict=True)

    action: Annotated[
        Literal["take", "renew", "release"],
        Field(description="renew at least every 30 s; after that any controller may take it."),
    ]
    key: Annotated[Key | None, Field(description="Key of the lease, for renew and release.")] = None
    client: Annotated[str, Field(min_length=1, max_length=40, description="Kind of client, for others to see.")] = (
        "program"
    )
    force: Annotated[bool, Field(description="Take the control from another client; an event of the job.")] = False

    @model_validator(mode="after")
    def _has_key(self) -> "LeaseRequest":
        if (self.key is None) != (self.action == "take"):
            raise ValueError("give key with renew and release, and only with them")
        if self.force and self.action != "take":
            raise ValueError("force belongs to take; leave it out")
        return self


class LeaseGrant(ApiModel):
    """The control of the training after a request."""

    key: Annotated[str | None, Field(description="To be sent with orders; null after a release.")]
    lease: LeaseView | None


class OrderRequest(ApiModel):
    """An order to the training."""

    model_config = ConfigDict(strict=True)

    lease: Annotated[Key, Field(description="Key of the lease.")]
    kind: OrderKindName
    steps: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_STEPS,
            description="Steps to run, for step; steps of perturbed activations, for perturb (null: until undo).",
        ),
    ] = None
    every: Annotated[
        int | None,
        Field(ge=0, le=MAX_STEPS, description="For capture alone: every n-th step, 0: none, null: the next step."),
    ] = None
    recipe: Annotated[
        dict[str, Any] | None, Field(description="Recipe of a perturbation, for perturb alone (docs/perturbation.md).")
    ] = None
    target: Annotated[
        TargetName | None,
        Field(description="For perturb: model, the default, perturbs parameters for a step, master for good."),
    ] = None
    replica: Annotated[
        int | None, Field(ge=0, lt=1 << 20, description="For perturb: data-parallel replica; null: all alike.")
    ] = None
    id: Annotated[
        Key | None, Field(description="Chosen by the client: an order that is sent again with its id is given once.")
    ] = None

    @model_validator(mode="after")
    def _has_steps(self) -> "OrderRequest":
        if self.kind == "step" and self.steps is None:
            raise ValueError("give steps with step")
        if self.steps is not None and self.kind not in {"step", "perturb"}:
            raise ValueError("steps belongs to step and perturb; leave it out")
        if (self.recipe is None) != (self.kind != "perturb"):
            raise ValueError("give recipe with perturb, and only with it")
        if self.kind != "perturb" and (self.target is not None or self.replica is not None):
            raise ValueError("target and replica belong to perturb; leave them out")
        if self.every is not None and self.kind != "capture":
            raise ValueError("every belongs to capture; leave it out")
        return self


class OrderView(ApiModel):
    """An order and what became of it."""

    id: str
    attempt: int
    kind: OrderKindName
    steps: Annotated[
        int, Field(description="Steps to run, for step; steps of activations, for perturb (0: until undo).")
    ]
    every: Annotated[int | None, Field(description="Interval, for capture; 0: none, null: the next step.")]
    digest: Annotated[str | None, Field(description="Name of the recipe, for perturb.")]
    target: Annotated[TargetName | None, Field(description="Parameters that change, for perturb.")]
    replica: Annotated[int | None, Field(description="Data-parallel replica, for perturb; null: all alike.")]
    who: str
    at: Annotated[float, Field(description="Seconds of real time at which it was accepted.")]
    from_step: Annotated[
        int | None, Field(description="Steps done when it took effect, the same on all ranks; null until then.")
    ]
    refusal: Annotated[str | None, Field(description="Reason why it has no effect.")]


class PerturbedStepsView(ApiModel):
    """Consecutive steps that were computed with a perturbation."""

    digest: Annotated[str, Field(description="Name of the recipe.")]
    parameters: Annotated[str | None, Field(description="Parameters that changed, model or master; null: none.")]
    replica: Annotated[int | None, Field(description="Data-parallel replica; null: all alike.")]
    first_step: Annotated[int, Field(description="First step, counted from 1.")]
    last_step: Annotated[int | None, Field(description="Newest step; null: none has ended yet.")]


class TrainingView(ApiModel):
    """State of a training that obeys orders."""

    state: Annotated[
        TrainingStateName,
        Field(description="pausing: a pause is ordered, and the ranks obey at the next step boundary."),
    ]
    attempt: int
    step: Annotated[int | None, Field(description="Finished steps.")]
    total_steps: int | None
    steps_left: Annotated[int, Field(description="Steps of a step order that are left.")]
    paused_since: Annotated[str | None, Field(description="RFC 3339; null outside of a pause.")]
    paused_seconds: Annotated[float, Field(description="Length of the earlier pauses of this attempt.")]
    gpus: Annotated[int, Field(description="GPUs of the job; a pause of s seconds costs gpus x s GPU-seconds.")]
    saves: Annotated[bool, Field(description="Whether a stop can write a checkpoint.")]
    resume_after_seconds: Annotated[
        float | None, Field(description="Length after which a pause ends in which no client controls the training.")
    ]
    capture_every: Annotated[int | None, Field(description="Steps from one capture of layers to the next; null: none.")]
    perturbation: Annotated[str | None, Field(description="Digest of the recipe in force; null: none is.")]
    perturbed: Annotated[list[PerturbedStepsView], Field(description="Steps that were perturbed, the newest 8.")]
    lease: Annotated[LeaseView | None, Field(description="Who controls the training; null: no client.")]
    orders: Annotated[list[OrderView], Field(description="The newest 32, newest first.")]
