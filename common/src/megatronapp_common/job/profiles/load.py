"""Loading of profiles: returns a Profile, or reports every problem at once."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.profile import MAX_TEMPLATE_BYTES, OWN_FIELDS, Profile, ProfileKind, ProfileObject
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.load import parse_manifest, require_readable_depth
from megatronapp_common.job.problems import describe_errors
from megatronapp_common.job.profiles.locks import path_problem

_INCOMPLETE = frozenset({"missing"})
"""Errors of a whole spec that are none of a part of it."""
_OF_SERVER = frozenset({"status"})


def load_profile(source: str | Mapping[str, Any]) -> Profile:
    """Load a profile from a YAML or JSON text, or from a parsed object. Raises JobError with a line per problem."""
    document = parse_manifest(source) if isinstance(source, str) else source
    if not isinstance(document, Mapping):
        raise JobError("the document: is no object; write a MegatronProfile or ClusterMegatronProfile")
    kind, kinds = document.get("kind"), [str(kind) for kind in ProfileKind]
    if kind not in kinds:
        shown = "is missing" if kind is None else f"{kind!r} is no profile"
        raise JobError(f"kind: {shown}; write {' or '.join(kinds)}")
    require_readable_depth(document)
    try:
        written = {name: value for name, value in document.items() if name not in _OF_SERVER}
        found = ProfileObject.model_validate_json(json.dumps(written), by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(*describe_errors(error, ProfileObject)) from error
    except (TypeError, ValueError) as error:
        raise JobError(f"the document: is not plain data ({error}); use text, numbers, lists and maps") from error
    problems = [*_template_problems(found.spec.template), *_locked_problems(found.spec.locked)]
    if problems:
        raise JobError(*problems)
    return Profile(
        kind=found.kind,
        name=found.metadata.name,
        generation=found.metadata.generation or 0,
        template=found.spec.template,
        locked=found.spec.locked,
    )


def _template_problems(template: Mapping[str, Any]) -> list[str]:
    size = len(json.dumps(template, separators=(",", ":")).encode())
    if size > MAX_TEMPLATE_BYTES:
        return [f"spec.template: has {size} bytes; write at most {MAX_TEMPLATE_BYTES}"]
    foreign = [name for name in OWN_FIELDS if name in template]
    own = [f"spec.template.{name}: belongs to each job; leave it out of the profile" for name in foreign]
    given = {name: value for name, value in template.items() if name not in OWN_FIELDS}
    try:
        Spec.model_validate_json(json.dumps(given), by_alias=True, by_name=False)
    except ValidationError as error:
        return [*own, *describe_errors(error, Spec, prefix="spec.template.", omitted=_INCOMPLETE)]
    return own


def _locked_problems(locked: tuple[str, ...]) -> list[str]:
    found = [(index, path_problem(path)) for index, path in enumerate(locked)]
    return [f"spec.locked[{index}]: {problem}" for index, problem in found if problem is not None]
