"""Model chunks of a rank, of any family: built one by one, in the precision of the run, in DistributedDataParallel."""

import contextlib
from collections.abc import Callable
from typing import Any

from megatronapp_common.topology import RankRole
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.rules.graphs import reasons_against_graphs
from megatronapp_trainer.device import Device
from megatronapp_trainer.device.graph_stream import on_graph_stream
from megatronapp_trainer.models.core_config import transformer_config
from megatronapp_trainer.parallel.layout import Layout

BuildChunk = Callable[[Any, int, int], Any]
"""Builds the model of a chunk from megatron-core's TransformerConfig, its number and the padded vocabulary size."""


def build_wrapped_chunks(
    config: TrainerConfig, layout: Layout, device: Device, build_chunk: BuildChunk, *, vocab_size: int
) -> tuple[Any, list[Any]]:
    """Return TransformerConfig and the model chunks of this rank, each in megatron-core's DistributedDataParallel.

    On a rank that only runs forward passes they are without it: there are no gradients.
    """
    core_config = transformer_config(config, device)
    vocab_size = config.model.padded_vocab_size(vocab_size)
    chunks = [
        build_chunk(core_config, chunk, vocab_size).to(device.torch_device) for chunk in range(layout.virtual_size)
    ]
    if config.precision.is_half:
        chunks = [_in_half_precision(core_config, chunk) for chunk in chunks]
    if layout.role is RankRole.FORWARD:
        return core_config, chunks
    with on_graph_stream(device.torch_device) if _may_be_captured(config, device) else contextlib.nullcontext():
        return core_config, _distribute(config, core_config, chunks)


def _may_be_captured(config: TrainerConfig, device: Device) -> bool:
    return device.is_cuda and not reasons_against_graphs(config)


def _in_half_precision(core_config: Any, chunk: Any) -> Any:  # noqa: ANN401 - untyped library
    from megatron.core.transformer.module import Float16Module

    return Float16Module(core_config, chunk)


def _distribute(config: TrainerConfig, core_config: Any, chunks: list[Any]) -> list[Any]:  # noqa: ANN401 - untyped library
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.reduces_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        bucket_size=parallel.ddp_bucket_size,
        average_in_collective=parallel.ddp_average_in_collective,
    )
    return [
        DistributedDataParallel(core_config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
