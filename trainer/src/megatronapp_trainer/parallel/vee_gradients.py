"""The end of a step where stages are placed in a vee, so that one rank has both ends of the model."""

from typing import Any

import torch
import torch.distributed as dist


def finalize_vee(
    core_config: Any,  # noqa: ANN401 - TransformerConfig
    chunks: list[Any],
    groups: Any,  # noqa: ANN401 - ProcessGroupCollection
    tokens: torch.Tensor | None,
) -> None:
    """Reduce the gradients of a step, as megatron-core's function does for stages in a loop.

    That function adds up tied gradients between the first and the last rank and takes the number of tokens from the
    last rank; in a vee both are on the first one.

    Args:
        core_config: megatron-core's TransformerConfig.
        chunks: of this rank, each in megatron-core's DistributedDataParallel.
        groups: process groups of the schedule.
        tokens: of this rank's microbatches, by whose sum the gradients are divided; 0 on ranks without the last stage;
            None if each microbatch's loss is a mean already.
    """
    core_config.finalize_model_grads_func(chunks, None, pg_collection=groups)
    add_tied_gradients(chunks)
    if tokens is None:
        return
    dist.all_reduce(tokens, group=groups.pp)
    dist.all_reduce(tokens, group=groups.dp_cp)
    if tokens > 0:
        for chunk in chunks:
            chunk.scale_gradients(1.0 / tokens)


def add_tied_gradients(chunks: list[Any]) -> None:
    """Give the two copies of a tied weight, in the embedding and in the output layer, the sum of their gradients.

    With the distributed optimizer each replica has only its part of the reduced gradients. megatron-core gives each
    copy a separate bucket, so that the part is the same of both.
    """
    tied = [part for chunk in chunks for part in chunk.parameters() if getattr(part, "shared_embedding", False)]
    if not tied:
        return
    first, last = tied
    first.main_grad.add_(last.main_grad)
    last.main_grad.copy_(first.main_grad)
