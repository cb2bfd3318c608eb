"""Traversal of the types: the fields of a model, and the type at a path."""

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Location = Sequence[str | int]


def fields_by_alias(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the model's fields under their names in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def without_none(annotation: Any) -> Any:  # noqa: ANN401
    """Return the type without Annotated and `| None`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return without_none(typing.get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return without_none(parts[0]) if len(parts) == 1 else annotation
    return annotation


def item_type(annotation: Any) -> Any:  # noqa: ANN401
    """Return the type of a list's items, or the type itself."""
    plain = without_none(annotation)
    return without_none(typing.get_args(plain)[0]) if typing.get_origin(plain) is tuple else plain


def model_of(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401
    """Return the model that a field, or each item of it, holds; None for other types."""
    plain = item_type(annotation)
    return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None


def type_at(root: type[BaseModel], location: Location) -> Any:  # noqa: ANN401
    """Return the type at a path such as ("spec", "faults", 0, "rank"); None beyond the types."""
    current: Any = root
    for part in location:
        if isinstance(part, int):
            current = item_type(current)
            continue
        plain = without_none(current)
        if typing.get_origin(plain) is dict:
            current = typing.get_args(plain)[1]
            continue
        model = model_of(current)
        field = fields_by_alias(model).get(part) if model else None
        if field is None:
            return None
        current = field.annotation
    return current


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field below a model with its dotted path in YAML; items of lists have `[]` in theirs."""
    for alias, field in fields_by_alias(model).items():
        path = f"{prefix}.{alias}" if prefix else alias
        yield path, field
        nested = model_of(field.annotation)
        if nested is not None:
            is_list = typing.get_origin(without_none(field.annotation)) is tuple
            yield from walk(nested, path + "[]" if is_list else path)


def describe_type(annotation: Any) -> str:  # noqa: ANN401
    """Describe the values of a type to users, in a few words."""
    plain = without_none(annotation)
    origin = typing.get_origin(plain)
    if origin is Literal:
        return " or ".join(str(value) for value in typing.get_args(plain))
    if origin is tuple:
        return f"a list of {_plural(describe_type(typing.get_args(plain)[0]))}"
    if origin is dict or model_of(plain) is not None:
        return "a block of fields"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(plain, "a value")


def _plural(words: str) -> str:
    return {
        "a whole number": "whole numbers",
        "a number": "numbers",
        "text": "texts",
        "a block of fields": "blocks of fields",
    }.get(words, words)
