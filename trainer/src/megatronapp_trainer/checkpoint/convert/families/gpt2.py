"""GPT-2: learned positions, LayerNorm, biases, GELU by tanh, transposed weights of Conv1D."""

import re
from typing import Any

from megatronapp_trainer.checkpoint.convert import tensors
from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.families.family import HEAD, HuggingFaceFamily
from megatronapp_trainer.checkpoint.convert.rules import SourceTensor, TensorRule
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.config import ModelConfig

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of one function, which differ in how it is computed."""
_LAYER = "{prefix}h.{layer}."


def _read(keys: ConfigKeys) -> ModelShape:
    keys.require("scale_attn_weights", True, True)
    keys.require("scale_attn_by_inverse_layer_idx", False, False)
    keys.require("add_cross_attention", False, False)
    hidden, positions = keys.whole("n_embd", 768), keys.whole("n_positions", 1024)
    model = ModelConfig(
        num_layers=keys.whole("n_layer", 12),
        hidden_size=hidden,
        num_attention_heads=keys.whole("n_head", 12),
        ffn_hidden_size=keys.whole("n_inner", 4 * hidden),
        seq_length=positions,
        max_position_embeddings=positions,
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5),
        openai_gelu=keys.require("activation_function", "gelu_new", *_TANH, "gelu") in _TANH,
        untie_embeddings_and_output_weights=not keys.yes("tie_word_embeddings", True),
    )
    if hidden % model.num_attention_heads:
        raise keys.refusal("n_embd", hidden, f"a multiple of n_head ({model.num_attention_heads}) is needed")
    return ModelShape(model=model, vocab_size=keys.whole("vocab_size", 50257))


def _write(shape: ModelShape) -> dict[str, Any]:
    model = shape.model
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.mlp_width,
        "n_positions": model.positions,
        "n_ctx": model.positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": "gelu_new" if model.openai_gelu else "gelu",
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _columns(ours: str, theirs: str, rows: Any, columns: Any) -> tuple[TensorRule, TensorRule]:  # noqa: ANN401 - functions of Shape
    """Return the rules of weight and bias of a Conv1D."""
    return (
        TensorRule(
            f"decoder.layers.{ours}.weight",
            (SourceTensor(f"{_LAYER}{theirs}.weight", lambda s: (rows(s), columns(s))),),
            tensors.transposed,
            tensors.split_transposed,
        ),
        TensorRule(f"decoder.layers.{ours}.bias", (SourceTensor(f"{_LAYER}{theirs}.bias", lambda s: (columns(s),)),)),
    )


def _norm(ours: str, theirs: str) -> tuple[TensorRule, TensorRule]:
    return (
        TensorRule(f"{ours}weight", (SourceTensor(f"{theirs}.weight", lambda s: (s.hidden,)),)),
        TensorRule(f"{ours}bias", (SourceTensor(f"{theirs}.bias", lambda s: (s.hidden,)),)),
    )


def _hidden(shape: ModelShape) -> int:
    return shape.hidden


def _mlp(shape: ModelShape) -> int:
    return shape.mlp


_RULES = (
    TensorRule(
        "embedding.word_embeddings.weight",
        (SourceTensor("{prefix}wte.weight", lambda s: (s.vocab_size, s.hidden)),),
        tensors.padded,
        tensors.unpad,
    ),
    TensorRule(
        "embedding.position_embeddings.weight",
        (SourceTensor("{prefix}wpe.weight", lambda s: (s.model.positions, s.hidden)),),
    ),
    *_norm("decoder.layers.self_attention.linear_qkv.layer_norm_", f"{_LAYER}ln_1"),
    TensorRule(
        "decoder.layers.self_attention.linear_qkv.weight",
        (SourceTensor(f"{_LAYER}attn.c_attn.weight", lambda s: (s.hidden, 3 * s.hidden)),),
        tensors.interleaved_from_columns,
        tensors.split_interleaved_to_columns,
    ),
    TensorRule(
        "decoder.layers.self_attention.linear_qkv.bias",
        (SourceTensor(f"{_LAYER}attn.c_attn.bias", lambda s: (3 * s.hidden,)),),
        tensors.interleaved_from_stacked,
        tensors.split_interleaved_to_stacked,
    ),
    *_columns("self_attention.linear_proj", "attn.c_proj", _hidden, _hidden),
    *_norm("decoder.layers.mlp.linear_fc1.layer_norm_", f"{_LAYER}ln_2"),
    *_columns("mlp.linear_fc1", "mlp.c_fc", _hidden, _mlp),
    *_columns("mlp.linear_fc2", "mlp.c_proj", _mlp, _hidden),
    *_norm("decoder.final_layernorm.", "{prefix}ln_f"),
    TensorRule(
        "output_layer.weight",
        (SourceTensor(HEAD, lambda s: (s.vocab_size, s.hidden)),),
        tensors.padded,
        tensors.unpad,
        needed=lambda s: s.model.untie_embeddings_and_output_weights,
    ),
)

GPT2 = HuggingFaceFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefixes=("transformer.", ""),
    embedding="wte.weight",
    buffers=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    rules=_RULES,
    read=_read,
    write=_write,
)
