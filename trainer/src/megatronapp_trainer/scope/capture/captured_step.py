"""State of the step that is being captured."""

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch

from megatronapp_trainer.hooks.forward_observer import StepContext
from megatronapp_trainer.hooks.hook_collector import SiteValues
from megatronapp_trainer.hooks.sites import Site
from megatronapp_trainer.scope.capture.capture_plan import CapturePlan
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions
from megatronapp_trainer.scope.capture.reductions import PromptChunk
from megatronapp_trainer.scope.capture.tracked_requests import PromptRead, TrackedRequest
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
    """Rows of all prompt chunks that are reported."""
    plan: CapturePlan | None = None
    """The plan of a decode step; None for a prompt."""
    pin_places: int = 0
    attended: int = 0
    logit_rows: Sequence[slice] = ()
    discarded: AbstractSet[str] = frozenset()
    """Requests that ended before this step, which was planned ahead: grows until the next step begins."""


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
