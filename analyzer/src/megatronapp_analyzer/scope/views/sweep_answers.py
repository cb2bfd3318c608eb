"""A sweep as JSON or CSV, from a frame SCOPE_ANALYSIS. Pure."""

import csv
import io
from typing import Any

from megatronapp_analyzer.scope.schemas_comparison import Sweep, SweepSummary
from megatronapp_common.frames import Frame

SUMMARY_NAMES = frozenset(field.alias or name for name, field in SweepSummary.model_fields.items())
NAMES = frozenset(field.alias or name for name, field in Sweep.model_fields.items())


def sweep_summary(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas_comparison.SweepSummary`."""
    return {name: value for name, value in frame.header.items() if name in SUMMARY_NAMES}


def sweep_json(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas_comparison.Sweep`."""
    return {name: value for name, value in frame.header.items() if name in NAMES}


def sweep_csv(frame: Frame) -> bytes:
    """Return one line for each layer, with the values of the other axis as columns."""
    header = frame.header
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    name = "position" if header["strengths"] is None else "strength"
    columns = header["positions"] if header["strengths"] is None else header["strengths"]
    table.writerow(["layer", *(f"{name}_{value}" for value in columns)])
    for layer, values in zip(header["layers"], header["values"], strict=True):
        table.writerow([layer, *("" if value is None else value for value in values)])
    return out.getvalue().encode()
