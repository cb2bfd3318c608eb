"""Flags that Megatron-LM has and our configuration lacks: refused by name, not as a typing error."""

import functools
import importlib.resources


@functools.cache
def megatron_flags() -> frozenset[str]:
    """Their spellings, from ``megatron_flags.txt`` (Megatron-LM's arguments as of core 0.16)."""
    text = importlib.resources.files("megatronapp_trainer.config").joinpath("megatron_flags.txt").read_text("utf-8")
    return frozenset(text.split())
