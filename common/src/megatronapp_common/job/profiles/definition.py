"""The CustomResourceDefinitions of profiles, generated from the types of the spec of a job.

A template has the fields of a spec without defaults, required fields and rules: these hold for the merged spec. It has
no descriptions either, which `kubectl explain megatronjob.spec` shows; so it is a tenth of the other definition.
"""

from typing import Any

from megatronapp_common.job.api.profile import OWN_FIELDS, ProfileKind, ProfileSpec
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.crd import Schema, structural
from megatronapp_common.names import GROUP, VERSION

PLURALS = {
    ProfileKind.CLUSTER: "clustermegatronprofiles",
    ProfileKind.NAMESPACE: "megatronprofiles",
}
_SHORT = {ProfileKind.CLUSTER: "cmgp", ProfileKind.NAMESPACE: "mgp"}
_SUMMARIES = {
    ProfileKind.CLUSTER: "Fields of MegatronJobs that administrators of the cluster own: of jobs that name the "
    "profile, and, if its name is default, of jobs that name none.",
    ProfileKind.NAMESPACE: "Fields of MegatronJobs that administrators of a namespace own. The profile named default "
    "is merged over that of the cluster and below all jobs of its namespace; others have no effect.",
}
_COLUMNS = [
    {"name": "Locked", "type": "string", "jsonPath": ".spec.locked"},
    {"name": "Generation", "type": "integer", "jsonPath": ".metadata.generation"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def profile_definition(kind: ProfileKind) -> Schema:
    """Return the definition of a kind of profiles, in the form that `kubectl apply` takes."""
    plural = PLURALS[kind]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Cluster" if kind is ProfileKind.CLUSTER else "Namespaced",
            "names": {
                "kind": kind.value,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [_SHORT[kind]],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _COLUMNS,
                    "schema": {"openAPIV3Schema": _root(kind)},
                }
            ],
        },
    }


def _root(kind: ProfileKind) -> Schema:
    spec = structural(ProfileSpec.model_json_schema(by_alias=True), with_defaults=False)
    described = spec["properties"]["template"]["description"]
    spec["properties"]["template"] = {**_template_schema(), "description": described}
    spec["properties"]["locked"]["x-kubernetes-list-type"] = "set"
    return {
        "type": "object",
        "description": _SUMMARIES[kind],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Always megatronapp.io/v1alpha1."},
            "kind": {"type": "string", "description": f"Always {kind}."},
            "metadata": {"type": "object"},
            "spec": spec,
        },
    }


def _template_schema() -> Schema:
    """Return the schema of a spec of which every field is optional."""
    whole = structural(Spec.model_json_schema(by_alias=True), with_defaults=False)
    for name in OWN_FIELDS:
        del whole["properties"][name]
    partial: Schema = _partial(whole)
    return partial


def _partial(node: Any, keys: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - a schema
    """Return a schema without descriptions and required fields, except `keys`, by which the items of a list differ."""
    made = {name: value for name, value in node.items() if name not in {"description", "required", "default"}}
    if keys:
        made["required"] = list(keys)
    if "properties" in made:
        made["properties"] = {name: _partial(child) for name, child in made["properties"].items()}
    if "items" in made:
        made["items"] = _partial(made["items"], tuple(made.get("x-kubernetes-list-map-keys", ())))
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = _partial(made["additionalProperties"])
    return made
