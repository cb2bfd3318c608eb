"""The API server, as far as the operator needs it: plain dictionaries in and out, typed errors, no generated models.

Nothing is retried here. Callers are level-triggered: they observe and decide again.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration

from megatronapp_operator.backends.kubernetes.client.connections import SocketTracker
from megatronapp_operator.backends.kubernetes.client.decoding import Decoder, decode_object
from megatronapp_operator.backends.kubernetes.client.errors import (
    NO_ANSWER,
    ApiError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    api_error_for,
)
from megatronapp_operator.backends.kubernetes.client.resources import CREATOR, FIELD_MANAGER, VERSIONS, Object, Resource

REQUEST_S = 30.0
"""Seconds for one request to the API server."""
CONNECTIONS = 100
"""Connections to the API server at a time, as the client of Kubernetes has them."""
PAGE = 500
"""Objects of one page of a list, as client-go reads them."""
READ_BUFFER = 1 << 21
"""Bytes that are buffered of an answer, instead of aiohttp's 64 KiB: a list of many pods is long."""
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""An API server would compress long lists, which takes more time than the bytes within a cluster."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectList:
    """Objects, and the resource version of the list."""

    items: list[Object]
    resource_version: str


@dataclasses.dataclass(frozen=True, slots=True)
class WatchLimits:
    """Limits of a watch, in seconds."""

    server_s: int = 290
    """After which the server ends it; the caller begins another one."""
    silence_s: float = 150.0
    """Without a byte, after which the connection is taken for broken: servers send a bookmark each minute."""


@contextlib.asynccontextmanager
async def connect(
    *, kubeconfig: str | None = None, context: str | None = None, connections: int = CONNECTIONS
) -> AsyncIterator["KubernetesApi"]:
    """Connect by a kubeconfig (or the default one), inside a pod by its service account.

    More requests than `connections` wait for one of those, which each watch holds; 0: as many as there are requests.
    """
    settings = Configuration()
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
    settings.proxy = settings.proxy or _proxy_for(settings.host or "")
    sockets = SocketTracker()
    try:
        async with ApiClient(configuration=settings) as client:
            # The client's own session reads the environment's proxies and ~/.netrc for every request, in a thread.
            session = client.rest_client.pool_manager
            connector = aiohttp.TCPConnector(limit=connections, ssl=session.connector._ssl, socket_factory=sockets.make)
            client.rest_client.pool_manager = aiohttp.ClientSession(connector=connector, read_bufsize=READ_BUFFER)
            await session.close()
            yield KubernetesApi(client)
    finally:
        await sockets.close()


def _proxy_for(host: str) -> str | None:
    """Return the proxy that the environment sets for an address, or None."""
    place = urlsplit(host)
    return None if proxy_bypass(place.hostname or "") else getproxies().get(place.scheme)


class KubernetesApi:
    """Requests to one API server. Every method raises ApiError (see errors) if it rejects or cannot be reached."""

    def __init__(
        self,
        client: ApiClient,
        *,
        request_s: float = REQUEST_S,
        guard: Callable[[], None] = lambda: None,
        on_answer: Callable[[str, str, str], None] = lambda _verb, _resource, _code: None,
        dated: Callable[[float, float, float], None] = lambda _date, _sent, _received: None,
        at_once: int | None = None,
    ) -> None:
        """Wrap a client.

        `guard` is called before every request that may change something, and raises if that is not allowed now.
        `on_answer` receives verb, resource and code of every request (HTTP status, or NO_ANSWER, TERMINATING of
        `errors`); `dated` receives the server's time of answers that have it, and the monotonic times of request and
        answer. `at_once` limits concurrent
        requests; others wait.
        """
        self._client = client
        self._request_s = request_s
        self._guard = guard
        self._on_answer = on_answer
        self._dated = dated
        self._limit = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)

    def guarded(
        self,
        guard: Callable[[], None],
        on_answer: Callable[[str, str, str], None],
        *,
        dated: Callable[[float, float, float], None] = lambda _date, _sent, _received: None,
        at_once: int | None = None,
    ) -> "KubernetesApi":
        """Return a client of the same server, with a guard before requests that change something."""
        return KubernetesApi(
            self._client, request_s=self._request_s, guard=guard, on_answer=on_answer, dated=dated, at_once=at_once
        )

    async def minor_version(self) -> int:
        """Return the server's minor version: 35 for Kubernetes 1.35."""
        version = await self._send("GET", VERSIONS, "/version")
        return int(re.sub(r"\D", "", str(version.get("minor"))) or 0)  # some providers write "35+"

    async def served(self, api_version: str) -> frozenset[str]:
        """Return the plurals of a group's version that the server serves; empty without the group, or its discovery."""
        resource = Resource(api_version, "discovery")
        try:
            found = await self._send("GET", resource, f"/apis/{api_version}")
        except (NotFoundError, ForbiddenError):
            return frozenset()
        return frozenset(str(item["name"]) for item in found["resources"])

    async def get(
        self, resource: Resource, namespace: str | None, name: str, *, timeout_s: float | None = None
    ) -> Object | None:
        """Return one object, of a namespace or of the cluster; None if it does not exist."""
        try:
            return await self._send("GET", resource, resource.path(namespace, name), timeout_s=timeout_s)
        except NotFoundError:
            return None

    async def list_objects(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", page: int = PAGE
    ) -> ObjectList:
        """List all objects whose labels match, of a namespace or of all; read in pages."""
        for _ in range(2):
            try:
                pages = [listed async for listed in self.pages(resource, namespace, labels=labels, page=page)]
                return ObjectList([item for listed in pages for item in listed.items], pages[-1].resource_version)
            except ExpiredError:  # the pages took longer than the server keeps the state of the first
                page = 0
        raise ExpiredError(f"list {resource.plural}: the server has forgotten its own list")

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        page: int = PAGE,
        decode: Decoder = decode_object,
    ) -> AsyncGenerator[ObjectList, None]:
        """Yield the list page by page, which need not fit into memory. Raises ExpiredError if that takes too long."""
        query = {"labelSelector": labels, "limit": str(page)}
        while True:
            answer = await self._send("GET", resource, resource.path(namespace), query=query, decode=decode)
            yield ObjectList(answer.get("items") or [], answer["metadata"]["resourceVersion"])
            if not (token := answer["metadata"].get("continue")):
                return
            query |= {"continue": token}

    async def watch(
        self, resource: Resource, namespace: str | None, *, labels: str, version: str, limits: WatchLimits
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a watch's answer as they arrive: lines of JSON, of which the last may be incomplete.

        The watch begins after a resource version, and has bookmarks. It ends when the server ends it; ExpiredError if
        the version is too old.
        """
        query = {"labelSelector": labels, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(limits.server_s)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._request_s, sock_read=limits.silence_s)
        request, code = f"WATCH {resource.path(namespace)}", NO_ANSWER
        try:
            async with self._request("GET", resource.path(namespace), query=query, timeout=timeout) as answer:
                code = str(answer.status)
                if not answer.ok:
                    raise api_error_for(answer.status, _status(await answer.read()), request)
                async for data in answer.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{request}: {error or type(error).__name__}") from error
        finally:
            self._on_answer("WATCH", resource.plural, code)

    async def create(
        self,
        resource: Resource,
        obj: Object,
        *,
        dry_run: bool = False,
        manager: str = FIELD_MANAGER,
        decode: Decoder = decode_object,
    ) -> Object:
        """Create an object and return it as stored. Raises AlreadyExistsError."""
        query = {"fieldManager": manager, "fieldValidation": "Strict"} | _dry(dry_run)
        return await self._send("POST", resource, resource.path(_namespace(obj)), query=query, body=obj, decode=decode)

    async def apply(self, resource: Resource, obj: Object) -> Object:
        """Apply the object's fields and take them over from other managers; remove fields that we applied before."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = resource.path(_namespace(obj), _name(obj))
        return await self._send("PATCH", resource, path, query=query, body=obj, content=APPLY_PATCH)

    async def annotate(self, resource: Resource, namespace: str, name: str, annotations: Mapping[str, str]) -> Object:
        """Set annotations of an object. Raises NotFoundError."""
        body = {"metadata": {"annotations": dict(annotations)}}
        query = {"fieldManager": FIELD_MANAGER}
        path = resource.path(namespace, name)
        return await self._send("PATCH", resource, path, query=query, body=body, content=MERGE_PATCH)

    async def mark(
        self, resource: Resource, found: Object, *, labels: Mapping[str, str | None], annotations: Mapping[str, str]
    ) -> Object:
        """Set labels (None: remove) and annotations of this very object, by its UID. Raises NotFoundError,
        ConflictError.
        """
        metadata = found["metadata"]
        body = {"metadata": {"uid": metadata["uid"], "labels": dict(labels), "annotations": dict(annotations)}}
        path = resource.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER}
        return await self._send("PATCH", resource, path, query=query, body=body, content=MERGE_PATCH)

    async def find_labelled(
        self, resource: Resource, namespace: str, name: str, label: str, value: str
    ) -> Object | None:
        """Return an object if it exists and has this label, or None. Needs no right to read objects."""
        try:
            return await self.read_labelled(resource, namespace, name, label, value)
        except (NotFoundError, InvalidError):
            return None

    async def read_labelled(self, resource: Resource, namespace: str, name: str, label: str, value: str) -> Object:
        """Return an object by a patch without effect. Needs no right to read objects.

        Raises NotFoundError, InvalidError for one whose label has another value.
        """
        pointer = "/metadata/labels/" + label.replace("~", "~0").replace("/", "~1")
        body: list[Object] = [{"op": "test", "path": pointer, "value": value}]
        path, query = resource.path(namespace, name), {"fieldManager": FIELD_MANAGER} | _dry(dry_run=True)
        return await self._send("PATCH", resource, path, query=query, body=body, content=JSON_PATCH)

    async def own_by_apply(self, resource: Resource, found: Object) -> None:
        """Let `apply` remove fields that were created by CREATOR: it removes only those that it owns itself.

        `found` has its managed fields; nothing is sent if none are CREATOR's. Raises ConflictError.
        """
        managers = [entry.get("manager") for entry in found["metadata"].get("managedFields") or ()]
        if CREATOR not in managers:
            return
        entry = f"/metadata/managedFields/{managers.index(CREATOR)}"
        body: list[Object] = [
            {"op": "replace", "path": f"{entry}/manager", "value": FIELD_MANAGER},
            {"op": "replace", "path": f"{entry}/operation", "value": "Apply"},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]},
        ]
        path, query = resource.path(_namespace(found), _name(found)), {"fieldManager": FIELD_MANAGER}
        await self._send("PATCH", resource, path, query=query, body=body, content=JSON_PATCH)

    async def replace(
        self, resource: Resource, obj: Object, *, subresource: str | None = None, timeout_s: float | None = None
    ) -> Object:
        """Replace the object that was read. Raises ConflictError if it has changed since."""
        assert obj["metadata"].get("resourceVersion"), "without it the server would overwrite what it does not know"
        path = resource.path(_namespace(obj), _name(obj), subresource)
        return await self._send(
            "PUT", resource, path, query={"fieldManager": FIELD_MANAGER}, body=obj, timeout_s=timeout_s
        )

    async def delete(
        self, resource: Resource, obj: Object, *, grace_s: int | None = None, decode: Decoder = decode_object
    ) -> Object | None:
        """Delete exactly this object; return None if it does not exist, or another one has its name.

        The result is the server's answer: the object that is being deleted, or a Status if it was deleted at once.
        """
        options: Object = {"preconditions": {"uid": obj["metadata"]["uid"]}, "propagationPolicy": "Background"}
        options |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            path = resource.path(_namespace(obj), _name(obj))
            return await self._send("DELETE", resource, path, body=options, decode=decode)
        except (NotFoundError, ConflictError):
            return None

    async def _send(
        self,
        method: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | list[Object] | None = None,
        content: str = "application/json",
        timeout_s: float | None = None,
        decode: Decoder = decode_object,
    ) -> Object:
        request, code = f"{method} {path}", NO_ANSWER
        timeout = aiohttp.ClientTimeout(total=self._request_s if timeout_s is None else timeout_s)
        data = None if body is None else json.dumps(body)
        async with self._limit:
            if method != "GET":
                self._guard()
            try:
                sent = time.monotonic()
                async with self._request(
                    method, path, query=query, data=data, content=content, timeout=timeout
                ) as answer:
                    code = str(answer.status)
                    text = await answer.read()
                if not answer.ok:
                    rejection = api_error_for(answer.status, _status(text), request)
                    code = rejection.code
                    raise rejection
                self._note_date(answer.headers.get("Date"), sent)
                return decode(text)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise UnavailableError(f"{request}: {error or type(error).__name__}") from error
            finally:
                self._on_answer(method, resource.plural, code)

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,
        data: str | None = None,
        content: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request by the client's session, with its credentials and its proxy."""
        headers = {"Accept": "application/json", "Content-Type": content, "User-Agent": FIELD_MANAGER}
        headers |= UNCOMPRESSED
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        rest = self._client.rest_client
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        async with rest.pool_manager.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=timeout,
            proxy=rest.proxy,
            proxy_headers=rest.proxy_headers,
            server_hostname=rest.server_hostname,
        ) as answer:
            yield answer

    def _note_date(self, date: str | None, sent: float) -> None:
        """Report the Date header; a proxy may omit it, or write another value."""
        with contextlib.suppress(TypeError, ValueError):
            self._dated(parsedate_to_datetime(date or "").timestamp(), sent, time.monotonic())


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _namespace(obj: Object) -> str | None:
    found: str | None = obj["metadata"].get("namespace")
    return found


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _status(body: bytes) -> Object:
    """Parse the Status object of a rejection; a proxy may answer with another body."""
    try:
        return decode_object(body or b"{}")
    except ApiError:
        return {"message": body[:200].decode(errors="replace")}
