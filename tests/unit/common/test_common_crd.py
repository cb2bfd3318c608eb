"""The generated CRD is structural, says what the types say, and is not older than they are."""

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from megatronapp_common.job import load_job
from megatronapp_common.job.crd import custom_resource_definition, structural
from megatronapp_common.job.fields import walk
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.reference import render_reference
from megatronapp_common.job.rules import CHANGE_RULES, SPEC_RULES

KEYWORDS = {
    "type",
    "description",
    "properties",
    "required",
    "items",
    "enum",
    "default",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "pattern",
    "additionalProperties",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
}
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def crd() -> Schema:
    return custom_resource_definition()


@pytest.fixture(scope="module")
def schema(crd: Schema) -> Schema:
    found: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}[]")


def test_the_definition_is_small_enough_for_a_client_side_apply(crd: Schema) -> None:
    """`kubectl apply` stores the object as JSON in an annotation; the API server takes 262,144 bytes of annotations.

    The reserve is for annotations of others. It was 32 KiB before the control of trainings and the recipes of
    perturbations, whose fields `kubectl explain` describes.
    """
    text, reserve = json.dumps(crd, separators=(",", ":")), 24 << 10
    escapes = sum(map(text.count, "<>&"))  # which Go writes as six characters, such as \u003c
    assert len(text.encode()) + 5 * escapes < (256 << 10) - reserve


def test_nothing_but_structural_keywords(schema: Schema) -> None:
    for path, node in nodes(schema):
        assert set(node) <= KEYWORDS, path
        assert isinstance(node.get("type"), str) != ("x-kubernetes-int-or-string" in node), path


def test_every_field_has_a_description(schema: Schema) -> None:
    bare = [path for path, node in nodes(schema) if "description" not in node and not path.endswith("[]")]
    assert bare == [".metadata"]


def test_defaults_fit_and_are_never_null(schema: Schema) -> None:
    for path, node in nodes(schema):
        if "default" in node:
            assert conforms(node["default"], node) == [], path


def test_the_status_has_no_defaults(schema: Schema) -> None:
    assert not [path for path, node in nodes(schema["properties"]["status"]) if "default" in node]


def test_every_field_of_the_types_is_there(schema: Schema) -> None:
    names = {path.removeprefix(".") for path, _ in nodes(schema)}
    expected = {path for path, _ in walk(MegatronJob) if not path.startswith("metadata.")}
    assert expected <= names


def test_names_columns_and_subresource(crd: Schema) -> None:
    assert crd["metadata"]["name"] == "megatronjobs.megatronapp.io"
    assert crd["spec"]["names"]["shortNames"] == ["mgj"]
    assert crd["spec"]["names"]["categories"] == ["all"]
    version = crd["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    assert [column["name"] for column in version["additionalPrinterColumns"]][:4] == [
        "Phase",
        "Nodes",
        "Ready",
        "Restarts",
    ]


def test_printer_columns_point_at_fields(crd: Schema, schema: Schema) -> None:
    names = {path for path, _ in nodes(schema)} | {".metadata.creationTimestamp"}
    paths = {column["jsonPath"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]}
    assert {re.sub(r"\[\?.*?\)\]", "[]", path) for path in paths} <= names


def test_limits_and_choices_are_taken_from_the_types(schema: Schema) -> None:
    spec = schema["properties"]["spec"]["properties"]
    assert spec["nodes"] == {
        "type": "integer",
        "format": "int64",
        "minimum": 1,
        "maximum": 4096,
        "description": "Workers; derived from the world size by default, otherwise 1.",
    }
    assert spec["training"]["properties"]["lr"]["exclusiveMinimum"] is True
    assert spec["training"]["properties"]["precision"]["enum"] == ["fp32", "bf16", "fp16"]
    assert spec["runPolicy"]["default"] == {}
    assert spec["runPolicy"]["properties"]["maxRestarts"]["default"] == 3
    assert spec["faults"]["maxItems"] == 64


def test_examples_conform(schema: Schema, repository: pathlib.Path) -> None:
    for path in sorted(repository.glob("examples/*.yaml")):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert conforms(document, schema) == []
        assert conforms(load_job(document).to_dict(), schema) == [], "with all defaults written out"


def test_a_wrong_value_does_not_conform(schema: Schema, build: Any) -> None:
    assert conforms(build({"spec.nodes": 0}), schema) == [".spec.nodes: 0 is below 1"]
    assert conforms(build({"spec.model.numLayers": ...}), schema) == [".spec.model: numLayers is missing"]
    assert conforms(build({"spec.training.precision": "fp8"}), schema) == [
        ".spec.training.precision: 'fp8' is no choice"
    ]


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def conforms(value: Any, schema: Schema, path: str = "") -> list[str]:
    """Return what the API server would refuse of a value, as far as types, choices, lower limits and presence are
    concerned."""
    if "x-kubernetes-int-or-string" in schema:
        return [] if type(value) in {int, str} else [f"{path}: {value!r} is no quantity"]
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
        return [f"{path}: {value!r} is no {schema['type']}"]
    found = [] if value in schema.get("enum", [value]) else [f"{path}: {value!r} is no choice"]
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path}: {value} is below {schema['minimum']}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += conforms(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        found += [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            found += conforms(item, schema.get("properties", {}).get(name, {"type": _type_of(item)}), f"{path}.{name}")
    return found


def _type_of(value: Any) -> str:
    return next(name for name, kinds in TYPES.items() if type(value) in kinds)


def test_references_and_nulls_are_resolved() -> None:
    schema = {
        "type": "object",
        "title": "T",
        "additionalProperties": False,
        "properties": {
            "a": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None, "description": "outer"},
            "b": {"const": "x", "type": "string"},
            "c": {"type": "number", "exclusiveMinimum": 0},
            "d": {"type": "object", "additionalProperties": {"type": "string"}},
            "e": {"type": "object", "additionalProperties": True},
        },
        "$defs": {"A": {"type": "integer", "description": "inner", "minimum": 1}},
    }
    assert structural(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "format": "int64", "minimum": 1, "description": "outer"},
            "b": {"type": "string", "enum": ["x"]},
            "c": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
            "d": {"type": "object", "additionalProperties": {"type": "string"}},
            "e": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }


@pytest.mark.full("`make verify`, which CI runs, compares the same files")
def test_generated_files_are_not_older_than_the_types(repository: pathlib.Path) -> None:
    command = [sys.executable, str(repository / "scripts" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reference_has_a_row_for_every_field() -> None:
    page = render_reference()
    for path, field in walk(MegatronJob):
        assert f"| `{path.split('.')[-1]}` |" in page, path
        assert field.description, path


def test_the_reference_lists_every_rule() -> None:
    page = render_reference()
    for rule in (*SPEC_RULES, *CHANGE_RULES):
        assert f"| `spec{rule.field}` | {rule.message} |" in page, rule.id
