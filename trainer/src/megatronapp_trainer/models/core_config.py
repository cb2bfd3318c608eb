"""megatron-core's TransformerConfig of a run, which the models of all families are built with."""

from collections.abc import Callable
from typing import Any

import torch

from megatronapp_trainer.config import ModelConfig, TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import UsageError


def transformer_config(config: TrainerConfig, device: Device) -> Any:  # noqa: ANN401 - untyped library
    """Return megatron-core's TransformerConfig. Raises UsageError for what megatron-core refuses."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = _shape(config) | _numerics(config, device) | _parallelism(config) | _recomputation(config)
    if config.model.num_experts is not None:
        values |= _experts(config)
    try:
        return TransformerConfig(**values)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"megatron-core does not take this model: {error}") from error


def leave_empty(weight: torch.Tensor) -> torch.Tensor:
    """Leave a parameter uninitialised: megatron-core's modules mark it as split, and we fill it later."""
    return weight


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
        "qk_layernorm": model.qk_layernorm,
        "gated_linear_unit": model.swiglu,
        "activation_func": _activation(model),
        "window_size": None if model.attention_window is None else (model.attention_window, 0),
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "init_method": leave_empty,
        "output_layer_init_method": leave_empty,
        "embedding_init_method": leave_empty,
    }


def _experts(config: TrainerConfig) -> dict[str, Any]:
    """Return the fields of mixtures of experts. Their grouped products are ours, so that megatron-core's stay off."""
    model, parallel = config.model, config.parallel
    types, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    several, layers = len(types) > 1, model.expert_layers(model.num_layers)
    return {
        "num_moe_experts": model.num_experts,
        # 1 lets checkpoints have all layers in one tensor, as they have where no layer has experts.
        "moe_layer_freq": 1 if all(layers) else [int(has_experts) for has_experts in layers],
        "moe_ffn_hidden_size": model.expert_width,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_load_balancing_type": list(types) if several else types[0],
        "moe_aux_loss_coeff": list(coefficients) if several else coefficients[0],
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_dtype": model.moe_router_dtype,
        "moe_input_jitter_eps": model.moe_input_jitter_eps,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": model.moe_token_drop_policy,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.tensor_model_parallel_size,
    }


def _activation(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if model.swiglu:
        return torch.nn.functional.silu
    return _tanh_gelu if model.openai_gelu else torch.nn.functional.gelu


def _tanh_gelu(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(hidden, approximate="tanh")


def _numerics(config: TrainerConfig, device: Device) -> dict[str, Any]:
    model, dtype = config.model, config.precision.dtype
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.precision.bf16,
        "fp16": config.precision.fp16,
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
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type[0],
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
        "recompute_modules": None if precision.recompute_modules is None else list(precision.recompute_modules),
        "recompute_method": precision.recompute_method,
        "recompute_num_layers": precision.recompute_num_layers,
    }
