"""Random generators bound to tasks: dropout masks do not depend on the order of the tasks."""

import random

import torch
from megatron.core.tensor_parallel.random import (
    _get_all_rng_states,
    _set_all_rng_states,
    model_parallel_cuda_manual_seed,
)

from megatronapp_trainer.pipeline.planning.tasks import Task


class TaskRandom:
    """Seeds the generators for each forward task, from a number that is drawn at the beginning of the step.

    That number is drawn from a generator whose state is in checkpoints, so that a resumed run draws the same masks. At
    the end of the step all generators are as they were after that draw.
    """

    def begin_step(self) -> None:
        """Draw the number of the step."""
        self._number = int(torch.randint(2**31, (), device="cpu"))
        self._states = _get_all_rng_states()

    def seed(self, task: Task) -> None:
        """Seed the generators for a forward task."""
        model_parallel_cuda_manual_seed(random.Random(f"{self._number} {task}").getrandbits(31))

    def end_step(self) -> None:
        """Restore the generators to their state at the beginning of the step."""
        _set_all_rng_states(*self._states)
