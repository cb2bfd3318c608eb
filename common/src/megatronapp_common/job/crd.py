"""The CustomResourceDefinition of MegatronJob, generated from its types.

The API server takes structural schemas only (OpenAPI v3.0): no references, no `null` alternatives, no
`additionalProperties: false` (it prunes, and refuses unknown fields under strict field validation).
"""

import re
from collections.abc import Iterable
from typing import Any

from megatronapp_common.job.api.metadata import Metadata
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.api.status import status_schema
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.rules import CHANGE_RULES, NAME_RULES, SPEC_RULES, Rule
from megatronapp_common.names import GROUP, KIND, VERSION

PLURAL = "megatronjobs"
Schema = dict[str, Any]
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "integer", ".status.replicaStatuses.desired", 0),
    ("Ready", "integer", ".status.replicaStatuses.ready", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Iteration", "integer", ".status.progress.iteration", 0),
    ("Slow", "string", ".status.slowNode", 0),
    ("Paused", "string", '.status.conditions[?(@.type=="Paused")].status', 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Attempt", "integer", ".status.attempt", 1),
    ("World", "integer", ".status.worldSize", 1),
    ("Queue", "string", ".spec.scheduling.queue", 1),
)
_NAME = Metadata.model_fields["name"].description
COSTLY = frozenset({"blend-alternates"})
"""Rules too expensive for the API server to evaluate on the old spec as well; each reads one block."""
_HAS_PROFILE = "||has(self.profile)"
"""CEL exception of jobs that name a profile: the operator judges their rules on the merged spec.

It is read last, after the rule has failed, because it reads `self` with its schema (`_PLAIN_SELF`).
"""
_PLAIN_SELF = "[?true?optional.of(self):optional.none()].all(self,{})"
_PLAIN_OLD_SELF = "[?true?optional.of(oldSelf):optional.none()].all(oldSelf,{})"
"""CEL text of a rule over `self` and `oldSelf` as plain data.

For each field that a rule reads of an object with a schema, the API server copies the schemas of all fields of that
object; so does the comparison of two objects, for each field. The value of an optional that a condition selects is
plain data, where reading a field costs a twentieth. The spec has 40 fields, and each of the 190 rules reads some.
"""
_TEXT_OR_SPACES = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\s+""")
_DROPPED = frozenset({"title", "additionalProperties", "prefixItems"})


def custom_resource_definition() -> Schema:
    """Return the whole definition, in the form that `kubectl apply` takes."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mgj"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Schema:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": _root()},
    }


def _root() -> Schema:
    """Return the schema of the object. `metadata` is the API server's own; a rule here may only read its name."""
    return {
        "type": "object",
        "description": (MegatronJob.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Always megatronapp.io/v1alpha1."},
            "kind": {"type": "string", "description": "Always MegatronJob."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "description": _NAME}}},
            "spec": structural(Spec.model_json_schema(by_alias=True)) | _spec_validations(),
            "status": structural(status_schema(), with_defaults=False),
        },
        **_name_validations(),
    }


def _spec_validations() -> Schema:
    """Return the rules of the spec. Those about changes apply to updates only."""
    return {
        "x-kubernetes-validations": [
            *(_lenient(rule, unless=_HAS_PROFILE) for rule in _of_server(SPEC_RULES)),
            *map(_of_change, _of_server(CHANGE_RULES)),
        ]
    }


def _name_validations() -> Schema:
    return {"x-kubernetes-validations": [_lenient(rule) for rule in _of_server(NAME_RULES)]}


def _lenient(rule: Rule, *, unless: str = "") -> Schema:
    """Return a rule that judges only changes in an update: a stored job that breaks it already may be edited.

    A rule may be newer than the job. Refusing every edit would make such a job impossible to suspend or resize.
    `unless` is CEL text of an exception, with its operator.

    A status write is judged as well, and must be cheap: the rule reads `self` and `oldSelf` as plain data.
    """
    if rule.id in COSTLY or "__" in rule.rule:  # an optional has no fields whose names CEL reserves, such as `__in__`
        block = rule.field.split(".")[1]
        lenient = f"({rule.rule}) || (oldSelf.hasValue() && oldSelf.value().{block} == self.{block})"
    else:  # not: the new spec breaks (!= k) the rule, and the old one keeps it; short, as each rule has this text
        lenient = f"![true,false].all(k,[?k?optional.of(self):oldSelf].all(self,({rule.rule})!=k))"
    return _validation(rule) | {"rule": compact(f"{lenient}{unless}"), "optionalOldSelf": True}


def _of_change(rule: Rule) -> Schema:
    """Return a rule about a change, which an update must keep."""
    text = _PLAIN_OLD_SELF.format(_PLAIN_SELF.format(rule.rule))
    return _validation(rule) | {"rule": compact(text)}


def _of_server(rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules that the schema itself does not enforce."""
    return [rule for rule in rules if not rule.in_schema]


def _validation(rule: Rule) -> Schema:
    """Return a rule in the form that the API server takes; its reason is the default, FieldValueInvalid."""
    return {
        "rule": compact(rule.rule),
        "fieldPath": rule.field,
        "message": rule.message,
        **({"messageExpression": compact(rule.message_expression)} if rule.message_expression else {}),
    }


def compact(text: str) -> str:
    """Return CEL text without the spaces that CEL does not need: `kubectl apply` stores all rules in one annotation.

    Spaces in literals are kept, and those between two identifiers, such as `word in words`. The text has no comments,
    which would extend over the rest, and no raw literals that end with a backslash.
    """

    def replaced(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        return " " if _in_identifier(before) and _in_identifier(after) else ""

    return _TEXT_OR_SPACES.sub(replaced, text)


def _in_identifier(character: str) -> bool:
    return character.isalnum() or character == "_"


def structural(schema: Schema, *, with_defaults: bool = True) -> Schema:
    """Convert a JSON Schema of pydantic to a structural one. A status has no defaults: the backend writes it whole."""
    return _convert(schema, schema.get("$defs", {}), with_defaults)


def _convert(node: Schema, definitions: dict[str, Schema], with_defaults: bool) -> Schema:
    node = resolve(node, definitions)
    out: Schema = {}
    for key, value in node.items():
        if key == "properties":
            out[key] = {name: _convert(child, definitions, with_defaults) for name, child in value.items()}
        elif key == "items":
            out[key] = _convert(value, definitions, with_defaults)
        elif key in {"exclusiveMinimum", "exclusiveMaximum"}:
            out |= {key.replace("exclusiveM", "m"): value, key: True}
        elif key == "const":
            out["enum"] = [value]
        elif key != "$defs" and key not in _DROPPED:
            out[key] = value
    return _finished(out, node, definitions, with_defaults)


def resolve(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Resolve references and remove the alternative `null`; keywords next to them win."""
    if "anyOf" in node:
        choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        assert len(choices) == 1, f"no structural schema says {choices}"
        outer = {key: value for key, value in node.items() if key != "anyOf" and (key, value) != ("default", None)}
        return resolve({**choices[0], **outer}, definitions)
    if "$ref" in node:
        outer = {key: value for key, value in node.items() if key != "$ref"}
        return {**resolve(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions), **outer}
    return node


def _finished(out: Schema, node: Schema, definitions: dict[str, Schema], with_defaults: bool) -> Schema:
    """Add what depends on the whole node: formats, free maps, defaults of blocks (filled by their fields' defaults)."""
    if not with_defaults:
        out.pop("default", None)
    if out.get("type") == "integer":
        out["format"] = "int64"
    if out.get("type") == "array" and "items" not in out:
        out["items"] = {"type": "integer", "format": "int64"}
    if out.get("type") == "object" and "properties" not in out:
        values = node.get("additionalProperties")
        if isinstance(values, dict):
            out["additionalProperties"] = _convert(values, definitions, with_defaults)
        else:
            out["x-kubernetes-preserve-unknown-fields"] = True
    if out.get("type") == "object" and "default" in out:
        out["default"] = {}
    return out
