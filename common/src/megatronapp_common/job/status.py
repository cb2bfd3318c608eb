"""Reading and writing of a status by the annotations of its types (`api.status`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, FailureAction, Phase, Status
from megatronapp_common.job.api.status_fields import MAX_COUNT

Path = tuple[int | str, ...]
_STATUS = TypeAdapter(Status)
_ENDS = {
    ConditionType.COMPLETE: Phase.SUCCEEDED,
    ConditionType.FAILED: Phase.FAILED,
    ConditionType.SUSPENDED: Phase.SUSPENDED,
}
"""Phases that a true condition proves; the first match is taken."""
_SAME_ATTEMPT = frozenset({FailureAction.FAIL_JOB, FailureAction.IGNORE})
"""Actions about a failure after which no other attempt begins."""


def status_document(status: Status) -> dict[str, Any]:
    """Return the `status` of a MegatronJob: camelCase, RFC 3339 times, without absent values.

    It holds everything that the plan remembers, because an operator may end between two plans.
    """
    ready = status.replicas.running if status.trains else None
    written = dataclasses.replace(status, replicas=dataclasses.replace(status.replicas, ready=ready))
    document: dict[str, Any] = _STATUS.dump_python(written, mode="json", exclude_none=True)
    return document


def read_status(document: Any) -> Status:  # noqa: ANN401 - a document of any shape
    """Parse a stored status: the inverse of `status_document`.

    No status is rejected. It may be empty, of an older release, or edited; what cannot be read is treated as absent,
    because an operator that stops at a status can never repair it. Counts are clamped instead. No attempt may have
    the number of an earlier one, so that an absent number follows from failures and pinned settings.
    """
    found, readable = _read(document or {})
    attempt = found.attempt if "attempt" in readable else _newest_attempt(found)
    # The field `phase` is only a summary for users: true conditions decide whether the job has ended.
    true = {condition.type for condition in found.conditions if condition.status}
    phase = next((end for kind, end in _ENDS.items() if kind in true), found.phase)
    completed = found.completion_time
    if completed is None and phase in TERMINAL_PHASES:
        completed = next((condition.since for condition in found.conditions if _ENDS.get(condition.type) is phase), 0.0)
    return dataclasses.replace(found, phase=phase, completion_time=completed, attempt=attempt)


def _newest_attempt(status: Status) -> int:
    """Return the attempt that follows from the rest of a status."""
    pinned = 0 if status.pinned is None else status.pinned.attempt
    failed = (failure.attempt + (failure.action not in _SAME_ATTEMPT) for failure in status.failures)
    return min(max(pinned, *failed, 0), MAX_COUNT)


def _read(document: Any) -> tuple[Status, Mapping[str, Any]]:  # noqa: ANN401
    """Parse a document without its wrong values; return it, too."""
    while True:
        try:
            return _STATUS.validate_python(document), document
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            wrong = {_wrong_value(detail) for detail in found}
            rest = {} if () in wrong else _without(document, wrong)
            if rest == document:  # the location of a wrong key is no path
                rest = _without(document, {path[:1] for path in wrong})
            document = {} if rest == document else rest


def _wrong_value(error: ErrorDetails) -> Path:
    """Return what an error makes wrong: a block without a required field, or a list of numbers, as a whole."""
    place = error["loc"]
    is_number = bool(place) and isinstance(place[-1], int) and error["type"] != "dataclass_type"
    return place[:-1] if is_number or error["type"] == "missing" else place


def _without(value: Any, paths: set[Path], at: Path = ()) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _without(item, paths, (*at, key)) for key, item in value.items() if (*at, key) not in paths}
    if isinstance(value, list | tuple):
        return [_without(item, paths, (*at, key)) for key, item in enumerate(value) if (*at, key) not in paths]
    return value
