"""Rotary positions in config.json: plain ones, and those of Llama 3.1 for long contexts.

transformers 5 stores all of it in ``rope_parameters``; earlier versions have ``rope_theta`` and ``rope_scaling``.
"""

from typing import Any

from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.config import ModelConfig

_THETA = 10000
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Values of Llama 3.1, 3.2 and 3.3, the only ones that megatron-core supports."""


def read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields of ModelConfig.

    Raises CheckpointError for another kind of rotary positions.
    """
    scaling = keys.part("rope_parameters" if keys.get("rope_parameters") else "rope_scaling")
    base = scaling.number("rope_theta", keys.number("rope_theta", _THETA))
    for where in (keys, scaling):
        where.require("partial_rotary_factor", 1, 1)
    name = "rope_type" if scaling.has("rope_type") else "type"
    if scaling.require(name, "default", "default", "llama3") == "default":
        return {"rotary_base": base}
    for key, value in _LLAMA3.items():
        scaling.require(key, None, value)
    return {"rotary_base": base, "use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", 8)}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the keys in the older spelling, which newer versions accept, too."""
    scaling = {"rope_type": "llama3", "factor": float(model.rope_scaling_factor), **_LLAMA3}
    return {
        "rope_theta": float(model.rotary_base),
        "rope_scaling": scaling if model.use_rope_scaling else None,
    }
