"""Identity and rights of callers, by TokenReview and SubjectAccessReview of the cluster."""

import asyncio
import base64
import dataclasses
import enum
import json
from typing import Any

from megatronapp_common.job.crd import PLURAL
from megatronapp_common.names import GATEWAY_AUDIENCE, GROUP
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import Object, Resource
from megatronapp_operator.gateway.ttl_cache import TtlCache

TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "tokenreviews")
ACCESS_REVIEWS = Resource("authorization.k8s.io/v1", "subjectaccessreviews")
KEEP_S = 10.0
"""How long a verdict of the cluster holds: so long may a token live on after it was taken back."""
MAX_TOKENS = 2_000
"""Number of callers whose reviews are cached: all callers may send tokens, each of up to 8 KiB."""
AT_ONCE = 16
"""Concurrent TokenReviews: all callers may cause them."""


class Verb(enum.StrEnum):
    """An operation on MegatronJobs."""

    GET = "get"
    """See a job."""
    LIST = "list"
    """See which jobs there are."""
    UPDATE = "update"
    """Make ranks of a job slow, generate with its model, and pin heads."""


@dataclasses.dataclass(frozen=True, slots=True)
class User:
    """A user of the cluster, with all attributes that its authorizers use."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Permission:
    """A verb on the MegatronJobs of a namespace ("": of all), or on one of them."""

    verb: Verb
    namespace: str
    name: str = ""

    def __str__(self) -> str:
        job = f" {self.name!r}" if self.name else ""
        where = f"namespace {self.namespace!r}" if self.namespace else "all namespaces"
        return f"{self.verb} {PLURAL}.{GROUP}{job} in {where}"


class AccessReviews:
    """Asks the cluster. Every method raises ApiError if it does not answer."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._users = TtlCache(self._review_token, ttl_s=KEEP_S, size=MAX_TOKENS)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._rights = TtlCache(self._review_right, ttl_s=KEEP_S)

    async def user_of(self, token: str) -> User | None:
        """Whose token it is; None if the cluster does not know it."""
        return await self._users.get(token)

    async def allows(self, user: User, right: Permission) -> bool:
        """Return True if the user has the permission."""
        return await self._rights.get((user, right))

    async def _review_token(self, token: str) -> User | None:
        ours = GATEWAY_AUDIENCE in audiences_of(token)
        spec: dict[str, Any] = {"token": token} | ({"audiences": [GATEWAY_AUDIENCE]} if ours else {})
        async with self._turns:
            status = await self._post_review(TOKEN_REVIEWS, "TokenReview", spec)
        if not status.get("authenticated") or (ours and GATEWAY_AUDIENCE not in status.get("audiences", ())):
            return None
        return _user(status.get("user", {}))

    async def _review_right(self, question: tuple[User, Permission]) -> bool:
        user, right = question
        attributes = {"group": GROUP, "resource": PLURAL, "verb": right.verb.value, "namespace": right.namespace}
        attributes |= {"name": right.name} if right.name else {}
        spec = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            "resourceAttributes": attributes,
        }
        status = await self._post_review(ACCESS_REVIEWS, "SubjectAccessReview", spec)
        return bool(status.get("allowed"))

    async def _post_review(self, resource: Resource, kind: str, spec: dict[str, Any]) -> Object:
        question = {"apiVersion": resource.api_version, "kind": kind, "metadata": {}, "spec": spec}
        status: Object = (await self._api.create(resource, question)).get("status", {})
        return status


def audiences_of(token: str) -> list[str]:
    """Return the audience that a token claims (RFC 7519), unverified: it only decides what the review is for."""
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        named = claims["aud"]
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        return []
    return [audience for audience in (named if isinstance(named, list) else [named]) if isinstance(audience, str)]


def _user(document: Object) -> User:
    extra = ((key, tuple(values)) for key, values in sorted(document.get("extra", {}).items()))
    return User(document.get("username", ""), document.get("uid", ""), tuple(document.get("groups", ())), tuple(extra))
