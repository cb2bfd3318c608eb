"""What a capture keeps of the step that is being captured, and from one decode step to the next."""

import dataclasses
from collections.abc import Sequence

import torch

from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.hooks.hook_collector import SiteValues
from megatronapp_trainer.hooks.sites import Site
from megatronapp_trainer.inference.forward_observer import StepContext
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions
from megatronapp_trainer.scope.capture.reductions import PromptChunk
from megatronapp_trainer.scope.tracked_requests import PromptRead, TrackedRequest
from megatronapp_trainer.scope.transfer.device_copy import PackedBuffer

StepReads = Sequence[tuple[TrackedRequest, Sequence[PromptRead]]]
"""The captured requests of a step, and the rows of their prompts that it reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """A step while it is captured."""

    context: StepContext
    recipes: Sequence[CaptureSpec]
    touched: Sequence[TrackedRequest] = ()
    """Requests whose tokens a decode step reads."""
    works: Sequence[PromptChunk] = ()
    count: int = 0
    view: "CapturePlan | None" = None
    """The plan of a decode step; None for a prompt."""
    pin_places: int = 0
    attended: int = 0
    logit_rows: Sequence[slice] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapturePlan:
    """State that decode steps share while the same runs capture the same sites."""

    tracked: tuple[TrackedRequest, ...]
    captures: tuple[CaptureSettings | None, ...]
    specs: tuple[CaptureSpec | None, ...]
    """The specification of each run, rebuilt on every rank when it changes."""
    recipes: tuple[CaptureSpec, ...]
    pixels: Sequence[PixelReductions]
    active_sites: frozenset[Site]
    """Sites that are hooked on any rank of the tensor group. The forward pass depends on nothing else."""
    sites: dict[str, Site]
    picks: dict[str, torch.Tensor | None]
    pins: list[tuple[int, int]]
    most_pins: int
    """The largest number of pins on a rank of the tensor group."""
    groups: list[int]
    """The group of each run."""
    pinned: list[list[tuple[int, int, int]]]
    """Pins of each run: place among all pins, layer, head."""

    def matches(self, tracked: Sequence[TrackedRequest]) -> bool:
        """True if the same runs are tracked with unchanged captures."""
        return len(tracked) == len(self.tracked) and all(
            one is known and one.capture is capture and one.recipe is wanted
            for one, known, capture, wanted in zip(tracked, self.tracked, self.captures, self.specs, strict=True)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeValues:
    """Values of the layers in a decode step. A CUDA graph writes them to the same addresses in each replay."""

    values: dict[str, SiteValues]
    positions_N: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionGraphFamily:
    """Key of reduction graphs that share memory and are dropped together."""

    active_sites: frozenset[Site]
    recipes: tuple[CaptureSpec, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReductionResult:
    """Results of reductions. A CUDA graph reads the tensors it was captured with, so they are kept alive here."""

    buffer: PackedBuffer
    decode_values: DecodeValues
    pixels: Sequence[PixelReductions]
