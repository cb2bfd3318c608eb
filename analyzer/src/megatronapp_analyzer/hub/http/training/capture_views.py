"""Captured steps of a training as answers show them."""

import math
from typing import Any

from megatronapp_analyzer.hub.http.training import capture_schemas as schemas
from megatronapp_analyzer.hub.state.capture_store import CapturedStep, CaptureStore
from megatronapp_analyzer.hub.state.captures import TrainingCaptures
from megatronapp_common.scope.layer_statistics import (
    FIRST_EXPONENT,
    SITES,
    WEIGHT,
    Records,
    SiteLayer,
    first_not_finite,
)

MAX_STEPS = 256
"""Most steps of an answer, the newest."""


def captures_view(
    store: CaptureStore,
    site: str,
    quantity: schemas.Quantity,
    *,
    first: int | None,
    last: int | None,
    every: int | None,
) -> schemas.Captures:
    """Return a quantity of a site over the steps from `first` to `last`. `every`: interval of captures."""
    shown = store.shown()
    sites = {row.site for step in shown for row in step.rows}
    steps = [step for step in shown if (first is None or step.step >= first) and (last is None or step.step <= last)][
        -MAX_STEPS:
    ]
    layers = sorted({row.layer for step in steps for row in step.rows if row.site == site})
    found = [[step.rows.get(SiteLayer(site, layer)) for step in steps] for layer in layers]
    weights = [[step.rows.get(SiteLayer(WEIGHT, layer)) for step in steps] for layer in layers]
    return schemas.Captures(
        every=every,
        sites=[name for name in SITES if name in sites] + sorted(sites.difference(SITES)),
        site=site,
        quantity=quantity,
        steps=[step_view(step) for step in steps],
        layers=layers,
        values=[
            [None if record is None else _shown(record, weight, quantity) for record, weight in zip(*rows, strict=True)]
            for rows in zip(found, weights, strict=True)
        ],
        not_finite=[[0 if record is None else _not_finite(record) for record in row] for row in found],
    )


def captures_summary(captures: TrainingCaptures, every: int | None) -> schemas.CapturesSummary | None:
    """Return what is there of captures; None where no rank captures and no step was captured."""
    shown, probed = captures.store.shown(), captures.texts.steps
    if every is None and not shown:
        return None
    return schemas.CapturesSummary(
        every=every,
        newest=shown[-1].step if shown else None,
        newest_probe=probed[-1].step if probed else None,
    )


def details_view(step: CapturedStep) -> schemas.CapturedStepDetails:
    """Return all numbers of a step, in the order of computation."""
    order = {name: place for place, name in enumerate(SITES)}
    rows = sorted(step.rows, key=lambda row: (order.get(row.site, len(order)), row.site, row.layer))
    return schemas.CapturedStepDetails(
        step=step_view(step),
        first_exponent=FIRST_EXPONENT,
        statistics=[_statistics(row, step.rows[row]) for row in rows],
    )


def step_view(step: CapturedStep) -> schemas.CapturedStepView:
    """Return a step without its numbers."""
    first = first_not_finite(step.rows, (record[0] for record in step.rows.values()))
    return schemas.CapturedStepView(
        step=step.step,
        attempt=step.attempt,
        missing=step.missing,
        first_not_finite=None if first is None else schemas.SiteOfLayer(site=first.site, layer=first.layer),
        perturbation=step.perturbation,
        repeated=step.is_repeated,
    )


def _statistics(row: SiteLayer, record: Records) -> schemas.SiteStatistics:
    numbers: dict[str, Any] = {name: int(record[name][0]) for name in ("count", "nan", "inf", "zero")}
    return schemas.SiteStatistics(
        site=row.site,
        layer=row.layer,
        **numbers,
        mean=_quantity(record, "mean"),
        rms=_quantity(record, "rms"),
        largest=float(record["largest"][0]),
        histogram=record["histogram"][0].tolist(),
    )


def _shown(record: Records, weight: Records | None, quantity: schemas.Quantity) -> float | None:
    """Return a quantity of a site of a layer. `weight`: the layer's weights, for `ratio`: the rms over theirs."""
    if quantity != "ratio":
        return _quantity(record, quantity)
    own, of_weight = _quantity(record, "rms"), None if weight is None else _quantity(weight, "rms")
    return None if own is None or not of_weight else _finite(own / of_weight)


def _quantity(record: Records, quantity: schemas.Quantity) -> float | None:
    """Return a quantity of a site; None where it has no value, and where sums have left the range of fp64."""
    count, not_finite = int(record["count"][0]), _not_finite(record)
    finite = count - not_finite
    if quantity == "notFinite":
        return not_finite / count if count else None
    if finite <= 0:
        return None
    if quantity == "zeros":
        return int(record["zero"][0]) / finite
    if quantity == "largest":
        return _finite(float(record["largest"][0]))
    if quantity == "mean":
        return _finite(float(record["sum"][0]) / finite)
    return _finite(math.sqrt(float(record["squares"][0]) / finite))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _not_finite(record: Records) -> int:
    return int(record["nan"][0] + record["inf"][0])
