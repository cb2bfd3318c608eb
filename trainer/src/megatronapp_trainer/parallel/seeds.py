"""Seeds of the random generators, and deterministic mode."""

import os
import random

import numpy as np
import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.parallel.layout import Layout


def seed_everything(config: TrainerConfig, layout: Layout) -> None:
    """Seed the generators as Megatron does: dropout differs between stages, and within layers between tensor ranks."""
    from megatron.core import tensor_parallel

    seed = config.training.seed + 100 * layout.pipeline_rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def apply_deterministic_mode(config: TrainerConfig) -> None:
    """Let torch refuse operations whose result depends on timing, if the flag requests it."""
    if not config.precision.deterministic_mode:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
