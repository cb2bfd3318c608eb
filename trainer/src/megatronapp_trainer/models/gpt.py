"""The GPT model: megatron-core's configuration and one model chunk per virtual stage, wrapped for data parallelism."""

from collections.abc import Callable
from typing import Any

import torch

from megatronapp_common.topology import RankRole
from megatronapp_trainer.config import ModelConfig, TrainerConfig
from megatronapp_trainer.data.microbatches import BatchSource, DataIterators, HostMicrobatch, Microbatch
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.models.initial import initialize_weights
from megatronapp_trainer.models.language_model_loss import token_loss
from megatronapp_trainer.models.layers import block_spec, resolve_implementation
from megatronapp_trainer.parallel.groups import chunk_groups
from megatronapp_trainer.parallel.layout import Layout


def transformer_config(config: TrainerConfig, device: Device) -> Any:  # noqa: ANN401 - untyped library
    """Return megatron-core's TransformerConfig. Raises UsageError for what megatron-core refuses."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = _shape(config) | _numerics(config, device) | _parallelism(config) | _recomputation(config)
    try:
        return TransformerConfig(**values)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"megatron-core does not take this model: {error}") from error


def build_chunks(
    config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True
) -> tuple[Any, list[Any]]:
    """Return TransformerConfig and the model chunks of this rank, each in megatron-core's DistributedDataParallel.

    On a rank that only runs forward passes they are without it: there are no gradients.

    `drawn`: with initial weights; if false, with uninitialised memory, for a checkpoint to fill.
    """
    core_config = transformer_config(config, device)
    vocab_size = config.model.padded_vocab_size(vocab_size)
    chunks = [
        _build_chunk(config, core_config, layout, chunk, vocab_size, drawn=drawn).to(device.torch_device)
        for chunk in range(layout.virtual_size)
    ]
    if config.precision.bf16:
        chunks = [_in_half_precision(core_config, chunk) for chunk in chunks]
    if layout.role is RankRole.FORWARD:
        return core_config, chunks
    return core_config, _distribute(config, core_config, chunks)


def build_stage(
    config: TrainerConfig,
    layout: Layout,
    device: Device,
    *,
    vocab_size: int,
    drawn: bool = True,
) -> Any:  # noqa: ANN401 - GPTModel
    """Build a pipeline stage's model without the wrappers of training, in the precision of the configuration.

    `drawn`: with initial weights; if false, with uninitialised memory, for a checkpoint to fill.
    """
    padded = config.model.padded_vocab_size(vocab_size)
    model = _build_chunk(config, transformer_config(config, device), layout, 0, padded, drawn=drawn)
    if config.precision.bf16:
        model.bfloat16()
    return model.to(device.torch_device)


def forward(model: Any, batch: Microbatch | None) -> torch.Tensor:  # noqa: ANN401 - DDP
    """Run one chunk with its inputs of a microbatch; None: the chunk reads no data."""
    output: torch.Tensor
    if batch is None:
        output = model(None, None, None)
    else:
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output


def loss(output: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the loss of each token, which the last chunk puts out, over the unmasked tokens of a microbatch."""
    return token_loss(output, batch.loss_mask, batch.loss_tokens)


def example_batch(config: TrainerConfig, layout: Layout, device: Device) -> Microbatch:
    """Return a microbatch of the form of all others, whose contents mean nothing; collective over the tensor group."""
    samples, length = size = config.training.micro_batch_size, config.model.seq_length
    zeros = torch.zeros(size, dtype=torch.int64)
    mask = torch.zeros((samples, 1, length, length), dtype=torch.bool) if config.data.reset_attention_mask else None
    batch = HostMicrobatch(
        tokens=zeros, labels=zeros, loss_mask=torch.ones(size), position_ids=zeros, attention_mask=mask
    )
    return batch_source(config, layout, device).read(iter([batch]), 1)[0]


def batch_source(config: TrainerConfig, layout: Layout, device: Device) -> BatchSource:
    """Return the source that turns host batches into microbatches on this rank's device."""
    return BatchSource(config, layout, device)


def build_iterators(
    config: TrainerConfig, layout: Layout, consumed_samples: int, *, order_samples: int | None = None
) -> DataIterators:
    """Iterate over microbatches of this rank from the given sample on; `order_samples` as in `TrainState`."""
    if config.data.mock_data:
        from megatronapp_trainer.data.mock_data import build_mock_iterators

        return build_mock_iterators(config, layout, consumed_samples)
    from megatronapp_trainer.data.iterators import build_train_valid_test_iterators

    return build_train_valid_test_iterators(config, layout, consumed_samples, order_samples=order_samples)


def _build_chunk(
    config: TrainerConfig,
    core_config: Any,  # noqa: ANN401 - TransformerConfig
    layout: Layout,
    chunk: int,
    vocab_size: int,
    *,
    drawn: bool = True,
) -> Any:  # noqa: ANN401 - GPTModel
    from megatron.core.models.gpt import GPTModel

    model, vp_stage = config.model, chunk if layout.virtual_size > 1 else None
    place = layout.place_in_loop(chunk)
    implementation = resolve_implementation(model, on_any_device=config.fbd.fbd_forward_on_cpu)
    gpt = GPTModel(
        core_config,
        block_spec(implementation, core_config, vp_stage, place),
        vocab_size,
        model.positions,
        pre_process=place == 0 and chunk == 0,
        post_process=place == layout.pipeline_size - 1 and chunk == layout.virtual_size - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        pg_collection=chunk_groups(layout, chunk),
        vp_stage=vp_stage,
    )
    if drawn:
        initialize_weights(gpt, model, seed=config.training.seed, layout=layout)
    return gpt


def _leave_empty(weight: torch.Tensor) -> torch.Tensor:
    """Leave a parameter uninitialised: megatron-core's modules mark it as split, and we fill it later."""
    return weight


def _in_half_precision(core_config: Any, chunk: Any) -> Any:  # noqa: ANN401 - untyped library
    from megatron.core.transformer.module import Float16Module

    return Float16Module(core_config, chunk)


def _distribute(config: TrainerConfig, core_config: Any, chunks: list[Any]) -> list[Any]:  # noqa: ANN401 - untyped library
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.bf16,
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


def _shape(config: TrainerConfig) -> dict[str, Any]:
    model = config.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.heads_of_keys,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.mlp_width,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": model.swiglu,
        "activation_func": _activation(model),
        "window_size": None if model.attention_window is None else (model.attention_window, 0),
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "init_method": _leave_empty,
        "output_layer_init_method": _leave_empty,
        "embedding_init_method": _leave_empty,
    }


def _activation(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if model.swiglu:
        return torch.nn.functional.silu
    return _tanh_gelu if model.openai_gelu else torch.nn.functional.gelu


def _tanh_gelu(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(hidden, approximate="tanh")


def _numerics(config: TrainerConfig, device: Device) -> dict[str, Any]:
    model, dtype = config.model, torch.bfloat16 if config.precision.bf16 else torch.float32
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.precision.bf16,
        "use_cpu_initialization": not device.is_cuda,
        # megatron-core fuses these with torch.compile, whose guards cost the host more than the kernels save.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": model.attention_softmax_in_fp32,
        "deterministic_mode": config.precision.deterministic_mode,
        "calculate_per_token_loss": config.training.calculate_per_token_loss,
    }


def _parallelism(config: TrainerConfig) -> dict[str, Any]:
    """Return the fields of the layout.

    Batched transfers stay off: each brings a device sync, and between two stages they pair up wrongly. Where transfers
    overlap compute, megatron-core would free a stage's output while it is still being sent, so it keeps it.
    """
    parallel, interleaved = config.parallel, config.virtual_size > 1
    overlap = interleaved and parallel.overlap_p2p_comm
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_size if interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss_in_pipeline_split,
        "sequence_parallel": parallel.sequence_parallel,
        "batch_p2p_comm": False,
        "batch_p2p_sync": False,
        "overlap_p2p_comm": overlap,
        "deallocate_pipeline_outputs": not overlap,
        "barrier_with_L1_time": False,
    }


def _recomputation(config: TrainerConfig) -> dict[str, Any]:
    precision = config.precision
    return {
        "recompute_granularity": precision.granularity,
        "recompute_method": precision.recompute_method,
        "recompute_num_layers": precision.recompute_num_layers,
    }
