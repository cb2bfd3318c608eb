"""A training run of this rank as `pretrain` does it, of which losses and gradient norms are kept."""

import os
import warnings
from typing import Any

from evaluated_training import EvaluationRecorder

Record = tuple[list[float], list[float]]
"""Losses and gradient norms by step."""


def train(flags: str) -> Record | None:
    """Train to the end. Returns what the reporting rank has seen, None on the others."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
    from megatronapp_trainer.training import progress

    os.environ[CONNECTIONS] = device_connections(flags.split())
    recorder = EvaluationRecorder()
    patched: Any = progress
    patched.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None
    pretrain.pretrain(parse(flags.split()))
    return (recorder.losses, recorder.grad_norms) if recorder.losses else None
