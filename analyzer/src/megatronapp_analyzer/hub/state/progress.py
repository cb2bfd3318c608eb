"""The progress document of the reporting rank, which the interface passes on as it is."""

import math
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from megatronapp_common.web.models import ApiModel


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""Number for JSON, which has no NaN and no Inf, as a loss may well become: they are null."""


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
