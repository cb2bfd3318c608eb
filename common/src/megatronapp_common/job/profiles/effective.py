"""The effective spec of a job: its own fields over those of its profiles."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.profile import Profile, ProfileKind
from megatronapp_common.job.load import load_job, load_stored_job
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.profiles.field_tree import Block, Node, leaves, merge, plain, spec_tree, without
from megatronapp_common.job.profiles.locks import Conflict, conflicts, parse_path, shown
from megatronapp_common.job.profiles.own_fields import JOB, own_spec

_PROFILES = TypeAdapter(tuple[Profile, ...])
DEFAULT = "default"
"""Origin of the fields that neither the job nor a profile has; and name of the profiles that need not be named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution:
    """Layers of a job in one."""

    spec: dict[str, Any]
    """Fields of the job and its profiles, without defaults."""
    origins: dict[str, str]
    """Origin of each of these fields: `job`, or kind and name of a profile; the first path is that of `leaves`."""
    problems: tuple[str, ...]
    """Values above a profile that it has locked, a line each; the spec has the profile's values instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldOrigin:
    """A field of the effective spec with its value and origin."""

    field: str
    value: Any
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayeredJob:
    """A job with its effective spec, and the layers of which it was made."""

    job: MegatronJob
    own: dict[str, Any]
    """Fields of the job itself."""
    profiles: tuple[Profile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the layers as plain data."""
        return {"own": self.own, "profiles": _PROFILES.dump_python(self.profiles, mode="json")}


def load_layered_job(document: Any, profiles: Sequence[Profile]) -> LayeredJob:  # noqa: ANN401 - plain data
    """Load a job as its author wrote it, over profiles. Raises JobError with a line per problem."""
    spec = document.get("spec") if isinstance(document, Mapping) else None
    if not isinstance(spec, Mapping):
        return LayeredJob(load_job(document), {})
    problems = _naming_problems(spec.get("profile"), profiles)
    if problems:
        raise JobError(*problems)
    return LayeredJob(effective_job(document, spec, profiles), dict(spec), tuple(ordered(profiles)))


def _naming_problems(named: Any, profiles: Sequence[Profile]) -> list[str]:  # noqa: ANN401 - plain data
    """Return what is wrong with the choice of profiles: one of each kind, and the one that the job names."""
    found = []
    for kind in ProfileKind:
        names = [profile.name for profile in profiles if profile.kind is kind]
        if len(names) > 1:
            found.append(f"{len(names)} {kind}s are given ({', '.join(names)}); give at most one of each kind")
        elif kind is ProfileKind.CLUSTER and named is not None and names != [named]:
            given = f"the {kind} {names[0]} was given" if names else f"no {kind} was given"
            found.append(f"spec.profile: names {named}, but {given}; give its file with --profile, or omit the field")
    return found


def read_layers(document: Mapping[str, Any], layers: Mapping[str, Any]) -> LayeredJob:
    """Return a job of this machine with the layers of `LayeredJob.to_dict`. Raises JobError or ValueError."""
    job, _ = load_stored_job(document)
    return LayeredJob(job, dict(layers["own"]), _PROFILES.validate_python(layers["profiles"]))


def pinned_layers(document: Mapping[str, Any]) -> LayeredJob:
    """Return the layers of a job on a cluster: its own fields, and the profiles of its attempt. Raises JobError."""
    stored, _ = load_stored_job(document)
    own, pinned = own_spec(stored.spec, document["metadata"]), stored.status.pinned
    if pinned is None or not pinned.profiles:
        return LayeredJob(stored, own)
    return LayeredJob(begun_job(document, own, pinned.profiles), own, pinned.profiles)


def resolve(own: Mapping[str, Any], profiles: Sequence[Profile]) -> Resolution:
    """Merge the job's own fields over its profiles, which are in any order."""
    merged: Node = Block({})
    problems: list[str] = []
    above = [*_layers(profiles), spec_tree(own, JOB)]
    for index, profile in enumerate(ordered(profiles)):
        merged, locks = merge(merged, above[index]), tuple(map(parse_path, profile.locked))
        for place in range(index + 1, len(above)):
            problems += [_problem(found, profile) for found in conflicts(merged, locks, above[place])]
            above[place] = without(above[place], locks)
    merged = merge(merged, above[-1])
    origins = {text: leaf.origin for _, text, leaf in leaves(merged)}
    return Resolution(plain(merged), origins, tuple(problems))


def ordered(profiles: Sequence[Profile]) -> list[Profile]:
    """Return profiles in the order in which they are merged, the lowest first."""
    return sorted(profiles, key=lambda profile: list(ProfileKind).index(profile.kind))


def _layers(profiles: Sequence[Profile]) -> Iterator[Node]:
    return (spec_tree(profile.template, profile.label) for profile in ordered(profiles))


def _problem(conflict: Conflict, profile: Profile) -> str:
    place = f"spec.{conflict.field}" if conflict.origin == JOB else f"{conflict.origin}: spec.template.{conflict.field}"
    has = "which leaves it out" if conflict.locked is None else f"which has {shown(conflict.locked.value)}"
    return f"{place}: is locked by {profile.label}, {has}; leave the field out"


def effective_job(document: Mapping[str, Any], own: Mapping[str, Any], profiles: Sequence[Profile]) -> MegatronJob:
    """Return the job with its effective spec, judged by all rules. Raises JobError with a line per problem.

    Without profiles that is the job as it is.
    """
    if not profiles:
        return load_job(document, merged=True)
    found = resolve(own, profiles)
    problems = list(found.problems)
    try:
        job = load_job({**document, "spec": found.spec}, merged=True)
    except JobError as error:
        problems += [_named(problem, found) for problem in error.problems]
    if problems:
        raise JobError(*problems)
    return job


def begun_job(document: Mapping[str, Any], own: Mapping[str, Any], profiles: Sequence[Profile]) -> MegatronJob:
    """Return the job of an attempt that has begun with these profiles, judged by its types only.

    The attempt continues even if an edit of the job breaks a rule or a lock; of locked fields it has the profile's
    values. Raises JobError.
    """
    return load_stored_job({**document, "spec": resolve(own, profiles).spec})[0]


def _named(problem: str, found: Resolution) -> str:
    """Return a problem with the profile that has the field, if one has it."""
    field = problem.partition(": ")[0].removeprefix("spec.")
    origin = found.origins.get(field, JOB)
    return problem if origin == JOB else f"{problem} ({field} is of {origin})"


def field_origins(layered: LayeredJob) -> list[FieldOrigin]:
    """Return all fields of an effective spec, in the order of its types, with their origins."""
    origins = resolve(layered.own, layered.profiles).origins
    return [
        FieldOrigin(text, leaf.value, origins.get(text, DEFAULT))
        for _, text, leaf in leaves(spec_tree(layered.job.spec.to_dict(), DEFAULT))
    ]
