"""Description of a family of Hugging Face models: names, tensors, and both directions of its config.json."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.rules import TensorRule
from megatronapp_trainer.checkpoint.convert.shape import ModelShape

HEAD = "lm_head.weight"
"""Name of the output embedding, in every family. Folders of tied models omit it, or repeat the input embedding there.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceFamily:
    """One family of Hugging Face models."""

    model_type: str
    """Name of the family in config.json."""
    architecture: str
    """Class of transformers that has the head."""
    prefixes: tuple[str, ...]
    """Prefixes that the names of all tensors but the head's may have, the usual one first."""
    embedding: str
    """Name, without prefix, of the tensor by which the prefix is found."""
    buffers: re.Pattern[str]
    """Names of tensors in folders of older versions that are no weights; they are skipped."""
    rules: tuple[TensorRule, ...]
    read: Callable[[ConfigKeys], ModelShape]
    write: Callable[[ModelShape], dict[str, Any]]
    """Builder of the keys of a new config.json, in the spelling that old and new versions of transformers accept."""
