"""The progress document of the reporting rank, which the interface passes on as it is."""

import math
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from megatronapp_common.web.models import ApiModel


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""Number for JSON, which has no NaN and no Inf, as a loss may well become: they are null."""


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
    chosen: Annotated[bool, Field(description="Whether it was chosen by simulation with measured times.")] = False
    simulated_seconds: Annotated[FiniteOrNone, Field(description="Simulated length of the passes of a step.")] = None
    simulated_bubble: Annotated[
        FiniteOrNone, Field(description="Share of that in which a rank waits, mean over the ranks.")
    ] = None
    static_seconds: Annotated[
        FiniteOrNone, Field(description="Simulated length under the static order of megatron-core.")
    ] = None
    static_bubble: Annotated[FiniteOrNone, Field(description="Share of that in which a rank waits.")] = None
    measured_seconds: Annotated[FiniteOrNone, Field(description="Median length in the first steps under it.")] = None


class Progress(ApiModel):
    """The progress page of the reporting rank."""

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
    state: str | None = None
    updated_at: Annotated[str | None, Field(description="Real time of the report, RFC 3339.")] = None
    plans: Annotated[
        list[PipelinePlan], Field(description="Plans of MegaDPP, the newest 8, oldest first; the last is in force.")
    ] = Field(default_factory=list)
