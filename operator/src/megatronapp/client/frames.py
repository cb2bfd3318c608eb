"""Answers of a hub as data frames of pandas."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.errors import HubError, OperatorError

if TYPE_CHECKING:
    import pandas as pd

TIMELINE_COLUMNS = {
    "rank": "rank",
    "kind": "kind",
    "chunk": "chunk",
    "microbatch": "microbatch",
    "startNs": "start_ns",
    "durationNs": "duration_ns",
    "flags": "flags",
    "runQueueNs": "run_queue_ns",
    "bytes": "bytes",
    "peer": "peer",
}
"""Columns of the hub's timeline, and their names in the frame."""
HOUR_COLUMNS = {
    "attempt": "attempt",
    "firstStep": "first_step",
    "lastStep": "last_step",
    "records": "records",
    "bytes": "bytes",
}
COUNTS = ("rank", "chunk", "start_ns", "duration_ns", "flags")
SPARSE = ("microbatch", "run_queue_ns", "bytes", "peer")
INTEGER = "Int64"
"""Type of columns of integers in which some values are absent."""


def timeline_frame(document: Mapping[str, Any]) -> "pd.DataFrame":
    """Return one row per span; `start_ns` counts from 1970, kinds have their names.

    `attrs["omitted"]` says what is missing in it, None if nothing is; a UserWarning says so, too. Raises HubError for a
    document of another shape.
    """
    pandas = _pandas()
    try:
        columns = {name: document[key] for key, name in TIMELINE_COLUMNS.items()}
        for name in COUNTS:
            columns[name] = pandas.array(columns[name], dtype="int64")
        for name in SPARSE:  # by way of floating-point numbers, large ones would not be exact
            columns[name] = pandas.array(columns[name], dtype=INTEGER)
        frame = pandas.DataFrame(columns)
        names = {int(kind): name for kind, name in document["kindNames"].items()}
        frame["kind"] = [names.get(kind, str(kind)) for kind in document["kind"]]
        frame["start_ns"] += document["originNs"]
        frame.insert(0, "step", document["step"])
        frame.insert(0, "attempt", document["attempt"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable("timeline", error) from error
    omitted = document.get("omitted")
    frame.attrs["omitted"] = None if omitted is None else replace_control_characters(str(omitted))
    if omitted is not None:
        warnings.warn(f"the timeline is incomplete: {frame.attrs['omitted']}", stacklevel=3)
    return frame


def series_frame(document: Mapping[str, Any]) -> "pd.DataFrame":
    """Return one row per point of a curve, with the columns attempt, step and value. Raises HubError as above."""
    pandas = _pandas()
    try:
        return pandas.DataFrame(
            {"attempt": document["attempts"], "step": document["steps"], "value": document["values"]}
        ).astype({"value": "float64"})
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable("curve", error) from error


def history_frame(document: Mapping[str, Any]) -> "pd.DataFrame":
    """Return one row per hour and attempt of stored spans. Raises HubError as above."""
    pandas = _pandas()
    try:
        hours = document["hours"]
        columns = {"hour": pandas.to_datetime([entry["hour"] for entry in hours], format="%Y-%m-%dT%H", utc=True)}
        for key, name in HOUR_COLUMNS.items():
            columns[name] = pandas.array([entry[key] for entry in hours], dtype=INTEGER)
        return pandas.DataFrame(columns)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable("history", error) from error


def rows_frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> "pd.DataFrame":
    """Return one row per document. `columns`: keys of the documents, and their names. Raises HubError as above."""
    pandas = _pandas()
    try:
        types = {key: "bool" if key == "complete" else "int64" for key in columns}
        return pandas.DataFrame(
            {name: pandas.array([row[key] for row in rows], dtype=types[key]) for key, name in columns.items()}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable("list", error) from error


def _pandas() -> Any:  # noqa: ANN401 - the module
    try:
        import pandas
    except ImportError as error:
        raise OperatorError(
            "the Python package `pandas` is not installed, which data frames need; "
            "run: pip install 'megatronapp-operator[client]', or read the documents of Hub.get"
        ) from error
    return pandas


def _unreadable(what: str, error: Exception) -> HubError:
    return HubError(f"the hub's {what} cannot be read ({type(error).__name__}: {error}); is it of another release?")
