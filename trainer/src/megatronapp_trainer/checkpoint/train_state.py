"""What a checkpoint holds: everything that a run needs to go on as if it had never stopped."""

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainState:
    """Mutable state of training. ``checkpoint`` saves and restores it in place."""

    iteration: int = 0
    """Steps done."""
    consumed_samples: int = 0
    """Training samples used so far, over all replicas; where the next step begins to read."""
    order_samples: int | None = None
    """Number of samples for which the training data is shuffled, if not the one that the flags give."""
    skipped_iterations: int = 0
    """Steps whose update the optimizer refused."""
    validation_due: bool = False
    """An evaluation is due after this step and has not ended: a stop came first."""
    chunks: list[Any]
    """Model chunks of this rank, each wrapped in megatron-core's DistributedDataParallel."""
    optimizer: Any
    """MegatronOptimizer over all chunks."""
    scheduler: Any
    """OptimizerParamScheduler; its steps are samples."""
