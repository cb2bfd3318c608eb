"""Tiny models of transformers with random weights, one for each thing that the families differ in."""

import pathlib
from typing import Any

TOKENS = (2, 48)
"""Batch and sequence of what the models are compared on."""
VOCABULARY = 120
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied-erf": (
        "gpt2",
        _GPT2
        | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 96, "layer_norm_epsilon": 1e-3},
    ),
    "llama2-mha": ("llama", _LLAMA | {"num_key_value_heads": 4}),
    "llama3-scaled": ("llama", _LLAMA | {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-tied-bf16": ("llama", _LLAMA | {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral-window": ("mistral", _LLAMA | {"sliding_window": 7, "head_dim": 32}),
    "mistral-full": ("mistral", _LLAMA | {"sliding_window": None}),
    "qwen2": ("qwen2", _LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-tied-window": (
        "qwen2",
        _LLAMA
        | {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 32, "hidden_size": 48, "num_attention_heads": 8}),
}
_EXPERTS = _LLAMA | {"num_experts_per_tok": 2}
_QWEN_EXPERTS = _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
EXPERT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "qwen-moe": ("qwen2_moe", _QWEN_EXPERTS),
    "qwen-moe-normed-bf16": ("qwen2_moe", _QWEN_EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True}),
}
SHARDED = "qwen2"
"""Saved in several files."""


def save_model(name: str, folder: pathlib.Path, **changes: Any) -> Any:
    """Make the model, `changes` made to its configuration, and write its folder.

    Gives it back in fp32 with the weights that were written.
    """
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM

    kind, values = (MODELS | EXPERT_MODELS)[name]
    values = values | changes
    torch.manual_seed(7)
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **values))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_gain = key.endswith("weight") and parameter.dim() == 1
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.2) + is_gain)
    model = model.to(torch.bfloat16 if "bf16" in name else torch.float32)
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if name == SHARDED else {}))
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> Any:
    """fp32 [B, S, V] of the tokens that all models are compared on."""
    import torch

    with torch.no_grad():
        return model(tokens()).logits


def tokens() -> Any:
    """Return token ids, int64 [B, S]."""
    import torch

    return torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(3))
