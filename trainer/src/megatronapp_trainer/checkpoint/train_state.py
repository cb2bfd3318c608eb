"""The state of training that a checkpoint stores: all that a run needs to resume exactly."""

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainState:
    """Mutable state of training. ``checkpoint`` saves and restores it in place."""

    iteration: int = 0
    """Number of steps done."""
    consumed_samples: int = 0
    """Training samples used so far, over all replicas; where the next step begins to read."""
    order_samples: int | None = None
    """Number of samples for which the training data is shuffled; None: that of the flags."""
    skipped_iterations: int = 0
    """Number of steps whose update the optimizer refused."""
    validation_due: bool = False
    """True if an evaluation is due after this step and has not ended, because of a stop."""
    chunks: list[Any]
    """Model chunks of this rank, each wrapped in megatron-core's DistributedDataParallel."""
    optimizer: Any
    """MegatronOptimizer over all chunks; None on a rank that only runs forward passes."""
    scheduler: Any
    """OptimizerParamScheduler, whose steps are samples; None where there is no optimizer."""
