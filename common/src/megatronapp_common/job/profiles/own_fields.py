"""Fields of a stored job that its author wrote.

The API server writes the defaults of its definition into each job, and a default that was not written must not win over
a profile. A value that differs from its default was written. One that is equal was written if server-side apply
(`managedFields`) or `kubectl apply` (its annotation) has recorded it; `kubectl create` records nothing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.profiles.field_tree import FieldSet, Node, managed, merge, overlap, plain, spec_tree

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
JOB = "job"
"""Origin of the fields that the job itself has."""


def own_spec(spec: Spec, metadata: Mapping[str, Any], applied: Sequence[FieldSet] | None = None) -> dict[str, Any]:
    """Return the part of a stored spec that its author wrote.

    `metadata` is that of the stored object; `applied` replaces its managed fields if the caller keeps them elsewhere.
    """
    whole = spec_tree(spec.to_dict(), JOB)
    changed = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    own = spec_tree(changed, JOB)
    for part in _written(whole, metadata, applied_fields(metadata) if applied is None else applied):
        own = merge(part, own)
    found: dict[str, Any] = plain(own)
    return found


def applied_fields(metadata: Mapping[str, Any]) -> tuple[FieldSet, ...]:
    """Return the fields of the spec that server-side apply has recorded, for each manager."""
    entries = [
        entry
        for entry in metadata.get("managedFields") or ()
        if entry.get("operation") == "Apply" and not entry.get("subresource")
    ]
    found = (entry.get("fieldsV1", {}).get("f:spec") for entry in entries)
    return tuple(fields for fields in found if fields)


def _written(whole: Node, metadata: Mapping[str, Any], applied: Sequence[FieldSet]) -> list[Node]:
    parts = [managed(whole, fields) for fields in applied]
    document = _last_applied(metadata)
    if document is not None:
        parts.append(overlap(whole, spec_tree(document, JOB)))
    return [part for part in parts if part is not None]


def _last_applied(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the spec that `kubectl apply` has recorded. An annotation that cannot be read records nothing."""
    text = (metadata.get("annotations") or {}).get(LAST_APPLIED)
    try:
        spec = json.loads(text)["spec"] if text else None
    except (TypeError, ValueError, KeyError, RecursionError):
        return None
    return spec if isinstance(spec, Mapping) else None
