"""The reference of the manifest, generated from its types: one table per block."""

from collections.abc import Iterable, Iterator

from megatronapp_common.job.admission import ADMISSION_RULES
from megatronapp_common.job.api.status import status_schema
from megatronapp_common.job.crd import Schema, resolve
from megatronapp_common.job.megatron_job import MegatronJob
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
_VALUES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a block of fields",
    "array": "a list",
}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "texts", "object": "blocks of fields"}
_LIMITS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "above {}",
    "maximum": "{} or less",
    "exclusiveMaximum": "below {}",
    "maxLength": "at most {} long",
    "maxItems": "at most {} long",
    "maxProperties": "at most {} long",
}
LARGEST_INT32 = 2_147_483_647
_TABLE_HEAD = "| field | type | default | meaning |\n|---|---|---|---|"


def render_reference() -> str:
    """Return the whole page as Markdown."""
    job, status = MegatronJob.model_json_schema(by_alias=True), status_schema()
    definitions = job["$defs"] | status["$defs"] | {"Status": status}
    return "\n".join([_HEAD, *_sections(job, "", definitions), _rules()]) + "\n"


def _rules() -> str:
    return _RULES.format(*map(_rule_rows, (SPEC_RULES, ADMISSION_RULES, CHANGE_RULES))).rstrip()


def _rule_rows(rules: Iterable[Rule]) -> str:
    return "\n".join(f"| `spec{rule.field}` | {rule.message} |" for rule in rules)


def _sections(schema: Schema, path: str, definitions: dict[str, Schema]) -> Iterator[str]:
    """Yield the table of a block, then those of the blocks below it."""
    fields, required = schema["properties"], schema.get("required", ())
    yield f"## {path or 'The object'}\n\n{schema['description']}\n\n{_TABLE_HEAD}"
    yield "\n".join(_row(name, resolve(field, definitions), name in required) for name, field in fields.items()) + "\n"
    for name, field in fields.items():
        value = next((choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"), field)
        block = value.get("items", value)
        block = definitions.get(block.get("$ref", "").rpartition("/")[2], block)
        if "properties" in block:
            nested = f"{path}.{name}{'[]' if 'items' in value else ''}".removeprefix(".")
            yield from _sections(block, nested, definitions)


def _row(name: str, field: Schema, required: bool) -> str:
    cells = (f"`{name}`", _type(field), "required" if required else _default(field), field.get("description", ""))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _type(field: Schema) -> str:
    choices = [field["const"]] if "const" in field else field.get("enum")
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = field.get("type", "string")  # without a type: a quantity, which the API server takes as a number, too
    values = _VALUES[kind]
    if kind == "array":
        values = f"a list of {_PLURALS[field['items'].get('type', 'object')]}"
    known = {name: text for name, text in _LIMITS.items() if field.get(name, LARGEST_INT32) != LARGEST_INT32}
    limits = [text.format(field[name]) for name, text in known.items() if kind != "string" or name == "maxLength"]
    return ", ".join([values, *limits])


def _default(field: Schema) -> str:
    value = field.get("default")
    if value is None or isinstance(value, dict | list):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
