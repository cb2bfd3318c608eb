"""The state of training that a checkpoint stores: all that a run needs to resume exactly."""

import dataclasses
from typing import Any

NO_STEP = -1
"""Takes the place of the newest step where there is no checkpoint."""


@dataclasses.dataclass(kw_only=True, slots=True)
class PerturbedSteps:
    """Steps that were computed with a perturbation."""

    digest: str
    """Name of the recipe."""
    parameters: str | None
    """Parameters that were changed, `model` or `master`; None: none."""
    replica: int | None
    """Data-parallel replica that was perturbed; None: all alike."""
    first_step: int
    """First perturbed step, counted from 1."""
    last_step: int | None = None
    """Newest perturbed step; None: none has ended yet."""


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainState:
    """Mutable state of training. ``checkpoint`` saves and restores it in place."""

    iteration: int = 0
    """Number of steps done."""
    consumed_samples: int = 0
    """Training samples used so far, over all replicas; where the next step begins to read."""
    order_samples: int | None = None
    """Number of samples for which the training data is shuffled; None: that of the flags."""
    stream_state: str | None = None
    """State of the readers of a streamed data set, JSON; None: the samples are numbered."""
    skipped_iterations: int = 0
    """Number of steps whose update the optimizer refused."""
    validation_due: bool = False
    """True if an evaluation is due after this step and has not ended, because of a stop."""
    perturbed: list[PerturbedSteps] = dataclasses.field(default_factory=list)
    """Perturbed steps of the whole training, also those before a checkpoint that it was resumed from."""
    chunks: list[Any]
    """Model chunks of this rank, each wrapped in megatron-core's DistributedDataParallel."""
    optimizer: Any
    """MegatronOptimizer over all chunks; None on a rank that only runs forward passes."""
    scheduler: Any
    """OptimizerParamScheduler, whose steps are samples; None where there is no optimizer."""
