"""The jobs as the gateway sees them, and the tokens of each, which follow from the installation's key."""

import contextlib
import dataclasses
import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence
from typing import Any

from megatronapp_common.job import read_status
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object
from megatronapp_operator.gateway.ttl_cache import TtlCache
from megatronapp_operator.keys import RELOAD_S, KeyRing

FRESH_S = 2.0
"""So old may a list be. Pages ask for it again and again, each for itself."""
UNKNOWN_S, MAX_UNKNOWN = 60.0, 2_000
"""Time for which a token of no job is remembered as such, and number of them: browsers store those of deleted jobs."""
TOKEN_LENGTH = 64
ALIAS_DIGITS = 16
ROLES = (TokenRole.VIEWER, TokenRole.CONTROLLER)
"""Roles of users. The other tokens of a job give no access here."""
SHOWN = ("phase", "progress", "restarts", "slowRanks", "hungRanks")
"""Fields of a status that are listed."""
KEY_HINT = "The gateway reads its key file every few seconds. If this persists, add the lost key below the newest one."


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogJob:
    """A MegatronJob in the list of jobs."""

    namespace: str
    name: str
    uid: str
    key_id: str | None = None
    """Id of the key with which its running attempt was started; None: no attempt has begun."""
    document: dict[str, Any] = dataclasses.field(compare=False, repr=False, default_factory=dict)
    """The fields that the gateway shows. Rank tables and specs of thousands of jobs would fill its memory."""

    @classmethod
    def of(cls, document: Object) -> "CatalogJob":
        """The job of an object as the API server gives it."""
        metadata, status = document["metadata"], document.get("status") or {}
        kept = {
            "metadata": {"creationTimestamp": metadata["creationTimestamp"]},
            "status": {name: status[name] for name in SHOWN if name in status},
        }
        pinned = read_status({"pinned": status.get("pinned")}).pinned
        key_id = None if pinned is None else pinned.key_id
        return cls(metadata["namespace"], metadata["name"], metadata["uid"], key_id, kept)

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.document.get("status") or {}
        return status


@dataclasses.dataclass(frozen=True, slots=True)
class _JobListing:
    jobs: tuple[CatalogJob, ...]
    by_token: dict[str, tuple[CatalogJob, TokenRole]]


class JobCatalog:
    """Jobs of the watched namespaces (none named: of all). Methods raise ApiError if the cluster does not answer."""

    def __init__(self, api: KubernetesApi, *, keys: KeyRing, namespaces: Sequence[str] = ()) -> None:
        self._api = api
        self._keys = keys
        self._namespaces = tuple(namespaces)
        self._all: TtlCache[None, _JobListing] = TtlCache(self._list, ttl_s=FRESH_S)
        self._one = TtlCache(self._get, ttl_s=FRESH_S)
        self._unknown: TtlCache[str, bool] = TtlCache(self._is_unknown, ttl_s=UNKNOWN_S, size=MAX_UNKNOWN)

    async def reach(self) -> None:
        """Ask for one job of each watched namespace: whether the cluster answers, and whether the gateway may ask."""
        for namespace in self._namespaces or (None,):
            async with contextlib.aclosing(self._api.pages(JOBS, namespace, page=1)) as pages:
                await anext(pages)

    async def jobs(self) -> tuple[CatalogJob, ...]:
        """All of them, by namespace and name."""
        return (await self._all.get(None)).jobs

    async def find(self, namespace: str, name: str) -> CatalogJob | None:
        """One of them, if it is there and its namespace is watched."""
        if self._namespaces and namespace not in self._namespaces:
            return None
        return await self._one.get((namespace, name))

    async def job_of(self, token: str) -> tuple[CatalogJob, TokenRole] | None:
        """The job whose token this is, and what who shows it may be."""
        if len(token) != TOKEN_LENGTH:
            return None
        mark = _fingerprint(token)
        found = (await self._all.get(None)).by_token.get(mark)
        if found is not None or await self._unknown.get(mark):
            return found
        return (await self._all.get(None)).by_token.get(mark)

    def token(self, job: CatalogJob, role: TokenRole) -> str:
        """Return the token that the job's hub expects for this role. Raises HttpError where its key is unknown."""
        return derive_token(job_secret(self._key_of(job), job.uid), role)

    def alias(self, job: CatalogJob, identity: str) -> str:
        """Return a pseudonym of a caller at one job: the same in each of their requests, and no name."""
        said = f"megatronapp:alias:{job.uid}:{identity}".encode()
        return "viewer-" + hmac.new(bytes.fromhex(self._key_of(job)), said, hashlib.sha256).hexdigest()[:ALIAS_DIGITS]

    def _key_of(self, job: CatalogJob) -> str:
        """The key of the job's running attempt. Raises HttpError: no other key opens its hub."""
        key = self._find_key(job)
        if key is None:
            text = f"the key {job.key_id} of {job.namespace}/{job.name} is not in the gateway's key file"
            raise HttpError(503, "unknown-key", text, KEY_HINT, retry_s=math.ceil(RELOAD_S))
        return key

    def _find_key(self, job: CatalogJob) -> str | None:
        return self._keys.current if job.key_id is None else self._keys.find(job.key_id)

    def _read_keys_for(self, jobs: Iterable[CatalogJob]) -> None:
        """Read the key file at once where a job has a key that is not known: the operator may have read it first."""
        if any(self._find_key(job) is None for job in jobs):
            self._keys.reload()

    async def _list(self, _: None) -> _JobListing:
        documents: list[Object] = []
        for namespace in self._namespaces or (None,):
            documents += (await self._api.list_objects(JOBS, namespace)).items
        jobs = sorted((CatalogJob.of(document) for document in documents), key=lambda job: (job.namespace, job.name))
        self._read_keys_for(jobs)
        known = [job for job in jobs if self._find_key(job) is not None]
        marks = {_fingerprint(self.token(job, role)): (job, role) for job in known for role in ROLES}
        return _JobListing(tuple(jobs), marks)

    async def _is_unknown(self, mark: str) -> bool:
        """Return True if the next listing does not have it, either: its job may have just been created."""
        return mark not in (await self._all.next(None)).by_token

    async def _get(self, key: tuple[str, str]) -> CatalogJob | None:
        document = await self._api.get(JOBS, *key)
        if document is None:
            return None
        job = CatalogJob.of(document)
        self._read_keys_for([job])
        return job


def _fingerprint(token: str) -> str:
    """Return the digest by which a token is found, so that the time of the search reveals nothing about the token."""
    return hashlib.sha256(token.encode()).hexdigest()
