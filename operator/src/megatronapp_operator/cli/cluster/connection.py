"""Connection of a subcommand to a cluster: sequential requests with the caller's kubeconfig and rights."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException

from megatronapp_common.job import TERMINAL_PHASES
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import UnavailableError, api_error_for
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object, Resource
from megatronapp_operator.cli.cluster import CONTEXT_VARIABLE
from megatronapp_operator.errors import JobNotFoundError, OperatorError

FIELD_MANAGER = "megatronapp"
REQUEST_S = 30.0
"""Seconds for one request to the API server."""
HOW_TO_NAME_ONE = "name one by --kubeconfig FILE and --context NAME"
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterJob:
    """MegatronJob on the API server."""

    document: Object

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.document["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        """UID, by which a later job of the same name differs."""
        return str(self.document["metadata"]["uid"])

    @property
    def status(self) -> dict[str, Any]:
        """Status of the job; empty until the operator has written it."""
        return self.document.get("status") or {}

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "Pending"))

    @property
    def ended(self) -> bool:
        """True once the job has completed or failed; a suspended one may continue."""
        return self.phase in TERMINAL_PHASES


class Cluster:
    """Requests of one subcommand. Every method raises ApiError if the API server refuses or cannot be reached."""

    def __init__(
        self, runner: asyncio.Runner, client: ApiClient, arguments: argparse.Namespace, namespace: str
    ) -> None:
        self._runner = runner
        self._client = client
        self.api = KubernetesApi(client)
        self.arguments = arguments
        self.context = _context(arguments)
        self.namespace = namespace

    def run(self, work: Awaitable[Result]) -> Result:
        """Run a coroutine and return its result."""

        async def wait() -> Result:
            return await work

        return self._runner.run(wait())

    def view(self, name: str) -> ClusterJob:
        """Return the job of this name. Raises JobNotFoundError."""
        document = self.run(self.api.get(JOBS, self.namespace, name))
        if document is None:
            where = f"in namespace {self.namespace!r}; `megatronapp get -A` lists the jobs"
            raise JobNotFoundError(f'megatronjobs.megatronapp.io "{name}" not found {where}')
        return ClusterJob(document)

    def views(self) -> Sequence[ClusterJob]:
        """Return all jobs of the namespace, by name."""
        return self.views_of(self.namespace)

    def views_of(self, namespace: str | None) -> Sequence[ClusterJob]:
        """Return all jobs of a namespace, or (None) of all, by namespace and name."""
        found = [ClusterJob(document) for document in self.run(self.api.list_objects(JOBS, namespace)).items]
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def apply(self, document: Object) -> ClusterJob:
        """Store a job by server-side apply; fields of other managers are kept."""
        path = JOBS.path(self.namespace, document["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true"}
        return ClusterJob(
            self.request("PATCH", path, query=query, body=document, content="application/apply-patch+yaml")
        )

    def events(self, job: ClusterJob) -> list[dict[str, Any]]:
        """Return the Events of a job, oldest first."""
        about = f"involvedObject.uid={job.uid}"
        found = self.request("GET", Resource("v1", "events").path(job.namespace), query={"fieldSelector": about})
        return sorted((_event(one) for one in found["items"]), key=lambda one: str(one["time"]))

    def bearer(self) -> str | None:
        """Return the bearer token of the kubeconfig; None if it has a client certificate."""
        headers: dict[str, str] = {}
        self.run(self._client.update_params_for_auth(headers, [], ["BearerToken"]))
        scheme, _, token = headers.get("authorization", headers.get("Authorization", "")).partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        """Send one request and return the object in the answer."""
        answer = self.open(method, path, query=query, body=body, content=content, timeout_s=REQUEST_S)
        document: Object = json.loads(self.run(answer.read()))
        return document

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        timeout_s: float | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one request and return its answer, unread. Raises ApiError for any status but success."""
        return self.run(self._send(f"{method} {path}", query=query, body=body, content=content, timeout_s=timeout_s))

    async def _send(
        self,
        request: str,
        *,
        query: Mapping[str, str] | None,
        body: Object | None,
        content: str,
        timeout_s: float | None,
    ) -> aiohttp.ClientResponse:
        method, _, path = request.partition(" ")
        headers = {"Accept": "application/json, */*", "Content-Type": content, "User-Agent": FIELD_MANAGER}
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"])
            answer: aiohttp.ClientResponse = await self._client.rest_client.request(
                method,
                f"{self._client.configuration.host}{path}",
                query_params=dict(query or {}),
                headers=headers,
                body=body,
                _preload_content=False,
                _request_timeout=timeout_s,
            )
            if not answer.ok:
                raise api_error_for(answer.status, _status(await answer.read()), request)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{request}: {error or type(error).__name__}") from error
        return answer


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Cluster]:
    """Connect to the cluster that the command line selects. Raises OperatorError if the kubeconfig has none."""
    with asyncio.Runner() as runner:
        client, namespace = runner.run(_client(arguments.kubeconfig, _context(arguments)))
        try:
            yield Cluster(runner, client, arguments, arguments.namespace or namespace)
        finally:
            runner.run(client.close())


def _context(arguments: argparse.Namespace) -> str | None:
    return arguments.context or os.environ.get(CONTEXT_VARIABLE) or None


async def _client(kubeconfig: str | None, context: str | None) -> tuple[ApiClient, str]:
    """Return a client, and the namespace of the context."""
    settings = Configuration()
    try:
        if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return ApiClient(configuration=settings), "default"
        _require_file(kubeconfig)
        await config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    except (ConfigException, OSError, TypeError) as error:
        raise OperatorError(f"no cluster: {error}; {HOW_TO_NAME_ONE}") from error
    chosen = next((one for one in contexts if one["name"] == context), active) or {}
    return ApiClient(configuration=settings), str(chosen.get("context", {}).get("namespace") or "default")


def _require_file(kubeconfig: str | None) -> None:
    """Check that a kubeconfig exists, because the library reports a missing one as invalid. Raises OperatorError."""
    places = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not any(one and pathlib.Path(one).expanduser().exists() for one in places.split(os.pathsep)):
        raise OperatorError(f"no cluster: {places} does not exist; {HOW_TO_NAME_ONE}")


def _event(one: Object) -> dict[str, Any]:
    moment = one.get("lastTimestamp") or one.get("eventTime") or one["metadata"]["creationTimestamp"]
    return {
        "uid": one["metadata"]["uid"],
        "type": one.get("type", "Normal"),
        "reason": one.get("reason", ""),
        "message": one.get("message", ""),
        "time": moment,
    }


def _status(body: bytes) -> Object:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": body[:200].decode(errors="replace")}
