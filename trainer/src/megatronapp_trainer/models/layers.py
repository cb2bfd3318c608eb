"""Layer specs: ours around torch's fused attention, megatron-core's local one, and Transformer Engine's."""

import importlib.util
from typing import Any

from megatronapp_trainer.config import ModelConfig, TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.models.kernels.choice import FusedParts

_PLAIN = FusedParts()


def implementation_of(config: TrainerConfig) -> str:
    """Return the name of the layers of a run; errors as `resolve_implementation`."""
    only_by_name = (
        config.model.type == "bert"
        or config.fbd.fbd_forward_on_cpu
        or config.parallel.context_parallel_size > 1
        or config.precision.fp8_format is not None
    )
    return resolve_implementation(config.model, engine_by_name=only_by_name)


def resolve_implementation(model: ModelConfig, *, engine_by_name: bool = False) -> str:
    """Return the name of the layers to build. Raises UsageError for Transformer Engine if it is not installed.

    `engine_by_name`: whether Transformer Engine is taken only by its name: where ranks without a GPU have the same
    layers, ranks share a sequence, a sample is attended to in both directions, or linear layers are in our own fp8.
    """
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if model.transformer_impl == "transformer_engine" and not has_engine:
        raise UsageError(
            "--transformer-impl transformer_engine: the package transformer_engine is not installed; "
            "install it or take --transformer-impl torch"
        )
    takes_engine = has_engine and not engine_by_name and model.num_experts is None and not model.qk_layernorm
    return model.transformer_impl or ("transformer_engine" if takes_engine else "torch")


def block_spec(
    implementation: str,
    transformer_config: Any,  # noqa: ANN401 - untyped library
    vp_stage: int | None,
    pp_rank: int,
    *,
    grouped: bool = False,
    parts: FusedParts = _PLAIN,
) -> Any:  # noqa: ANN401 - untyped library
    """Return the spec of one model chunk's transformer block, of chunk `vp_stage` on pipeline rank `pp_rank`.

    `grouped`: the products of a rank's experts in one kernel, where torch has it. `parts`: of the layers that run in
    our own Triton kernels.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if implementation == "transformer_engine":
        return get_gpt_decoder_block_spec(
            transformer_config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=pp_rank
        )
    return _torch_block(implementation, transformer_config, vp_stage, pp_rank, grouped=grouped, parts=parts)


def encoder_spec(
    model: ModelConfig,
    transformer_config: Any,  # noqa: ANN401 - untyped library
    vp_stage: int | None,
    pp_rank: int,
    *,
    parts: FusedParts = _PLAIN,
) -> Any:  # noqa: ANN401 - untyped library
    """Return the spec of one model chunk's block of layers that attend to the whole sample, its padding excepted."""
    implementation = model.transformer_impl or "torch"
    return _torch_block(implementation, transformer_config, vp_stage, pp_rank, is_causal=False, parts=parts)


def _torch_block(
    implementation: str,
    transformer_config: Any,  # noqa: ANN401
    vp_stage: int | None,
    pp_rank: int,
    *,
    is_causal: bool = True,
    grouped: bool = False,
    parts: FusedParts,
) -> Any:  # noqa: ANN401
    """Return layers of megatron-core's linear modules and torch's norms, with either core attention."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    dense = _torch_layer(implementation, transformer_config, parts)
    if not is_causal:
        dense.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    layers = [dense] * get_num_layers_to_build(transformer_config, vp_stage=vp_stage, pp_rank=pp_rank)
    if transformer_config.num_moe_experts is not None:
        first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage, pp_rank=pp_rank)
        layers = _with_experts(layers, implementation, transformer_config, first, grouped=grouped, parts=parts)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_norm(parts))


def _norm(parts: FusedParts) -> type:
    from megatronapp_trainer.models.norm import FusedNorm, TorchNorm

    return FusedNorm if parts.norm else TorchNorm


def _torch_layer(implementation: str, transformer_config: Any, parts: FusedParts) -> Any:  # noqa: ANN401 - ModuleSpec
    """Return a layer with a dense MLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization=transformer_config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _norm(parts)
    if parts.activation:
        from megatronapp_trainer.models.kernels.modules import FusedMLP

        layer.submodules.mlp.module = FusedMLP
    if parts.residual:
        from megatronapp_trainer.models.kernels.modules import fused_bias_dropout_add

        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = fused_bias_dropout_add
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = _core_attention(implementation, transformer_config)
    if transformer_config.qk_layernorm:
        from megatronapp_trainer.models.norm import TorchNorm

        # Our kernel is made for rows as wide as the hidden size; a head's channels are few.
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return layer


def _with_experts(
    layers: list[Any],
    implementation: str,
    transformer_config: Any,  # noqa: ANN401
    first: int,
    *,
    grouped: bool,
    parts: FusedParts,
) -> list[Any]:
    """Return a chunk's layers from number `first` on, with experts where the configuration's pattern has them."""
    from megatronapp_trainer.models.experts.spec import experts_spec

    layer = _torch_layer(implementation, transformer_config, parts)
    layer.submodules.mlp = experts_spec(grouped=grouped)
    pattern = transformer_config.moe_layer_freq
    if pattern == 1:
        return [layer] * len(layers)
    pattern = pattern[first : first + len(layers)]
    return [layer if has_experts else dense for dense, has_experts in zip(layers, pattern, strict=True)]


def _core_attention(implementation: str, transformer_config: Any) -> type:  # noqa: ANN401 - untyped library
    if transformer_config.context_parallel_size > 1:
        return _context_attention(transformer_config.cp_comm_type)
    if implementation == "torch":
        from megatronapp_trainer.models.attention import TorchAttention

        return TorchAttention
    from megatronapp_trainer.models.local import LocalAttention

    return LocalAttention


def _context_attention(exchange: str) -> type:
    """Return the attention over ranks that share a sequence, by `--cp-comm-type`."""
    if exchange == "a2a":
        from megatronapp_trainer.models.context.head_exchange import HeadExchangeAttention

        return HeadExchangeAttention
    from megatronapp_trainer.models.context.ring import RingAttention

    return RingAttention
