"""Cells of a sweep: the recipe of each, and its value from the rows of its branch. Pure."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from megatronapp_common.field_errors import describe
from megatronapp_common.scope.comparison_requests import SweepMetric, SweepRequest
from megatronapp_common.scope.perturbation.recipe import (
    Action,
    Perturbation,
    PositionRange,
    Recipe,
    RecipeError,
)
from megatronapp_trainer.scope.comparison.row_results import RowResult

Value = TypeVar("Value")


class SweepCells:
    """Recipes of the cells of a sweep, made when they are needed; what they have in common is stored once.

    Cells are numbered from 0, layer by layer.
    """

    def __init__(self, body: SweepRequest) -> None:
        """Check the template. Raises RecipeError with the place."""
        self._body = body
        self._values: Sequence[float] = body.axes.strengths or body.axes.positions or ()
        action = body.template.action
        if body.axes.strengths is not None and action.coefficient is None and action.rate is None:
            message = f"{action.type} has no strength; write gaussian, uniform or bitFlip"
            raise RecipeError(f"template.action.type: {message}")

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self._body.axes.layers) * len(self._values)

    @property
    def edges(self) -> list[int]:
        """Return the cells that have each layer and each other value at least once."""
        width = len(self._values)
        return [*range(width), *range(width, len(self), width)]

    def recipe(self, number: int) -> Recipe:
        """Return the recipe of a cell. Raises RecipeError for a value that the template cannot have."""
        line, place = divmod(number, len(self._values))
        template = self._body.template
        fields = {name: getattr(template, name) for name in template.model_fields_set}
        fields["layers"] = (self._body.axes.layers[line],)
        value = self._values[place]
        if self._body.axes.strengths is None:
            fields["positions"] = (PositionRange(first=int(value), end=int(value) + 1),)
        else:
            fields["action"] = _with_strength(template.action, value)
        with _located("perturbations", 0):
            return Recipe(seed=self._body.seed, perturbations=(Perturbation(**fields),))

    def matrix(self, known: Mapping[int, Value]) -> list[list[Value | None]]:
        """Return values by layer, then strength or position; None for a cell without one."""
        values = list(map(known.get, range(len(self))))
        width = len(self._values)
        return [values[first : first + width] for first in range(0, len(self), width)]


def _with_strength(action: Action, value: float) -> Action:
    """Return an action with another coefficient or rate. Raises RecipeError."""
    name = "coefficient" if action.rate is None else "rate"
    with _located("perturbations", 0, "action"):
        return Action(**{field: getattr(action, field) for field in action.model_fields_set} | {name: value})


@contextlib.contextmanager
def _located(*place: str | int) -> Iterator[None]:
    """Turn errors of a model into those of the recipe. `place`: of the model in the recipe."""
    try:
        yield
    except ValidationError as error:
        errors = [{**found, "loc": (*place, *found["loc"])} for found in error.errors(include_url=False)]
        raise RecipeError(describe(errors)) from error


def cell_value(
    metric: SweepMetric, rows: Sequence[RowResult], ids: Sequence[int], chosen: Sequence[int]
) -> float | None:
    """Return the metric of a cell; None: no divergence, or not a number.

    `ids`: tokens of A, which the branch has read. `chosen`: those that it would have chosen.
    """
    if metric == "firstDivergence":
        places = (place for place, pair in enumerate(zip(ids, chosen, strict=True)) if pair[0] != pair[1])
        return next(places, None)
    if metric == "meanKl":
        value = sum(row.divergence.kl for row in rows) / len(rows)
    else:
        first = next(row.divergence for row in rows if row.index == 0)
        value = first.logprob_b - first.logprob_a
    return value if math.isfinite(value) else None
