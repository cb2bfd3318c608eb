"""Forward passes of a chunk as both roles run them: with its data, up to the sum of the losses."""

from typing import Any, NamedTuple

import torch

from megatronapp_trainer.models.registry import ModelFamily


class ForwardOutput(NamedTuple):
    """Output of a forward pass."""

    output: torch.Tensor
    """Hidden states for the next stage; of the last stage the sum of the losses, not divided by anything."""
    report: torch.Tensor | None
    """Sum of losses and number of tokens [2]; None before the last stage."""


def run_forward(
    family: ModelFamily,
    chunk: Any,  # noqa: ANN401 - model chunk
    batch: Any | None,  # noqa: ANN401 - the family's microbatch
    received: torch.Tensor | None,
    *,
    is_last_stage: bool,
) -> ForwardOutput:
    """Run one microbatch through one chunk; `received`: hidden states of the stage before, None on the first one."""
    from megatron.core.utils import get_attr_wrapped_model

    get_attr_wrapped_model(chunk, "set_input_tensor")([received])
    output = family.forward(chunk, batch)
    if not is_last_stage:
        return ForwardOutput(output, None)
    total, _, report = family.loss(output, batch)
    return ForwardOutput(total, report)
