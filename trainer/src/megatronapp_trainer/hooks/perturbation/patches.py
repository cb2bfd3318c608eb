"""Patches: activations that the prompt of a source gives, put in at the same site, layer, head and mapped position.

A range of positions that counts from the start maps a position to the same one of the source; one that counts from the
end of the prompt maps it by its distance to the end.
"""

import dataclasses

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation, PositionRange, RecipeError
from megatronapp_trainer.hooks.perturbation.row_context import PromptPart, RowContext


def patched_positions(perturbation: Perturbation, length: int, source_length: int) -> dict[int, int]:
    """Return the position of the source for each position of a prompt that is patched; the first range has precedence.

    Raises RecipeError with the place of a position that the source does not have, or of a range without a position.
    """
    found: dict[int, int] = {}
    ranges = perturbation.positions or (PositionRange(),)
    for place, selected in enumerate(ranges):
        positions = _positions(selected, length)
        if not positions:
            raise RecipeError(
                f"positions.{place}: selects no token of a prompt of {length} tokens; write positions within it"
            )
        offset = 0 if selected.origin == "start" else source_length - length
        for position in positions:
            if not 0 <= position + offset < source_length:
                raise RecipeError(
                    f"positions.{place}: token {position} of the prompt ({length} tokens) has no counterpart in the "
                    f"source ({source_length} tokens); select fewer positions, or write origin: promptEnd to count "
                    "from the ends of both"
                )
            found.setdefault(position, position + offset)
    return found


def recorded_positions(perturbation: Perturbation, source_length: int) -> list[int]:
    """Return the positions of a source that prompts of any length may be patched with."""
    ranges = perturbation.positions or (PositionRange(),)
    return sorted({position for selected in ranges for position in _positions(selected, source_length)})


def _positions(selected: PositionRange, length: int) -> range:
    """Return the positions of a range in a prompt of this length; without end it ends with the prompt."""
    if selected.origin == "start":
        return range(selected.first, length if selected.end is None else min(selected.end, length))
    return range(max(0, length + selected.first), length + (selected.end or 0))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PatchedRows:
    """Rows of a forward pass that are patched, and the rows of the recorded values that they get; int64."""

    rows_R: torch.Tensor
    sources_R: torch.Tensor


class SourceValues:
    """Values of one patch, recorded while its source is read."""

    def __init__(self, perturbation: Perturbation, source_length: int) -> None:
        self._perturbation = perturbation
        self._source_length = source_length
        self._index = {place: row for row, place in enumerate(recorded_positions(perturbation, source_length))}
        self._values: dict[int, torch.Tensor] = {}
        """[positions, ..] by layer."""
        self._context: RowContext | None = None
        self._patched: PatchedRows | None = None

    @property
    def num_bytes(self) -> int:
        """Return the memory of the recorded values."""
        return sum(values.nbytes for values in list(self._values.values()))

    def record(self, value: torch.Tensor, layer: int, rows: slice, start: int) -> None:
        """Record the rows of the source in a forward pass; `start`: position of the first of them."""
        places = {
            row: self._index[start + row - rows.start]
            for row in range(rows.start, rows.stop)
            if start + row - rows.start in self._index
        }
        if not places:
            return
        if layer not in self._values:
            self._values[layer] = value.new_zeros((len(self._index), *value.shape[1:]))
        device = value.device
        taken = value.index_select(0, torch.tensor(list(places), device=device))
        self._values[layer].index_copy_(0, torch.tensor(list(places.values()), device=device), taken)

    def patched(self, value: torch.Tensor, layer: int, rows: RowContext, heads: torch.Tensor | None) -> torch.Tensor:
        """Return a value with the recorded numbers put in. `heads`: selected heads, bool [heads, 1]; None: all."""
        found = self._rows_of(rows, value.device)
        if found is None:
            return value
        new = self._values[layer].index_select(0, found.sources_R)
        if heads is not None:
            new = torch.where(heads, new, value.index_select(0, found.rows_R))
        return value.index_copy(0, found.rows_R, new)

    def _rows_of(self, rows: RowContext, device: torch.device) -> PatchedRows | None:
        """Return the patched rows of a forward pass, the same for all layers; None without one."""
        if rows is not self._context:
            pairs = [pair for part in rows.parts for pair in self._pairs(part)]
            columns = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).t()
            self._patched = PatchedRows(rows_R=columns[0], sources_R=columns[1]) if pairs else None
            self._context = rows
        return self._patched

    def _pairs(self, part: PromptPart) -> list[tuple[int, int]]:
        first, count = part.rows.start, part.rows.stop - part.rows.start
        found = patched_positions(self._perturbation, part.prompt_length, self._source_length)
        return [
            (first + position - part.start, self._index[source])
            for position, source in found.items()
            if 0 <= position - part.start < count
        ]
