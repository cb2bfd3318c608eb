"""All random states of a rank: torch on CPU and GPU, Megatron's tracker, numpy and Python."""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the present states."""
    from megatron.core import tensor_parallel

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def of_host(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states whose form does not depend on a rank's device."""
    return {name: states[name] for name in ("python", "numpy", "torch")}


def restore(states: dict[str, Any]) -> None:
    """Set the states that `capture` returned."""
    from megatron.core import tensor_parallel

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(states["tracker"]))  # which the tracker then changes
