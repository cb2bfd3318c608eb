"""Folders as transformers writes them, made from our tables of names, without transformers."""

import json
import pathlib
from typing import Any

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}


def write(path: pathlib.Path, config: dict[str, Any], *, prefix: str | None = None) -> dict[str, Any]:
    """A folder with random tensors; gives them back."""
    import torch

    from megatronapp_trainer.checkpoint.convert.families import FAMILIES
    from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
    from megatronapp_trainer.checkpoint.convert.rules import steps

    family = FAMILIES[config["model_type"]]
    shape = family.read(ConfigKeys(config, ""))
    tensors = {
        name: torch.randn(size)
        for step in steps(family.rules, shape, family.prefixes[0] if prefix is None else prefix)
        for name, size in zip(step.names, step.sizes(shape), strict=True)
    }
    rewrite(path, tensors, config)
    return tensors


def rewrite(path: pathlib.Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """A folder with these tensors in one file."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def read(path: pathlib.Path) -> dict[str, Any]:
    """The tensors of a folder with one file."""
    from safetensors.torch import load_file

    return dict(load_file(path / "model.safetensors"))
