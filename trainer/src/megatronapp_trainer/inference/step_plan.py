"""Plan of one step of generation as the ranks receive it. It is complete: the ranks store nothing but their caches.

All tokens of a step are packed into one sequence, so prompts of unequal length need no padding.
"""

import dataclasses

from megatronapp_trainer.hooks.forward_observer import ComparedRow, Segment
from megatronapp_trainer.inference.perturbed_steps import PerturbedStep


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Choice of one token. `noise` is a pure function of the request's seed and the token's position."""

    temperature: float
    top_k: int
    top_p: float
    noise: tuple[int, int]
    """Two keys of 32 bits each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputRequest:
    """Request for the output of one position of the plan."""

    row: int
    """Index among the tokens of the plan, in the order of its segments."""
    sampling: SamplingParams | None = None
    """Choose a token with these parameters; None: the likeliest one."""
    target: int | None = None
    """Report this token and choose none."""
    candidates: int = 0
    logits: bool = False
    measures: int = 0
    """Number of likeliest tokens in the statistics; 0: no statistics."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A step: read these tokens, report those positions.

    `decode`: each segment is the one newest token of its sequence, and no slot is used twice.
    """

    segments: tuple[Segment, ...]
    outputs: tuple[OutputRequest, ...]
    decode: bool
    perturbed: PerturbedStep | None = None
    """Recipe that all segments have; None: the model as it is."""
    compared: tuple[ComparedRow, ...] = ()
    """Outputs that are compared with those of another branch."""
    least_slots: int = 0
    """Least number of slots that a decode step computes: branches of a comparison have steps of equal size, so that
    equal numbers are rounded equally."""
    is_ahead: bool = False
    """A decode step that was planned before the tokens of the step before it were read."""
    reads_chosen: bool = False
    """Ranks read as tokens what the outputs of the step before have chosen, in their order; those in `segments` are
    placeholders."""

    @property
    def digest(self) -> str | None:
        """Return the name of the recipe; None without perturbation."""
        return None if self.perturbed is None else self.perturbed.digest
