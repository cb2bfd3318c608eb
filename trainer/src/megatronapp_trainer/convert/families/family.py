"""What a family of Hugging Face models is: names, tensors, and the two ways of its config.json."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from megatronapp_trainer.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.convert.rules import TensorRule
from megatronapp_trainer.convert.shape import ModelShape

HEAD = "lm_head.weight"
"""The output embedding, in every family. Folders of tied models leave it out, or repeat the input embedding there."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceFamily:
    """A family of models."""

    model_type: str
    """As config.json names it."""
    architecture: str
    """The class of transformers that holds the head."""
    prefixes: tuple[str, ...]
    """What may stand before the names of all tensors but the head's, the usual one first."""
    embedding: str
    """The name, behind the prefix, by which the prefix is found."""
    buffers: re.Pattern[str]
    """Names of tensors that hold no weights, in folders of older versions; they are left out."""
    rules: tuple[TensorRule, ...]
    read: Callable[[ConfigKeys], ModelShape]
    write: Callable[[ModelShape], dict[str, Any]]
    """Keys of a new config.json, in the spelling that old and new versions of transformers take."""
