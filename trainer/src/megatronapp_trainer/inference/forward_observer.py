"""Looking at the model while it generates: what a stage calls at the borders of a forward pass, if somebody looks.

Nothing of MegaScope is known here. Without a watcher a stage computes as if this module were not there.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import torch

from megatronapp_trainer.inference.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a watcher is told of a step before it is computed."""

    plan: StepPlan
    positions_N: torch.Tensor
    """On the device: of each token; at decode one per slot up to the last used one, at the same address in every step
    of as many slots, 0 in idle slots."""

    @property
    def rows(self) -> int:
        """Tokens that the layers see, idle slots of a decode step included."""
        return self.positions_N.size(0)


class ForwardObserver(Protocol):
    """Calls come in this order in each step, all in the thread of the engine."""

    def begin(self, sight: StepContext) -> Hashable:
        """A step comes. What of it is looked at: forward passes of one answer do the same on the device, and every rank
        of a tensor group gives equal answers in equal order. None: nothing."""

    def collect(self) -> Any:  # noqa: ANN401 - the watcher's own
        """The forward pass has been launched; launch what looks at it.

        At decode this may become part of a CUDA graph: it is not called where one is replayed, and what it gave is
        overwritten then. Waits for nothing.
        """

    def finish(self, found: Any, logits: torch.Tensor | None) -> None:  # noqa: ANN401 - the watcher's own
        """Take away what `collect` gave; `logits` [R, V] of the plan's outputs on the last stage."""

    def forget(self, looked: Hashable) -> None:
        """CUDA graphs of steps with this answer of `begin`, and so what `collect` gave in them, are gone."""
