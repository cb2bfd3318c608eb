"""Translation of Megatron-LM's arguments, as stored in a checkpoint, to the model of this trainer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_trainer.config import ModelConfig
from megatronapp_trainer.errors import CheckpointError

_UNSUPPORTED = {
    "num_experts": "mixtures of experts",
    "multi_latent_attention": "multi-latent attention",
    "qk_l2_norm": "norms of queries and keys without weights",
    "apply_layernorm_1p": "norms whose weights are stored around zero",
    "squared_relu": "the squared ReLU",
    "quick_geglu": "the gated quick GELU",
    "apply_residual_connection_post_layernorm": "residuals after the norm",
    "rotary_interleaved": "interleaved rotary positions",
    "rotary_seq_len_interpolation_factor": "interpolated rotary positions",
    "no_rope_freq": "layers without rotary positions",
    "mtp_num_layers": "prediction of several tokens",
    "heterogeneous_layers_config_path": "layers that differ",
    "hybrid_layer_pattern": "layers that differ",
    "is_hybrid_model": "layers of other kinds than attention",
    "window_attn_skip_freq": "a window in some layers",
    "attention_output_gate": "gated attention",
    "linear_attention_freq": "linear attention",
    "experimental_attention_variant": "other kinds of attention",
}
"""Arguments for features that no conversion from Megatron-LM knows, with their descriptions."""
_WITHOUT_END = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers whose end of documents is one token more than `vocab_size` includes."""
_NO_INTERPOLATION = ("rotary_seq_len_interpolation_factor", 1)


def model_from(arguments: Mapping[str, Any]) -> ModelConfig:
    """Build the model that these arguments describe.

    Raises:
        CheckpointError: an argument is missing, or requests a feature that no model of this trainer has.
    """
    for name, what in _UNSUPPORTED.items():
        if arguments.get(name) and (name, arguments[name]) != _NO_INTERPOLATION:
            raise CheckpointError(f"its {name} is {arguments[name]}: {what} cannot be converted")
    heads, hidden = _whole(arguments, "num_attention_heads"), _whole(arguments, "hidden_size")
    longest = _whole(arguments, "max_position_embeddings", arguments.get("seq_length"))
    groups = _whole(arguments, "num_query_groups") if arguments.get("group_query_attention") else heads
    positions = _positions(arguments)
    rope = positions == "rope"
    return ModelConfig(
        num_layers=_whole(arguments, "num_layers", arguments.get("encoder_num_layers")),
        hidden_size=hidden,
        seq_length=_whole(arguments, "seq_length", longest),
        max_position_embeddings=longest,
        ffn_hidden_size=_whole(arguments, "ffn_hidden_size", 4 * hidden),
        kv_channels=_whole(arguments, "kv_channels", hidden // heads),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else 1,
        position_embedding_type=positions,
        rotary_base=arguments.get("rotary_base") or 10000 if rope else 10000,
        rotary_percent=arguments.get("rotary_percent") or 1.0 if rope else 1.0,
        use_rope_scaling=bool(rope and arguments.get("use_rope_scaling")),
        rope_scaling_factor=arguments.get("rope_scaling_factor") or 8.0,
        window_size=_window(arguments),
        normalization=_choice(arguments, "normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        norm_epsilon=arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5,
        qk_layernorm=bool(arguments.get("qk_layernorm")),
        swiglu=bool(arguments.get("swiglu")),
        openai_gelu=_is_tanh(arguments),
        add_bias_linear=arguments.get("add_bias_linear", True),
        add_qkv_bias=bool(arguments.get("add_qkv_bias")) and not arguments.get("add_bias_linear", True),
        untie_embeddings_and_output_weights=bool(arguments.get("untie_embeddings_and_output_weights")),
    )


def vocabulary_from(arguments: Mapping[str, Any], rows: int) -> int:
    """Return the number of tokens without padding by the arguments, or all rows of the embedding without such
    arguments.
    """
    value = arguments.get("vocab_size")
    if not isinstance(value, int) or value < 1:
        return rows
    return min(rows, value + (arguments.get("tokenizer_type") in _WITHOUT_END))


def megatron_tokenizer_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return the options of the tokenizer that it was trained with, or None."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    flags = [f"--{name.replace('_', '-')} {arguments[name]}" for name in names if isinstance(arguments.get(name), str)]
    return " ".join(flags) or None


def _whole(arguments: Mapping[str, Any], name: str, default: object = None) -> int:
    value = arguments.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"its arguments have no {name}, without which the model is not known")
    return value


def _choice(arguments: Mapping[str, Any], name: str, default: str, known: tuple[str, ...]) -> str:
    value = arguments.get(name) or default
    if value not in known:
        raise CheckpointError(f"its {name} is {value}; supported: {', '.join(known)}")
    return str(value)


def _positions(arguments: Mapping[str, Any]) -> str:
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    if arguments.get("add_position_embedding") is False and "position_embedding_type" not in arguments:
        return "none"
    return _choice(arguments, "position_embedding_type", "learned_absolute", ("learned_absolute", "rope", "none"))


def _window(arguments: Mapping[str, Any]) -> str | None:
    window = arguments.get("window_size")
    if window is None:
        return None
    left, right = window
    if right not in (0, -1) or (right == -1 and left >= 0):
        raise CheckpointError(f"its window_size is {left},{right}; supported: a right side of 0")
    return None if left < 0 else f"{left},0"


def _is_tanh(arguments: Mapping[str, Any]) -> bool:
    """Return True for GELU by tanh, which Megatron-LM's default, the fused bias and GELU, computes."""
    if arguments.get("swiglu"):
        return False
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    return bool(arguments.get("openai_gelu") or fused)


def with_rows(model: ModelConfig, rows: int) -> ModelConfig:
    """Return the model with an embedding of this many rows."""
    return dataclasses.replace(model, make_vocab_size_divisible_by=rows)
