"""Store of jobs and their pods, from watches and fresh reads. The newest version wins, in any order of events."""

import math
from collections.abc import Iterable, Iterator

import cachetools

from megatronapp_common.job.profiles.field_tree import FieldSet
from megatronapp_common.job.profiles.own_fields import applied_fields
from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod
from megatronapp_operator.backends.kubernetes.profile_store import ProfileKey, ProfileStore, is_below

Key = tuple[str, str]
"""Namespace and name of a job."""
Gang = tuple[str, str]
"""Namespace and uid of a job. A pod belongs to a job of the namespace that it is in, even if its labels differ."""
MAX_TOMBSTONES = 20_000
"""Most deleted objects that are remembered, so that late events do not restore them."""


def key_of(job: Object) -> Key:
    """Return the key of a job object."""
    return job["metadata"]["namespace"], job["metadata"]["name"]


class ObjectStore:
    """State of one operator. Every method that takes an object returns the key of the job that it belongs to."""

    def __init__(self) -> None:
        self.profiles = ProfileStore()
        self._jobs: dict[Key, Object] = {}
        self._applied: dict[Key, tuple[FieldSet, ...]] = {}
        self._pods: dict[Gang, dict[str, PodRecord]] = {}
        self._deleted: cachetools.FIFOCache[str, float] = cachetools.FIFOCache(MAX_TOMBSTONES)
        """Version up to which an object of this uid is deleted."""

    @property
    def keys(self) -> list[Key]:
        return list(self._jobs)

    def job(self, key: Key) -> Object | None:
        """Return the last known state of a job."""
        return self._jobs.get(key)

    def applied(self, key: Key) -> tuple[FieldSet, ...]:
        """Return the fields of a job's spec that server-side apply has recorded."""
        return self._applied.get(key, ())

    def jobs_over(self, profile: ProfileKey) -> list[Key]:
        """Return the jobs that are merged over a profile."""
        return [key for key, job in self._jobs.items() if is_below(profile, job)]

    def pods(self, namespace: str, job_uid: str) -> list[PodRecord]:
        """Return the pods of a job, as they were last seen."""
        return list(self._pods.get((namespace, job_uid), {}).values())

    def put_job(self, job: Object) -> Key | None:
        """Store a job; return None if it is not new."""
        key, metadata = key_of(job), job["metadata"]
        if metadata["uid"] in self._deleted:
            return None
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == metadata["uid"] and _version(known) >= _version(job):
            return None
        self._applied[key] = applied_fields(metadata)
        metadata.pop("managedFields", None)
        self._jobs[key] = job
        return key

    def drop_job(self, job: Object) -> Key | None:
        """Remove a job that was deleted; return None if it was not known."""
        key, uid = key_of(job), job["metadata"]["uid"]
        self._mark_deleted(uid)
        known = self._jobs.get(key)
        if known is None or known["metadata"]["uid"] != uid:
            return None
        del self._jobs[key]
        self._applied.pop(key, None)
        return key

    def put_pod(self, pod: Object) -> Key | None:
        """Store a pod; return None if it is no pod of a job, or not new."""
        record = None if self._has(pod["metadata"]) else read_pod(pod)
        return None if record is None else self.put_record(record)

    def _has(self, metadata: Object) -> bool:
        """Return True if this version of a pod or a newer one is stored: the watch repeats what requests have answered.

        A pod that cannot be read is not stored.
        """
        gang = self._pods.get(
            (metadata.get("namespace", ""), (metadata.get("labels") or {}).get(LABEL_JOB_UID, "")), {}
        )
        known = gang.get(metadata.get("name", ""))
        return known is not None and known.uid == metadata.get("uid") and known.version >= _metadata_version(metadata)

    def put_record(self, record: PodRecord) -> Key | None:
        """Store the record of a pod; return None if it is not new."""
        if record.version <= self._deleted.get(record.uid, -1):
            return None
        gang = self._pods.setdefault((record.namespace, record.job_uid), {})
        known = gang.get(record.name)
        if known is not None and known.version >= record.version:
            return None
        gang[record.name] = record
        return record.namespace, record.job

    def drop_pod(self, pod: Object) -> Key | None:
        """Remove a pod that was deleted; return None if it was not known.

        A watch by labels also reports one as deleted that has lost its label, and as added once that is restored.
        """
        record = read_pod(pod)
        return None if record is None else self.drop_record(record, until=record.version)

    def drop_record(self, record: PodRecord, *, until: float = math.inf) -> Key | None:
        """Remove the record of a pod, which a version after `until` restores; return None if it was not known."""
        self._mark_deleted(record.uid, until)
        gang = self._pods.get((record.namespace, record.job_uid), {})
        known = gang.get(record.name)
        if known is None or known.uid != record.uid:
            return None
        del gang[record.name]
        if not gang:
            del self._pods[record.namespace, record.job_uid]
        return record.namespace, record.job

    def replace_jobs(self, jobs: Iterable[Object], version: int) -> set[Key]:
        """Store a full list of that version; return the keys of changed jobs.

        Jobs that are missing from the list are removed, unless they are newer.
        """
        listed = {job["metadata"]["uid"]: job for job in jobs}
        changed = {self.put_job(job) for job in listed.values()}
        missing = [
            job for job in self._jobs.values() if job["metadata"]["uid"] not in listed and _version(job) <= version
        ]
        changed |= {self.drop_job(job) for job in missing}
        return {key for key in changed if key is not None}

    def replace_pods(
        self,
        pods: Iterable[PodRecord | None],
        version: int,
        *,
        only: Gang | None = None,
        namespace: str | None = None,
    ) -> set[Key]:
        """Store a full list of all pods, of those of one job, or of those of a namespace. Return changed keys."""
        listed = {pod.uid: pod for pod in pods if pod is not None}
        changed = {self.put_record(pod) for pod in listed.values()}
        missing = [
            pod
            for pod in self._known(only)
            if pod.uid not in listed and pod.version <= version and namespace in {None, pod.namespace}
        ]
        changed |= {self.drop_record(pod, until=version) for pod in missing}
        return {key for key in changed if key is not None}

    def _known(self, only: Gang | None) -> Iterator[PodRecord]:
        gangs = self._pods.values() if only is None else [self._pods.get(only, {})]
        return (record for gang in gangs for record in gang.values())

    def _mark_deleted(self, uid: str, until: float = math.inf) -> None:
        self._deleted[uid] = max(until, self._deleted.get(uid, until))


def _version(obj: Object) -> int:
    return _metadata_version(obj["metadata"])


def _metadata_version(metadata: Object) -> int:
    return int(metadata["resourceVersion"])
