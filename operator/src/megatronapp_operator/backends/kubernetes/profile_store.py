"""Store of profiles, from watches and lists, and the choice of those below a job."""

import dataclasses
from collections.abc import Iterable

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.profile import Profile, ProfileKind
from megatronapp_common.job.profiles.definition import PLURALS
from megatronapp_common.job.profiles.effective import DEFAULT
from megatronapp_common.job.profiles.load import load_profile
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.plan import reasons

KINDS = {plural: kind for kind, plural in PLURALS.items()}
SHOWN_NAMES = 5
"""Most names that a message lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a profile; the namespace of a cluster's profile is empty."""

    kind: ProfileKind
    namespace: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileChoice:
    """Profiles below a job, the lowest first, or why they cannot be used."""

    profiles: tuple[Profile, ...] = ()
    reason: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    uid: str
    version: int
    profile: Profile | JobError


class ProfileStore:
    """Profiles of the watched namespaces and of the cluster; the newest version wins, in any order of events."""

    def __init__(self) -> None:
        self._entries: dict[ProfileKey, _Entry] = {}
        self._deleted: set[str] = set()
        self.readable = set(ProfileKind)
        """Kinds that the API server serves, and lets this operator list."""

    def put(self, kind: ProfileKind, obj: Object) -> ProfileKey | None:
        """Store a profile; return None if it is not new."""
        key, metadata = _key(kind, obj), obj["metadata"]
        known, version = self._entries.get(key), int(metadata["resourceVersion"])
        if metadata["uid"] in self._deleted or (known is not None and known.version >= version):
            return None
        metadata.pop("managedFields", None)  # any client writes them, nested as deep as it likes
        try:
            self._entries[key] = _Entry(metadata["uid"], version, load_profile(obj))
        except JobError as error:
            self._entries[key] = _Entry(metadata["uid"], version, error)
        return key

    def drop(self, kind: ProfileKind, obj: Object) -> ProfileKey | None:
        """Remove a profile that was deleted; return None if it was not known."""
        key, uid = _key(kind, obj), obj["metadata"]["uid"]
        self._deleted.add(uid)
        known = self._entries.get(key)
        if known is None or known.uid != uid:
            return None
        del self._entries[key]
        return key

    def replace(self, kind: ProfileKind, objects: Iterable[Object], version: int) -> set[ProfileKey]:
        """Store a full list of a kind, of that version; return the keys of changed profiles."""
        listed = list(objects)
        changed = {self.put(kind, obj) for obj in listed}
        uids = {obj["metadata"]["uid"] for obj in listed}
        for key, entry in list(self._entries.items()):
            if key.kind is kind and entry.uid not in uids and entry.version <= version:
                self._deleted.add(entry.uid)
                del self._entries[key]
                changed.add(key)
        return {key for key in changed if key is not None}

    def choose(self, job: Object) -> ProfileChoice:
        """Return the profiles of a job: of its namespace, and of the cluster the named or the default one."""
        named = job["spec"].get("profile")
        keys = (
            ProfileKey(ProfileKind.CLUSTER, "", named or DEFAULT),
            ProfileKey(ProfileKind.NAMESPACE, job["metadata"]["namespace"], DEFAULT),
        )
        found, problems = list[Profile](), list[str]()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and isinstance(entry.profile, JobError):
                problems += [f"{key.kind}/{key.name}: {problem}" for problem in entry.profile.problems]
            elif entry is not None and isinstance(entry.profile, Profile):
                found.append(entry.profile)
            elif key.kind is ProfileKind.CLUSTER and named is not None:
                return ProfileChoice(reason=reasons.PROFILE_NOT_FOUND, problem=self._missing(named))
        if problems:
            return ProfileChoice(reason=reasons.PROFILE_INVALID, problem="\n".join(problems))
        return ProfileChoice(tuple(found))

    def _missing(self, name: str) -> str:
        if ProfileKind.CLUSTER not in self.readable:
            return (
                f"spec.profile: names {name}, but the operator cannot list ClusterMegatronProfiles: upgrade "
                "definitions and chart, or, where it watches some namespaces only, set rbac.clusterProfiles"
            )
        known = sorted(key.name for key in self._entries if key.kind is ProfileKind.CLUSTER)
        shown = ", ".join(known[:SHOWN_NAMES]) + (", ..." if len(known) > SHOWN_NAMES else "")
        exist = f"existing ones: {shown}" if known else "none exists"
        return f"spec.profile: no ClusterMegatronProfile is named {name} ({exist}); the job starts once it is created"


def _key(kind: ProfileKind, obj: Object) -> ProfileKey:
    return ProfileKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def is_below(key: ProfileKey, job: Object) -> bool:
    """Return True if a job is merged over this profile, where it exists."""
    if key.kind is ProfileKind.CLUSTER:
        return bool(key.name == (job["spec"].get("profile") or DEFAULT))
    return key.name == DEFAULT and bool(key.namespace == job["metadata"]["namespace"])
