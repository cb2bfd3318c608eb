"""What exists: jobs and their pods, as watches and fresh reads tell it. Newer news win, whatever order they come in."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from megatronapp_operator.backends.kubernetes.client.api import Object
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod

Key = tuple[str, str]
"""Namespace and name of a job."""
Gang = tuple[str, str]
"""Namespace and uid of a job. A pod is of a job of its own namespace, whatever its labels say."""
MAX_TOMBSTONES = 20_000
"""So many objects that are gone are remembered, so that late news do not bring them back."""


def key_of(job: Object) -> Key:
    """The key of a job object."""
    return job["metadata"]["namespace"], job["metadata"]["name"]


class ObjectStore:
    """The memory of one operator. Every method that takes news returns the key of the job that they are about."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Object] = {}
        self._pods: dict[Gang, dict[str, PodRecord]] = {}
        self._graves: OrderedDict[str, None] = OrderedDict()

    @property
    def keys(self) -> list[Key]:
        """All jobs."""
        return list(self._jobs)

    def job(self, key: Key) -> Object | None:
        """A job, as it was last seen."""
        return self._jobs.get(key)

    def pods(self, namespace: str, job_uid: str) -> list[PodRecord]:
        """The pods of a job, as they were last seen."""
        return list(self._pods.get((namespace, job_uid), {}).values())

    def put_job(self, job: Object) -> Key | None:
        """Take in a job; None if nothing of it is new."""
        key, metadata = key_of(job), job["metadata"]
        if metadata["uid"] in self._graves:
            return None
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == metadata["uid"] and _version(known) >= _version(job):
            return None
        metadata.pop("managedFields", None)
        self._jobs[key] = job
        return key

    def drop_job(self, job: Object) -> Key | None:
        """The job is gone."""
        key, uid = key_of(job), job["metadata"]["uid"]
        self._mark_deleted(uid)
        known = self._jobs.get(key)
        if known is None or known["metadata"]["uid"] != uid:
            return None
        del self._jobs[key]
        return key

    def put_pod(self, pod: Object) -> Key | None:
        """Take in a pod; None if it is no pod of a job, or nothing of it is new."""
        record = read_pod(pod)
        return None if record is None else self.put_record(record)

    def put_record(self, record: PodRecord) -> Key | None:
        """The same of one that is read already."""
        if record.uid in self._graves:
            return None
        gang = self._pods.setdefault((record.namespace, record.job_uid), {})
        known = gang.get(record.name)
        if known is not None and known.version >= record.version:
            return None
        gang[record.name] = record
        return record.namespace, record.job

    def drop_pod(self, pod: Object) -> Key | None:
        """The pod is gone."""
        record = read_pod(pod)
        return None if record is None else self.drop_record(record)

    def drop_record(self, record: PodRecord) -> Key | None:
        """The same of one that is read already."""
        self._mark_deleted(record.uid)
        gang = self._pods.get((record.namespace, record.job_uid), {})
        known = gang.get(record.name)
        if known is None or known.uid != record.uid:
            return None
        del gang[record.name]
        if not gang:
            del self._pods[record.namespace, record.job_uid]
        return record.namespace, record.job

    def replace_jobs(self, jobs: Iterable[Object], version: int) -> set[Key]:
        """Take in a full list of that version: what is not on it is gone, unless it is newer. Returns what changed."""
        listed = {one["metadata"]["uid"]: one for one in jobs}
        changed = {self.put_job(one) for one in listed.values()}
        gone = [one for one in self._jobs.values() if one["metadata"]["uid"] not in listed and _version(one) <= version]
        changed |= {self.drop_job(one) for one in gone}
        return {key for key in changed if key is not None}

    def replace_pods(self, pods: Iterable[PodRecord | None], version: int, *, only: Gang | None = None) -> set[Key]:
        """The same for all pods, or for those of one job."""
        listed = {one.uid: one for one in pods if one is not None}
        changed = {self.put_record(one) for one in listed.values()}
        gone = [one for one in self._known(only) if one.uid not in listed and one.version <= version]
        changed |= {self.drop_record(one) for one in gone}
        return {key for key in changed if key is not None}

    def _known(self, only: Gang | None) -> Iterator[PodRecord]:
        gangs = self._pods.values() if only is None else [self._pods.get(only, {})]
        return (record for gang in gangs for record in gang.values())

    def _mark_deleted(self, uid: str) -> None:
        self._graves[uid] = None
        if len(self._graves) > MAX_TOMBSTONES:
            self._graves.popitem(last=False)


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])
