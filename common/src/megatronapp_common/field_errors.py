"""Errors of request validation (pydantic's `ErrorDetails`) in plain words, the same at hub, gateway and server."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

MOST = 8
"""Errors that one message names."""
SOURCES = frozenset({"body", "path", "query", "header", "cookie"})
_SENTENCES = {
    "missing": "must be given",
    "extra_forbidden": "there is no such field",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of at most 4,300 digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} elements, and has {actual_length}",
    "too_long": "must have at most {max_length} elements",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "none_required": "must be null, or not given",
    "value_error": "{error}",
    "json_invalid": "is not valid JSON: {error}",
}


def describe(errors: Sequence[Mapping[str, Any]], *, tags: Collection[str] = ()) -> str:
    """Describe all errors in one line, each after its field. `tags`: names of union members, omitted from fields."""
    parts = [f"{place_of(error, tags=tags) or 'the body'}: {_describe_error(error)}" for error in errors[:MOST]]
    return "; ".join(dict.fromkeys(parts)) + (f"; and {len(errors) - MOST} more" if len(errors) > MOST else "")


def place_of(error: Mapping[str, Any], *, tags: Collection[str] = ()) -> str:
    """Return the field as a path with dots; empty for the body as a whole."""
    location = error["loc"]
    if error["type"] == "json_invalid":  # FastAPI gives the position in the text instead of a field
        return ""
    inner = location[1:] if location and location[0] in SOURCES else location
    return ".".join(str(part) for part in inner if part not in tags)


def _describe_error(error: Mapping[str, Any]) -> str:
    sentence = _SENTENCES.get(error["type"])
    if sentence is None:
        return str(error["msg"])
    context = error.get("ctx") or {}
    found = sentence.format_map(
        {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
    )
    if error["type"] == "json_invalid":
        found += f" (character {error['loc'][-1]})"
    return found
