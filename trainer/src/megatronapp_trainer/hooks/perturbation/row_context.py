"""Coordinates of the tokens of a forward pass, and which of them a perturbation selects."""

import dataclasses
from collections.abc import Sequence

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation, PositionRange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptPart:
    """Consecutive rows of a forward pass that belong to one prompt."""

    rows: slice
    slot: int
    start: int
    """Position of the first row."""
    prompt_length: int

    @property
    def prompt_rows(self) -> slice:
        """Rows whose tokens belong to the prompt."""
        return slice(self.rows.start, min(self.rows.stop, self.rows.start + max(0, self.prompt_length - self.start)))

    @property
    def ends_prompt(self) -> bool:
        """Return true if the prompt's last token is among the rows."""
        end: int = self.start + self.rows.stop - self.rows.start
        return self.start < self.prompt_length <= end


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """Tokens of a forward pass, N rows; int64 tensors on the device, which a CUDA graph reads at fixed addresses."""

    positions_N: torch.Tensor
    samples_N: torch.Tensor
    prompts_N: torch.Tensor
    """Length of the prompt that each row belongs to."""
    slots_N: torch.Tensor
    parts: Sequence[PromptPart] = ()
    """Rows by prompt while prompts are read; empty in a decode step."""

    def block(self, rows: slice) -> "RowContext":
        """Return the context of consecutive rows, without the parts by prompt."""
        return RowContext(
            positions_N=self.positions_N[rows],
            samples_N=self.samples_N[rows],
            prompts_N=self.prompts_N[rows],
            slots_N=self.slots_N[rows],
        )

    def of_rows(self, rows_R: torch.Tensor) -> "RowContext":
        """Return the context of some rows."""
        return RowContext(
            positions_N=self.positions_N.index_select(0, rows_R),
            samples_N=self.samples_N.index_select(0, rows_R),
            prompts_N=self.prompts_N.index_select(0, rows_R),
            slots_N=self.slots_N.index_select(0, rows_R),
        )


def selected_rows(perturbation: Perturbation, rows: RowContext) -> torch.Tensor | None:
    """Return which rows the positions and steps of a perturbation select, bool [N]; None: all of them."""
    masks = []
    if perturbation.positions is not None:
        masks.append(torch.stack([_in_range(place, rows) for place in perturbation.positions]).any(0))
    if (window := perturbation.steps) is not None:
        steps_N = (rows.positions_N - rows.prompts_N + 1).clamp_min(0)
        masks.append(_within(steps_N, window.first, window.end))
    if perturbation.action.over == "prompt":
        masks.append(rows.positions_N >= rows.prompts_N - 1)
    return None if not masks else torch.stack(masks).all(0)


def _in_range(place: PositionRange, rows: RowContext) -> torch.Tensor:
    positions_N = rows.positions_N if place.origin == "start" else rows.positions_N - rows.prompts_N
    return _within(positions_N, place.first, place.end)


def _within(values: torch.Tensor, first: int, end: int | None) -> torch.Tensor:
    inside = values >= first
    return inside if end is None else inside & (values < end)
