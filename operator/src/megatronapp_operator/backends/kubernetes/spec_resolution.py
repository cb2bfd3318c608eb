"""The effective spec of a stored job: its own fields over the profiles of its attempt.

An attempt keeps the profiles that it began with, as the status has recorded them; the next one begins with those of its
time. Before that the merged spec is judged by all rules; an attempt that has begun is judged by its types only, like
any job that was accepted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatronapp_common.errors import JobError
from megatronapp_common.job import (
    TERMINAL_PHASES,
    ConditionType,
    MegatronJob,
    PinnedSettings,
    Status,
    check_update,
    load_stored_job,
    skipped_rules,
)
from megatronapp_common.job.api.profile import Profile
from megatronapp_common.job.load import require_readable_depth
from megatronapp_common.job.profiles.effective import begun_job, effective_job, resolve
from megatronapp_common.job.profiles.field_tree import FieldSet
from megatronapp_common.job.profiles.own_fields import LAST_APPLIED, own_spec
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.profile_store import ProfileChoice
from megatronapp_operator.plan import ProfileState, reasons


@dataclasses.dataclass(frozen=True, slots=True)
class SpecSource:
    """Sources of an effective spec."""

    document: Object
    """Job as stored."""
    applied: Sequence[FieldSet]
    """Fields that server-side apply has recorded as the job's own."""
    choice: ProfileChoice
    """Profiles below the job now."""
    status: Status
    pinned: PinnedSettings | None
    """Settings of the newest attempt that has begun."""

    @property
    def begun(self) -> bool:
        """True if the current attempt has begun, or the job has ended."""
        if self.status.phase in TERMINAL_PHASES:
            return True
        return self.pinned is not None and self.pinned.attempt == self.status.attempt

    @property
    def former(self) -> tuple[Profile, ...]:
        """Profiles of the newest attempt that has begun."""
        return () if self.pinned is None else self.pinned.profiles

    @property
    def key(self) -> tuple[object, ...]:
        """Value that changes whenever the effective spec may."""
        generation = self.document["metadata"]["generation"]
        if not (self.former or self.choice.profiles or self.choice.problem):
            return (generation,)
        annotation = (self.document["metadata"].get("annotations") or {}).get(LAST_APPLIED)
        return (generation, annotation, self.applied, self.begun, self.status.attempt, self.former, self.choice)


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """Effective spec of a job."""

    job: MegatronJob | None
    """None: the job has never begun and cannot begin now."""
    profiles: tuple[Profile, ...] = ()
    unknown_fields: tuple[str, ...] = ()
    skipped_rules: tuple[str, ...] = ()
    state: ProfileState | None = None
    """Report for the plan; None for a job without profiles."""


def is_accepted(document: Object) -> bool:
    """Return True if a spec of the job was accepted before, maybe by an earlier release, or the job only ends.

    The pods of such a job exist: without an operator they would have no restart, deadline and removal. An edit of it
    was judged by the API server, which rejects only the rules that the edit breaks.
    """
    observed = (document.get("status") or {}).get("observedGeneration")
    return observed is not None or document["metadata"].get("deletionTimestamp") is not None


def resolve_spec(source: SpecSource) -> ResolvedSpec:
    """Return the effective spec. Raises JobError for a spec that this release cannot read."""
    require_readable_depth(source.document)  # also of a job that waits for a profile: its status would be written whole
    if source.begun:
        return _begun(source)
    if source.choice.problem:
        return _waiting(source, source.choice.reason, source.choice.problem)
    if not source.choice.profiles:
        return _without_profiles(source)
    own = _own(source)
    try:
        job = effective_job(source.document, own, source.choice.profiles)
        _require_same_model(source, own, job)
    except JobError as error:
        return _waiting(source, reasons.PROFILE_REFUSED, str(error))
    state = _state(source, reasons.PROFILE_APPLIED, _names(source.choice.profiles))
    return ResolvedSpec(job, source.choice.profiles, state=state)


def _begun(source: SpecSource) -> ResolvedSpec:
    if not source.former:
        return _without_profiles(source)
    own = _own(source)
    job = begun_job(source.document, own, source.former)
    skipped = skipped_rules(job) if source.status.phase not in TERMINAL_PHASES else ()
    problems = (*resolve(own, source.former).problems, *skipped)
    message = _names(source.former)
    if problems:
        text = "\n".join(problems)
        refused = f"{text}\nthe attempt continues with the fields of {message}; the next begins once this is corrected"
        state = dataclasses.replace(_state(source, reasons.PROFILE_REFUSED, refused), applied=False)
    elif source.choice.problem or source.choice.profiles != source.former:
        later = source.choice.problem or _names(source.choice.profiles) or "no profile"
        state = _state(source, reasons.PROFILE_APPLIED, f"{message}; the next attempt begins with: {later}")
    else:
        state = _state(source, reasons.PROFILE_APPLIED, message)
    return ResolvedSpec(job, source.former, skipped_rules=skipped, state=state)


def _without_profiles(source: SpecSource) -> ResolvedSpec:
    accepted = is_accepted(source.document)
    job, unknown = load_stored_job(source.document, accepted=accepted)
    judged = not accepted and job.spec.profile is None  # by all rules, of which it broke none
    skipped = () if judged or source.status.phase in TERMINAL_PHASES else skipped_rules(job)
    concerned = source.status.condition(ConditionType.PROFILE_APPLIED) is not None or bool(
        source.choice.profiles or source.choice.problem
    )
    state = _state(source, reasons.NO_PROFILE, "no profile is below the job") if concerned else None
    return ResolvedSpec(job, (), unknown, skipped, state)


def _waiting(source: SpecSource, reason: str, problem: str) -> ResolvedSpec:
    """Return a job whose next attempt cannot begin; the former one's fields hold for what is left to do."""
    state = ProfileState(reason=reason, message=problem, applied=False, attempt=source.status.attempt, ready=False)
    if source.pinned is None:
        return ResolvedSpec(None, state=state)
    if source.former:
        return ResolvedSpec(begun_job(source.document, _own(source), source.former), source.former, state=state)
    return ResolvedSpec(load_stored_job(source.document)[0], state=state)


def _require_same_model(source: SpecSource, own: dict[str, Any], job: MegatronJob) -> None:
    """Raise JobError if the profiles have changed what may never change in the life of a job, such as its model."""
    if source.pinned is None:
        return
    former = begun_job(source.document, own, source.former).spec
    problems = check_update(former.model_copy(update={"suspend": True}), job.spec)
    if problems:
        raise JobError(*problems)


def _own(source: SpecSource) -> dict[str, Any]:
    stored, _ = load_stored_job(source.document)
    return own_spec(stored.spec, source.document["metadata"], source.applied)


def _state(source: SpecSource, reason: str, message: str) -> ProfileState:
    return ProfileState(reason=reason, message=message, applied=True, attempt=source.status.attempt, ready=True)


def _names(profiles: Sequence[Profile]) -> str:
    return ", ".join(f"{profile.label} (generation {profile.generation})" for profile in profiles)
