"""Families of models that can be converted, by their names in config.json."""

from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.families.experts import MIXTRAL, QWEN2_MOE
from megatronapp_trainer.checkpoint.convert.families.family import HEAD, HuggingFaceFamily
from megatronapp_trainer.checkpoint.convert.families.gpt2 import GPT2
from megatronapp_trainer.checkpoint.convert.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3

__all__ = ["FAMILIES", "HEAD", "HuggingFaceFamily", "family_of"]

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE)}


def family_of(keys: ConfigKeys) -> HuggingFaceFamily:
    """Return the family of a config.json.

    Raises CheckpointError for one that cannot be converted.
    """
    family = FAMILIES[keys.require("model_type", None, *FAMILIES)]
    for architecture in keys.get("architectures", []):
        if architecture != family.architecture:
            raise keys.refusal(
                "architectures", architecture, f"of {family.model_type} only {family.architecture} is converted"
            )
    return family
