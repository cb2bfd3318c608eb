"""Flags that the trainer does not have, and why: refused by name, not as a typing error."""

import functools
import importlib.resources
import re
from collections.abc import Sequence
from typing import Final

from megatronapp_common.migration.names import FLAGS, SAME

_FP16: Final = "belongs to fp16; write --bf16 without it"
ANSWERS: Final = {
    **dict.fromkeys(("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"), _FP16),
    "--use-rotary-position-embeddings": "give --position-embedding-type rope",
    "--no-position-embedding": "give --position-embedding-type rope or none",
}
"""Flags of Megatron-LM and of old scripts that something here takes the place of."""
_NOT_SUPPORTED: Final = "a flag of Megatron-LM that the trainer does not support yet"


@functools.cache
def megatron_flags() -> frozenset[str]:
    """Flags that only Megatron-LM has, from ``megatron_flags.txt`` (its arguments as of core 0.16)."""
    text = importlib.resources.files("megatronapp_common.migration").joinpath("megatron_flags.txt").read_text("utf-8")
    return frozenset(text.split())


def unavailable(flag: str) -> str | None:
    """Why the trainer does not take a flag, and what to write instead; None if it is not known to be refused."""
    if flag in ANSWERS:
        return ANSWERS[flag]
    if flag in FLAGS:
        return None if FLAGS[flag].startswith(SAME) else FLAGS[flag]
    return _NOT_SUPPORTED if flag in megatron_flags() else None


def without_unavailable(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words of a training command that the trainer takes; its other flags, with their values, each with why not."""
    rest: list[str] = []
    refused: list[tuple[str, str]] = []
    reason: str | None = None
    for word in words:
        is_flag = re.match(r"-+[A-Za-z]", word) is not None
        reason = unavailable(word.partition("=")[0]) if is_flag else reason
        if reason is None:
            rest.append(word)
        elif is_flag:
            refused.append((word, reason))
        else:
            refused[-1] = (f"{refused[-1][0]} {word}", reason)
    return rest, refused
