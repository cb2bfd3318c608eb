"""Mixtral and Qwen2-MoE: the attention of Llama's family, and a mixture of experts in every layer."""

from typing import Any

from megatronapp_trainer.checkpoint.convert import tensors
from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.families.llama import (
    ATTENTION_RULES,
    is_null,
    layer_rule,
    llama_like,
    qwen_window,
    read_llama_like,
    window,
    window_tokens,
    write_llama_like,
    write_qwen_window,
)
from megatronapp_trainer.checkpoint.convert.rules import SourceTensor, TensorRule
from megatronapp_trainer.checkpoint.convert.shape import ModelShape

_LAYER = "{prefix}layers.{layer}."


def _read_mixtral(keys: ConfigKeys) -> ModelShape:
    absent = not keys.has("sliding_window") or is_null(keys, "sliding_window")
    return read_llama_like(
        "mixtral",
        keys,
        window_size=window(None if absent else keys.whole("sliding_window")),
        num_experts=keys.whole("num_local_experts", 8),
        moe_router_topk=keys.whole("num_experts_per_tok", 2),
    )


def _write_mixtral(shape: ModelShape) -> dict[str, Any]:
    model = shape.model
    return write_llama_like(shape) | {
        "intermediate_size": model.expert_width,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "sliding_window": window_tokens(shape),
    }


def _read_qwen(keys: ConfigKeys) -> ModelShape:
    keys.require("decoder_sparse_step", 1, 1)
    keys.require("mlp_only_layers", [], [])
    keys.require("qkv_bias", True, True)
    return read_llama_like(
        "qwen2_moe",
        keys,
        window_size=qwen_window(keys),
        add_qkv_bias=True,
        num_experts=keys.whole("num_experts", 60),
        moe_router_topk=keys.whole("num_experts_per_tok", 4),
        moe_ffn_hidden_size=keys.whole("moe_intermediate_size", 1408),
        moe_shared_expert_intermediate_size=keys.whole("shared_expert_intermediate_size", 5632),
        moe_shared_expert_gate=True,
        # Scores that add up to 1 over the chosen experts are the softmax over these alone.
        moe_router_pre_softmax=not keys.yes("norm_topk_prob", False),
    )


def _write_qwen(shape: ModelShape) -> dict[str, Any]:
    model = shape.model
    return (
        write_llama_like(shape)
        | write_qwen_window(shape)
        | {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_width,
            "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "qkv_bias": True,
        }
    )


def _expert_rules(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Return the rules of router and experts; `block` holds both, and the others are names of an expert's weights."""
    expert = f"{_LAYER}{block}.experts.{{expert}}."
    return (
        layer_rule("mlp.router.weight", f"{block}.gate", lambda s: (s.model.num_experts or 0, s.hidden)),
        TensorRule(
            "decoder.layers.mlp.experts.linear_fc1.weight",
            (
                SourceTensor(f"{expert}{gate}.weight", lambda s: (s.model.expert_width, s.hidden)),
                SourceTensor(f"{expert}{up}.weight", lambda s: (s.model.expert_width, s.hidden)),
            ),
            tensors.stacked_experts,
            tensors.split_stacked_experts,
        ),
        TensorRule(
            "decoder.layers.mlp.experts.linear_fc2.weight",
            (SourceTensor(f"{expert}{down}.weight", lambda s: (s.hidden, s.model.expert_width)),),
            tensors.experts,
            tensors.split_experts,
        ),
    )


def _shared_width(shape: ModelShape) -> int:
    return shape.model.moe_shared_expert_intermediate_size or 0


_SHARED = f"{_LAYER}mlp.shared_expert."
_SHARED_RULES = (
    TensorRule(
        "decoder.layers.mlp.shared_experts.linear_fc1.weight",
        (
            SourceTensor(f"{_SHARED}gate_proj.weight", lambda s: (_shared_width(s), s.hidden)),
            SourceTensor(f"{_SHARED}up_proj.weight", lambda s: (_shared_width(s), s.hidden)),
        ),
        tensors.stacked,
        tensors.split_stacked,
    ),
    layer_rule(
        "mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj", lambda s: (s.hidden, _shared_width(s))
    ),
    layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate", lambda s: (1, s.hidden)),
)
MIXTRAL = llama_like(
    "mixtral",
    "MixtralForCausalLM",
    _read_mixtral,
    _write_mixtral,
    (*ATTENTION_RULES, *_expert_rules("block_sparse_moe", "w1", "w3", "w2")),
)
QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _read_qwen,
    _write_qwen,
    (*ATTENTION_RULES, *_expert_rules("mlp", "gate_proj", "up_proj", "down_proj"), *_SHARED_RULES),
)
