"""A comparison as JSON or CSV, from a frame SCOPE_ANALYSIS. Pure."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.schemas_comparison import Comparison, ComparisonSummary
from megatronapp_analyzer.scope.views.lens_answer import numbers
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import unpack

SUMMARY_NAMES = frozenset(field.alias or name for name, field in ComparisonSummary.model_fields.items())
NAMES = frozenset(field.alias or name for name, field in Comparison.model_fields.items()) - {"drift", "heads"}


def comparison_summary(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas_comparison.ComparisonSummary`."""
    return {name: value for name, value in frame.header.items() if name in SUMMARY_NAMES}


def comparison_json(frame: Frame, *, heads: bool) -> dict[str, Any]:
    """Return the fields of `schemas_comparison.Comparison`; with the change of each head if `heads`.

    Raises FrameError.
    """
    found = _tensors(frame)
    answer = {name: value for name, value in frame.header.items() if name in NAMES}
    drift, changes = found.get("drift"), found.get("heads")
    answer["drift"] = [] if drift is None else numbers(drift)
    answer["heads"] = numbers(changes) if heads and changes is not None else None
    return answer


def comparison_csv(frame: Frame) -> bytes:
    """Return one line for each token, with the drift of each layer as columns. Raises FrameError."""
    drift = _tensors(frame).get("drift")
    layers = 0 if drift is None else drift.shape[0]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    choices = [f"{branch}_{name}" for branch in ("a", "b") for name in ("id", "text", "logprob", "other_logprob")]
    table.writerow(["index", "position", *choices, "kl", "overlap", "rank", *(f"drift_{n}" for n in range(layers))])
    for place, row in enumerate(frame.header["rows"]):
        tokens = [
            _choice(row[branch], name) for branch in ("a", "b") for name in ("id", "text", "logprob", "otherLogprob")
        ]
        moved = [] if drift is None else [f"{value:.7g}" if np.isfinite(value) else "" for value in drift[:, place]]
        measured = ("" if row[name] is None else row[name] for name in ("kl", "overlap", "rank"))
        table.writerow([row["index"], row["position"], *tokens, *measured, *moved])
    return out.getvalue().encode()


def _choice(choice: Mapping[str, Any] | None, name: str) -> Any:  # noqa: ANN401 - number or text
    value = None if choice is None else choice[name]
    return "" if value is None else value


def _tensors(frame: Frame) -> dict[str, NDArray[Any]]:
    """Return the tensors, whose last axis is that of the rows. Raises FrameError."""
    found = {tensor.name: tensor.data for tensor in unpack(frame)}
    rows = len(frame.header["rows"])
    if wrong := [name for name, data in found.items() if data.shape[-1] != rows]:
        raise FrameError(
            f"{', '.join(wrong)} of a comparison of {rows} tokens: the last axis is not that of the tokens"
        )
    return found
