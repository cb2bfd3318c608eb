"""Sentences from the validator's errors: where, what is wrong, what to write."""

import difflib
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatronapp_common.job.api.cluster import (
    IMAGE_PATTERN,
    LABEL_KEY_PATTERN,
    OBJECT_NAME_PATTERN,
    QUALIFIED_PATTERN,
    URI_PATTERN,
)
from megatronapp_common.job.api.metadata import JOB_NAME_PATTERN, NAME_PATTERN
from megatronapp_common.job.api.network import ATTACHMENT_PATTERN, INTERFACE_PATTERN
from megatronapp_common.job.api.quantity import MEMORY_CAP_PATTERN, QUANTITY_PATTERN
from megatronapp_common.job.api.scope import MODULE_PATTERN
from megatronapp_common.job.api.spec import VARIABLE_PATTERN
from megatronapp_common.job.api.training import SPLIT_PATTERN
from megatronapp_common.job.fields import (
    Location,
    describe_type,
    fields_by_alias,
    model_of,
    type_at,
    walk,
    without_none,
)
from megatronapp_common.scope.perturbation.recipe import DIGEST_PATTERN

SHOWN_CHARACTERS = 60
HINTS = {
    "valueFrom": "unknown field; write a variable from a Secret or ConfigMap under podTemplate.spec.containers, in the "
    "env of the container trainer"
}
"""Fields of Kubernetes that belong elsewhere, with what to write."""
LISTED_FIELDS = 8
"""Most fields of a block that are listed where another value is in its place."""
LISTED_CHOICES = 3
"""Longest list of choices that a message shows; among more only the nearest one is named."""


def describe_errors(
    error: ValidationError, root: type[BaseModel], *, prefix: str = "", omitted: Collection[str] = ()
) -> list[str]:
    """Return one line for each error of a validation of ``root``, except those of the omitted types.

    `prefix` is the path of ``root`` in the document.
    """
    details = [detail for detail in error.errors(include_url=False) if detail["type"] not in omitted]
    return [f"{prefix}{path_text(detail['loc'])}: {_sentence(detail, root)}" for detail in details]


def path_text(location: Location) -> str:
    """Return the path as users write it: spec.faults[0].rank."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the document"


def _sentence(detail: ErrorDetails, root: type[BaseModel]) -> str:
    location, kind = detail["loc"], detail["type"]
    if kind == "extra_forbidden":
        return _unknown_field(location, root)
    expected = type_at(root, location)
    if kind == "missing":
        return _missing(str(location[-1]), expected)
    value = _shown(detail["input"])
    constraint = _CONSTRAINTS.get(kind)
    if constraint is not None:
        return f"{value} {constraint(detail.get('ctx', {}))}"
    if kind == "value_error":  # of a validator of ours, whose message has the correction
        return str(detail["ctx"]["error"])
    if kind == "literal_error":
        return _not_a_choice(detail["input"], expected)
    return f"{value} is not {describe_type(expected)}; {_instead(detail['input'], expected)}"


def _unknown_field(location: Location, root: type[BaseModel]) -> str:
    name, parent = str(location[-1]), model_of(type_at(root, location[:-1]))
    if name in HINTS:
        return HINTS[name]
    known = list(fields_by_alias(parent)) if parent else []
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not nearest:
        nearest = [alias for alias in known if alias.lower() == name.replace("_", "").replace("-", "").lower()]
    if nearest:
        return f"unknown field; did you mean {nearest[0]}?"
    elsewhere = [path for path, _ in walk(root) if path.split(".")[-1] == name and not path.startswith("status")]
    if elsewhere:
        return f"unknown field here; it belongs at {elsewhere[0]}"
    return f"unknown field; known here: {', '.join(known)}"


def _missing(name: str, expected: Any) -> str:  # noqa: ANN401
    plain = without_none(expected)
    if typing.get_origin(plain) is Literal and len(typing.get_args(plain)) == 1:
        return f"is missing; write {name}: {typing.get_args(plain)[0]}"
    return f"is missing; write {name} with {describe_type(expected)}"


def _not_a_choice(value: object, expected: Any) -> str:  # noqa: ANN401
    choices = [str(choice) for choice in typing.get_args(without_none(expected))]
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest and len(choices) > LISTED_CHOICES else ""
    return f"{_shown(value)} is not possible; write {' or '.join(choices)}{hint}"


def _instead(value: object, expected: Any) -> str:  # noqa: ANN401
    """Say which value to write instead of one of the wrong type."""
    plain = without_none(expected)
    if plain is str and isinstance(value, int | float):
        return f'write it in quotes: "{value}"'
    if typing.get_origin(plain) is tuple and not isinstance(value, list | dict) and value is not None:
        return f"write [{', '.join(_items(value, describe_type(typing.get_args(plain)[0])))}]"
    if plain in {int, float} and isinstance(value, str) and _as_number(value) is not None:
        return f"write it without quotes: {value.strip()}"
    if plain is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return "write one, or leave the field out" if value is None else f"write {_with_fields(expected)}"


def _items(value: object, type_of_item: str) -> list[str]:
    """Return the items of a list in YAML for a single value, which holds several if spaces are between them."""
    if not isinstance(value, str) or type_of_item not in {"text", "a whole number", "a number"}:
        return [str(value)]
    quoted = type_of_item == "text"
    return [repr(item) if quoted and _as_number(item) is not None else item for item in value.split()]


def _with_fields(expected: Any) -> str:  # noqa: ANN401
    """Describe a type, a block of few fields with their names."""
    block = None if typing.get_origin(without_none(expected)) is tuple else model_of(expected)
    known = [] if block is None else list(fields_by_alias(block))
    names = f": {', '.join(known)}" if 0 < len(known) <= LISTED_FIELDS else ""
    return f"{describe_type(expected)}{names}"


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: object) -> str:
    """Return the value as in YAML, shortened."""
    if isinstance(value, dict | list):
        return "a block of fields" if isinstance(value, dict) else "a list"
    text = "an empty value" if value is None else repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


PATTERNS = {
    NAME_PATTERN: "lower-case letters, digits and '-', with a letter or digit at both ends",
    JOB_NAME_PATTERN: "lower-case letters, digits and '-', a letter first and a letter or digit last",
    OBJECT_NAME_PATTERN: "lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    QUALIFIED_PATTERN: "a domain and a name, such as nvidia.com/gpu",
    LABEL_KEY_PATTERN: "the key of a label, such as topology.kubernetes.io/zone",
    IMAGE_PATTERN: "the reference of an image without spaces",
    URI_PATTERN: "an address without user and password, such as s3://bucket/path",
    ATTACHMENT_PATTERN: "NAME or NAMESPACE/NAME of a network",
    INTERFACE_PATTERN: "the name of an interface, or a regular expression without spaces for it",
    MEMORY_CAP_PATTERN: "a number of microbatches such as 8, or bytes such as 8Gi",
    QUANTITY_PATTERN: "a quantity such as 4, 500m or 16Gi",
    VARIABLE_PATTERN: "letters, digits and '_', no digit first",
    MODULE_PATTERN: "the dotted name of a Python module, such as team.places",
    DIGEST_PATTERN: "12 hex digits, such as 0123456789ab",
    SPLIT_PATTERN: "up to three numbers with commas between, such as 98,2,0",
}
_CONSTRAINTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda limits: f"is too small; write more than {limits['gt']:g}",
    "greater_than_equal": lambda limits: f"is too small; write {limits['ge']:g} or more",
    "less_than": lambda limits: f"is too large; write less than {limits['lt']:g}",
    "less_than_equal": lambda limits: f"is too large; write {limits['le']} or less",
    "string_too_short": lambda _: "is empty; write at least one character",
    "string_too_long": lambda limits: f"is too long; write at most {limits['max_length']} characters",
    "too_short": lambda limits: f"has {limits['actual_length']} items; write {limits['min_length']}",
    "too_long": lambda limits: f"has {limits['actual_length']} items; write at most {limits['max_length']}",
    "string_pattern_mismatch": lambda limits: f"is not allowed; write {PATTERNS[limits['pattern']]}",
    "finite_number": lambda _: "is not finite; write a number",
}
