"""Observers of forward passes while the model generates."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import torch

from megatronapp_trainer.hooks.step_boundary import StepBoundary

DISCARD = "discard"
"""Topic of a command: ids of requests that ended before a step which was planned ahead, and which that step reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence, from position `start` on."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    request_id: str = ""
    """The request that the tokens belong to, for observers on other ranks than 0."""

    @property
    def end(self) -> int:
        """Length of the sequence after these tokens."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRow:
    """Output of a step that belongs to a comparison of branches (docs/comparing-runs.md)."""

    name: str
    """Name of the comparison."""
    branch: int
    """Number of the branch; 0: the reference, with which the others are compared."""
    index: int
    """Number of the generated token that the output chooses, from 0."""
    output: int
    """Place among the outputs of the step."""
    token: int | None = None
    """Token of the reference at this index; None in the reference itself, which has not chosen it yet, and where the
    step before is the one that chooses it: the only one of `StepContext.chosen_R`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """A step of generation before it is computed."""

    segments: tuple[Segment, ...]
    """At prefill the layers get the tokens in this order."""
    output_rows: tuple[int, ...]
    """Tokens whose logits are computed, as places among the tokens of all segments."""
    decode: bool
    """Each segment is the newest token of its sequence, and the layers get one token per slot."""
    positions_N: torch.Tensor
    """Position of each token, on the device. At decode one per slot up to the last used one, 0 in idle slots, at the
    same address in every step with this number of slots."""
    compared: tuple[ComparedRow, ...] = ()
    """Outputs that are compared."""
    is_ahead: bool = False
    """The step was planned before the tokens of the step before it were read: they may have ended a request whose token
    it reads, and the `tokens` of its segments may be placeholders."""
    chosen_R: torch.Tensor | None = None
    """Tokens that the step before has chosen, on the device, if this step is ahead. Overwritten after this step."""

    @property
    def rows(self) -> int:
        """Number of tokens that the layers get, idle slots of a decode step included."""
        return self.positions_N.size(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """A forward pass that has been launched."""

    collected: Any
    """Result of `collect`, or what the CUDA graph that it was captured in has written."""
    logits: torch.Tensor | None
    """[R, V] of the output rows; None but on the last stage."""


class ForwardObserver(StepBoundary[StepContext, ForwardResult], Protocol):
    """Observer of forward passes, called on the engine's thread.

    The result of `step_begin` is the key of a family of CUDA graphs: forward passes with equal keys must launch the
    same work, and every rank of a tensor group must give equal keys in equal order. After None the step ends
    unobserved; otherwise `collect` and `step_end` follow.
    """

    def collect(self) -> Any:  # noqa: ANN401 - the observer's own
        """Launch what reads the forward pass that was just launched. Must not wait.

        At decode this may become part of a CUDA graph: it is not called when a graph is replayed, and the replay
        overwrites what it gave.
        """

    def settle(self) -> None:
        """Launch what is left of earlier steps: the weights that they ran with are about to change."""

    def forget(self, key: Hashable) -> None:
        """Drop what `collect` gave in steps with this key: their CUDA graphs have been dropped."""
