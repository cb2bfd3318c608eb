"""Cells of a sweep: the recipe of each, and its value from the rows of its branch. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.scope.comparison_requests import SweepMetric, SweepRequest
from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError, parse_recipe
from megatronapp_trainer.scope.comparison.row_results import RowResult


def cell_recipes(body: SweepRequest) -> list[list[Recipe]]:
    """Return the recipe of each cell, by layer, then strength or position. Raises RecipeError with the place."""
    template = json.loads(body.template.model_dump_json(by_alias=True, exclude_unset=True))
    if body.axes.strengths is not None and not {"coefficient", "rate"} & set(template["action"]):
        kind = template["action"]["type"]
        raise RecipeError(f"template.action.type: {kind} has no strength; write gaussian, uniform or bitFlip")
    return [
        [
            parse_recipe({"seed": body.seed, "perturbations": [{**_with(body, template, value), "layers": [layer]}]})
            for value in body.axes.strengths or body.axes.positions or ()
        ]
        for layer in body.axes.layers
    ]


def _with(body: SweepRequest, template: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Return the template with a strength, or at a position."""
    if body.axes.strengths is None:
        return {**template, "positions": [{"first": int(value), "end": int(value) + 1}]}
    name = "rate" if "rate" in template["action"] else "coefficient"
    return {**template, "action": {**template["action"], name: value}}


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
