"""The reference of the manifest, generated from its types: one table per block."""

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatronapp_common.job.admission import ADMISSION_RULES
from megatronapp_common.job.api.types import MegatronJob
from megatronapp_common.job.fields import describe_type, fields_by_alias, model_of, without_none
from megatronapp_common.job.rules import CHANGE_RULES, SPEC_RULES, Rule

_HEAD = """\
# MegatronJob

Made from the types by `make generate`; do not edit.

A value of the wrong type or outside of its limits is refused with a sentence that says what to write, an unknown field
with the nearest known name. All problems of a manifest are listed at once.
"""
_RULES = """\
## Rules between fields

Judged by the API server and by `megatronapp`; the messages hold the values and what to write.

| field | refused with |
|---|---|
{}

## Pod templates

Judged by an admission policy of the Helm chart, as the schema cannot read them, and by `megatronapp`.

| field | refused with |
|---|---|
{}

## Changes

What may not change once the job exists.

| field | refused with |
|---|---|
{}
"""
LARGEST_INT32 = 2_147_483_647
_TABLE_HEAD = "| field | type | default | meaning |\n|---|---|---|---|"


def render_reference() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([_HEAD, *_sections(MegatronJob, ""), _rules()]) + "\n"


def _rules() -> str:
    return _RULES.format(*map(_rule_rows, (SPEC_RULES, ADMISSION_RULES, CHANGE_RULES))).rstrip()


def _rule_rows(rules: Iterable[Rule]) -> str:
    return "\n".join(f"| `spec{rule.field}` | {rule.message} |" for rule in rules)


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield a model's table, then those of the blocks below it."""
    fields = fields_by_alias(model)
    yield f"## {path or 'The object'}\n\n{(model.__doc__ or '').strip()}\n\n{_TABLE_HEAD}"
    yield "\n".join(_row(name, field) for name, field in fields.items()) + "\n"
    for name, field in fields.items():
        nested = model_of(field.annotation)
        if nested is not None:
            suffix = "[]" if typing.get_origin(without_none(field.annotation)) is tuple else ""
            yield from _sections(nested, f"{path}.{name}{suffix}".removeprefix("."))


def _row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", _type(field), _default(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    plain = without_none(field.annotation)
    if typing.get_origin(plain) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(plain))
    limits = [text for item in _constraints(field) if (text := _limit(item))]
    return ", ".join([describe_type(plain), *limits])


def _constraints(field: FieldInfo) -> Iterator[object]:
    """Yield limits on the field itself, also those inside of `X | None`."""
    yield from field.metadata
    if typing.get_origin(field.annotation) in {types.UnionType, typing.Union}:
        for part in typing.get_args(field.annotation):
            yield from getattr(part, "__metadata__", ())


def _limit(item: object) -> str:
    text = ""
    match item:
        case FieldInfo(metadata=inner):
            text = ", ".join(filter(None, map(_limit, inner)))
        case Ge(ge=value):
            text = f"{value} or more"
        case Gt(gt=value):
            text = f"above {value}"
        case Le(le=value) if value != LARGEST_INT32:
            text = f"{value} or less"
        case Lt(lt=value):
            text = f"below {value}"
        case MaxLen(max_length=value):
            text = f"at most {value} long"
    return text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel) or value in ((), {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
