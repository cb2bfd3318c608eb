"""Flags that the trainer refuses by name, with the reason, instead of as a typo."""

import functools
import importlib.resources
import re
from collections.abc import Sequence
from typing import Final

from megatronapp_common.migration.names import FLAGS, SAME

ANSWERS: Final = {
    "--use-rotary-position-embeddings": "give --position-embedding-type rope",
    "--no-position-embedding": "give --position-embedding-type rope or none",
}
"""Flags of Megatron-LM and of old scripts, with their replacements."""
_NOT_SUPPORTED: Final = "a flag of Megatron-LM that the trainer does not support yet"


@functools.cache
def megatron_flags() -> frozenset[str]:
    """Return the flags that only Megatron-LM has, from ``megatron_flags.txt`` (its arguments as of core 0.16)."""
    text = importlib.resources.files("megatronapp_common.migration").joinpath("megatron_flags.txt").read_text("utf-8")
    return frozenset(text.split())


def unavailable(flag: str) -> str | None:
    """Explain why the trainer refuses a flag, and what to write instead; None for a flag that is not listed."""
    if flag in ANSWERS:
        return ANSWERS[flag]
    if flag in FLAGS:
        return None if FLAGS[flag].startswith(SAME) else FLAGS[flag]
    return _NOT_SUPPORTED if flag in megatron_flags() else None


def without_unavailable(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a training command into arguments that the trainer takes and other flags, with their values and reasons."""
    rest: list[str] = []
    refused: list[tuple[str, str]] = []
    reason: str | None = None
    for argument in arguments:
        is_flag = re.match(r"-+[A-Za-z]", argument) is not None
        reason = unavailable(argument.partition("=")[0]) if is_flag else reason
        if reason is None:
            rest.append(argument)
        elif is_flag:
            refused.append((argument, reason))
        else:
            refused[-1] = (f"{refused[-1][0]} {argument}", reason)
    return rest, refused
