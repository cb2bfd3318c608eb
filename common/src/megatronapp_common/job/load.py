"""Loading of manifests: returns a MegatronJob, or reports every problem at once; and their text in YAML."""

import copy
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.judge import broken_rules, find_problems
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.partial import partial_spec
from megatronapp_common.job.problems import describe_errors

MAX_MANIFEST_BYTES = 1 << 20
MAX_LEVELS = 64
"""Most levels of a field of a spec: no pod has twenty, and decoders, copies and comparisons fail at some hundreds."""


def load_job(source: str | Mapping[str, Any], *, merged: bool = False) -> MegatronJob:
    """Load the job from a YAML or JSON text, or from a parsed object.

    A job that names a profile is judged by its types only, as the API server does: rules between fields are judged on
    the spec that is `merged` with the profile.

    Raises JobError whose ``problems`` are all that is wrong, one line each: path, what is wrong, what to write. Rules
    between fields are judged if the fields that they read are right by themselves.
    """
    document = parse_manifest(source) if isinstance(source, str) else source
    require_readable_depth(document)
    job = _read(document)
    problems = find_problems(job.spec.to_dict(), merged=merged)
    if problems:
        raise JobError(*problems)
    return job


def load_stored_job(document: Mapping[str, Any], *, accepted: bool = True) -> tuple[MegatronJob, tuple[str, ...]]:
    """Load a job that an API server has stored; return it and its fields that this release does not know.

    The server has judged it by its own definition, which may be of a newer release and adds that release's defaults:
    such fields are ignored, because an operator that refuses them would manage no job. A spec that was `accepted`
    before is read by its types only: the rules of this release may be stricter than those it was accepted by. Raises
    JobError as `load_job`.
    """
    require_readable_depth(document)
    read = _read if accepted else load_job
    try:
        return read(document), ()
    except JobError:
        unknown = _unknown_fields(document)
        if not unknown:
            raise
    return read(_without(document, unknown)), tuple(".".join(map(str, path)) for path in unknown)


def require_readable_depth(document: object) -> None:
    """Raise JobError if a field of the spec, or of a profile's template, has more than MAX_LEVELS levels.

    An API server stores the unknown fields of `podTemplate.spec` with up to ten thousand.
    """
    deep = [path for path, field in _spec_fields(document) if is_deeper(field, MAX_LEVELS)]
    if deep:
        raise JobError(*(f"{path}: is nested more than {MAX_LEVELS} levels deep; write fewer" for path in deep))


def _spec_fields(document: object, path: str = "spec") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a spec with their paths, those of a profile's template in its place."""
    spec = document.get("spec") if isinstance(document, Mapping) else None
    for name, field in spec.items() if isinstance(spec, Mapping) else ():
        if name == "template" and path == "spec":
            yield from _spec_fields({"spec": field}, "spec.template")
        else:
            yield f"{path}.{name}", field


def is_deeper(value: object, levels: int) -> bool:
    """Return True if plain data has more levels of maps and lists: text has none, an empty map one."""
    layer = [value]
    for _ in range(levels):  # no recursion: this guards what recurs
        layer = [item for part in layer for item in _items(part)]
    return any(isinstance(part, Mapping | list) for part in layer)


def _items(part: object) -> Iterable[Any]:
    if isinstance(part, Mapping):
        return part.values()
    return part if isinstance(part, list) else ()


def skipped_rules(job: MegatronJob) -> tuple[str, ...]:
    """Return the problems of a job that was loaded without this release's rules, each with the name of its rule."""
    return tuple(f"{text} (rule {rule.id})" for rule, text in broken_rules(job.spec.to_dict(), merged=True))


def _read(document: Mapping[str, Any]) -> MegatronJob:
    """Read the job by the types of its fields. Raises JobError, with the rules between fields that are correct."""
    kind = document.get("kind") if isinstance(document, Mapping) else None
    if kind in list(ProfileKind):
        raise JobError(f"kind: {kind} is a profile; check it with a job: megatronapp validate JOB.yaml --profile FILE")
    try:
        return MegatronJob.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        partial = partial_spec(document, error.errors(include_url=False))
        between = [] if partial is None else find_problems(*partial)
        raise JobError(*describe_errors(error, MegatronJob), *between) from error
    except (TypeError, ValueError) as error:
        raise JobError(f"the document: is not plain data ({error}); use text, numbers, lists and maps") from error


def _unknown_fields(document: Mapping[str, Any]) -> list[tuple[int | str, ...]]:
    try:
        MegatronJob.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return [detail["loc"] for detail in found if detail["type"] == "extra_forbidden"]
    return []


def _without(document: Mapping[str, Any], paths: list[tuple[int | str, ...]]) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(document))
    for path in paths:
        place: Any = made
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
    return made


def parse_manifest(text: str) -> Any:  # noqa: ANN401
    """Return the one document of a YAML text, read as the API server reads it. Raises JobError."""
    if len(text.encode()) > MAX_MANIFEST_BYTES:
        raise JobError(f"the document: passes {MAX_MANIFEST_BYTES} bytes; this is not a manifest")
    try:
        documents = [document for document in yaml.load_all(text, Loader=_ManifestLoader) if document is not None]
    except yaml.YAMLError as error:
        raise JobError(f"the document: is not YAML: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise JobError("the document: is nested too deeply; this is not a manifest") from error
    if len(documents) != 1:
        raise JobError(f"the document: holds {len(documents)} objects; write one MegatronJob per file")
    return documents[0]


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + str(getattr(error, "problem", None) or error)


class _ManifestLoader(yaml.SafeLoader):
    """Loader of plain values only; refuses duplicate keys, and aliases, which grow without bound."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not supported; write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _ManifestDumper(yaml.SafeDumper):
    """Dumper without aliases, which manifests may not have."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class _FastManifestDumper(yaml.CSafeDumper):
    """The same by libyaml, since each of many jobs needs a manifest."""

    def ignore_aliases(self, data: object) -> bool:
        return True


# YAML 1.1 as PyYAML reads it takes 1e-4 for text; the API server takes it for a number, and so do we: the text "1e-4",
# such as an argument, needs quotes.
for resolver in (_ManifestLoader, _ManifestDumper, _FastManifestDumper):
    resolver.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def manifest_text(document: Mapping[str, Any]) -> str:
    """Return an object of Kubernetes in YAML, in ASCII, that `parse_manifest` and the API server read as the same."""
    try:
        return yaml.dump(document, Dumper=_FastManifestDumper, sort_keys=False)
    except UnicodeEncodeError:  # libyaml refuses half of a surrogate pair, which JSON may have
        return yaml.dump(document, Dumper=_ManifestDumper, sort_keys=False)
