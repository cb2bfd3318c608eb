"""Llama, Mistral, Qwen2 and Qwen3: rotary positions, RMSNorm, gated SiLU.

They differ in a window, a bias of QKV, and norms of queries and keys.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from megatronapp_trainer.checkpoint.convert import tensors
from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.families.family import HEAD, HuggingFaceFamily
from megatronapp_trainer.checkpoint.convert.families.rope import read_rope, write_rope
from megatronapp_trainer.checkpoint.convert.rules import SourceTensor, TensorRule
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.config import ModelConfig

_LAYER = "{prefix}layers.{layer}."
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"kv": None, "mlp": 11008, "positions": 2048, "vocab": 32000},
    "mistral": {"kv": 8, "mlp": 14336, "positions": 131072, "vocab": 32000},
    "qwen2": {"kv": 32, "mlp": 22016, "positions": 32768, "vocab": 151936},
    "qwen3": {"kv": 32, "mlp": 22016, "positions": 32768, "vocab": 151936, "width": 128},
    "mixtral": {"kv": 8, "mlp": 14336, "positions": 131072, "vocab": 32000, "eps": 1e-5},
    "qwen2_moe": {
        "kv": 16,
        "mlp": 5632,
        "positions": 32768,
        "vocab": 151936,
        "hidden": 2048,
        "heads": 16,
        "layers": 24,
    },
}
"""Default of transformers for an absent key, where the families differ."""


def read_llama_like(model_type: str, keys: ConfigKeys, **own: Any) -> ModelShape:  # noqa: ANN401 - of ModelConfig
    """Read the keys that all such families share; `own` has the fields of this family."""
    defaults = {"hidden": 4096, "heads": 32, "layers": 32, "eps": 1e-6, **_DEFAULTS[model_type]}
    keys.require("hidden_act", "silu", "silu", "swish")
    hidden, heads = keys.whole("hidden_size", defaults["hidden"]), keys.whole("num_attention_heads", defaults["heads"])
    absent = is_null(keys, "num_key_value_heads")
    groups = heads if absent else keys.whole("num_key_value_heads", defaults["kv"] or heads)
    if heads % groups:
        raise keys.refusal("num_attention_heads", heads, f"a multiple of num_key_value_heads ({groups}) is needed")
    width = keys.get("head_dim", defaults.get("width"))
    if hidden % heads and width is None:
        raise keys.refusal("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}) is needed, or head_dim")
    positions = keys.whole("max_position_embeddings", defaults["positions"])
    model = ModelConfig(
        num_layers=keys.whole("num_hidden_layers", defaults["layers"]),
        hidden_size=hidden,
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else 1,
        kv_channels=keys.whole("head_dim", width or hidden // heads),
        ffn_hidden_size=keys.whole("intermediate_size", defaults["mlp"]),
        seq_length=positions,
        max_position_embeddings=positions,
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=keys.number("rms_norm_eps", defaults["eps"]),
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not keys.yes("tie_word_embeddings", False),
        **read_rope(keys),
        **own,
    )
    return ModelShape(model=model, vocab_size=keys.whole("vocab_size", defaults["vocab"]))


def is_null(keys: ConfigKeys, key: str) -> bool:
    """Return whether a key is present as null, which is no default."""
    return keys.has(key) and keys.get(key) is None


def _read_llama(keys: ConfigKeys) -> ModelShape:
    keys.require("attention_bias", False, False)
    keys.require("mlp_bias", False, False)
    return read_llama_like("llama", keys)


def _read_mistral(keys: ConfigKeys) -> ModelShape:
    if set(keys.get("layer_types", [])) - {"sliding_attention"}:
        raise keys.refusal("layer_types", keys.get("layer_types"), "supported: one kind of attention in all layers")
    tokens = None if is_null(keys, "sliding_window") else keys.whole("sliding_window", 4096)
    return read_llama_like("mistral", keys, window_size=window(tokens))


def _read_qwen2(keys: ConfigKeys) -> ModelShape:
    return read_llama_like("qwen2", keys, window_size=qwen_window(keys), add_qkv_bias=True)


def _read_qwen3(keys: ConfigKeys) -> ModelShape:
    keys.require("attention_bias", False, False)
    return read_llama_like("qwen3", keys, window_size=qwen_window(keys), qk_layernorm=True)


def qwen_window(keys: ConfigKeys) -> str | None:
    """Return the window of all layers, None for all tokens. Raises CheckpointError if layers differ."""
    slides = keys.yes("use_sliding_window", False) and not is_null(keys, "sliding_window")
    kinds = set(keys.get("layer_types", _qwen2_kinds(keys) if slides else ["full_attention"]))
    if len(kinds) != 1 or not kinds <= {"sliding_attention", "full_attention"}:
        key = "layer_types" if keys.has("layer_types") else "max_window_layers"
        raise keys.refusal(key, keys.get(key), "supported: one kind of attention in all layers, full or sliding")
    tokens = keys.whole("sliding_window", 4096) if slides and kinds == {"sliding_attention"} else None
    return window(tokens)


def _qwen2_kinds(keys: ConfigKeys) -> list[str]:
    """Return the kind of each layer: the first ones attend to all tokens, the others to a window."""
    layers, first = keys.whole("num_hidden_layers", 32), keys.get("max_window_layers", 28)
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


def window(tokens: int | None) -> str | None:
    """Convert the window: theirs includes the token itself, ours does not."""
    return None if tokens is None else f"{tokens - 1},0"


def write_llama_like(shape: ModelShape) -> dict[str, Any]:
    """Build the keys that all such families share."""
    model = shape.model
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.heads_of_keys,
        "head_dim": model.head_width,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **write_rope(model),
    }


def _write_llama(shape: ModelShape) -> dict[str, Any]:
    return write_llama_like(shape) | {"attention_bias": False, "mlp_bias": False}


def _write_mistral(shape: ModelShape) -> dict[str, Any]:
    return write_llama_like(shape) | {"sliding_window": window_tokens(shape)}


def _write_qwen2(shape: ModelShape) -> dict[str, Any]:
    return write_llama_like(shape) | write_qwen_window(shape)


def _write_qwen3(shape: ModelShape) -> dict[str, Any]:
    return _write_qwen2(shape) | {"attention_bias": False}


def write_qwen_window(shape: ModelShape) -> dict[str, Any]:
    """Build the keys of the window, which all layers have or none."""
    tokens = window_tokens(shape)
    slides = {"use_sliding_window": True, "sliding_window": tokens, "max_window_layers": 0}
    return slides if tokens is not None else {"use_sliding_window": False}


def window_tokens(shape: ModelShape) -> int | None:
    """Return the window by their definition; None for all tokens."""
    return None if shape.model.attention_window is None else shape.model.attention_window + 1


def _queries(suffix: str, size: Callable[[int, ModelShape], tuple[int, ...]]) -> tuple[SourceTensor, ...]:
    name = f"{_LAYER}self_attn."
    return (
        SourceTensor(f"{name}q_proj.{suffix}", lambda s: size(s.queries, s)),
        SourceTensor(f"{name}k_proj.{suffix}", lambda s: size(s.keys, s)),
        SourceTensor(f"{name}v_proj.{suffix}", lambda s: size(s.keys, s)),
    )


def layer_rule(ours: str, theirs: str, size: Callable[[ModelShape], tuple[int, ...]]) -> TensorRule:
    """Return the rule of a tensor of each layer that is the same in both; `theirs` without `.weight`."""
    return TensorRule(f"decoder.layers.{ours}", (SourceTensor(f"{_LAYER}{theirs}.weight", size),))


def _head_norm(part: str) -> TensorRule:
    """Return the rule of the norm of the queries (q) or keys (k) of each head."""
    rule = layer_rule(
        f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm", lambda s: (s.model.head_width,)
    )
    return dataclasses.replace(rule, needed=lambda s: s.model.qk_layernorm)


ATTENTION_RULES = (
    TensorRule(
        "embedding.word_embeddings.weight",
        (SourceTensor("{prefix}embed_tokens.weight", lambda s: (s.vocab_size, s.hidden)),),
        tensors.padded,
        tensors.unpad,
    ),
    layer_rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm", lambda s: (s.hidden,)),
    TensorRule(
        "decoder.layers.self_attention.linear_qkv.weight",
        _queries("weight", lambda rows, s: (rows, s.hidden)),
        tensors.interleaved,
        tensors.split_interleaved,
    ),
    TensorRule(
        "decoder.layers.self_attention.linear_qkv.bias",
        _queries("bias", lambda rows, _: (rows,)),
        tensors.interleaved,
        tensors.split_interleaved,
        needed=lambda s: s.model.add_qkv_bias,
    ),
    _head_norm("q"),
    _head_norm("k"),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj", lambda s: (s.hidden, s.queries)),
    layer_rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", lambda s: (s.hidden,)),
    TensorRule("decoder.final_layernorm.weight", (SourceTensor("{prefix}norm.weight", lambda s: (s.hidden,)),)),
    TensorRule(
        "output_layer.weight",
        (SourceTensor(HEAD, lambda s: (s.vocab_size, s.hidden)),),
        tensors.padded,
        tensors.unpad,
        needed=lambda s: s.model.untie_embeddings_and_output_weights,
    ),
)
"""Rules of all tensors but those of the MLP."""
_RULES = (
    *ATTENTION_RULES,
    TensorRule(
        "decoder.layers.mlp.linear_fc1.weight",
        (
            SourceTensor(f"{_LAYER}mlp.gate_proj.weight", lambda s: (s.mlp, s.hidden)),
            SourceTensor(f"{_LAYER}mlp.up_proj.weight", lambda s: (s.mlp, s.hidden)),
        ),
        tensors.stacked,
        tensors.split_stacked,
    ),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj", lambda s: (s.hidden, s.mlp)),
)


def llama_like(
    model_type: str,
    architecture: str,
    read: Callable[[ConfigKeys], ModelShape],
    write: Callable[[ModelShape], dict[str, Any]],
    rules: tuple[TensorRule, ...] = _RULES,
) -> HuggingFaceFamily:
    """Return a family with the attention of Llama."""
    return HuggingFaceFamily(
        model_type=model_type,
        architecture=architecture,
        prefixes=("model.",),
        embedding="embed_tokens.weight",
        buffers=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        rules=rules,
        read=read,
        write=write,
    )


LLAMA = llama_like("llama", "LlamaForCausalLM", _read_llama, _write_llama)
MISTRAL = llama_like("mistral", "MistralForCausalLM", _read_mistral, _write_mistral)
QWEN2 = llama_like("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2)
QWEN3 = llama_like("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3)
