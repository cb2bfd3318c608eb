"""A cluster as the subcommands use it: one call after the other, with the caller's own kubeconfig and rights."""

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
from megatronapp_operator.backends.kubernetes.client.api import JOBS, KubernetesApi, Object, Resource
from megatronapp_operator.backends.kubernetes.client.errors import UnavailableError, api_error_for
from megatronapp_operator.cli.cluster import CONTEXT_VARIABLE
from megatronapp_operator.errors import JobNotFoundError, OperatorError

FIELD_MANAGER = "megatronapp"
REQUEST_S = 30.0
HOW_TO_NAME_ONE = "name one by --kubeconfig FILE and --context NAME"
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterJob:
    """A MegatronJob on the API server."""

    document: Object

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.document["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.document["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        """What tells it from a later one of the same name."""
        return str(self.document["metadata"]["uid"])

    @property
    def status(self) -> dict[str, Any]:
        """Its status; empty until the operator has seen it."""
        return self.document.get("status") or {}

    @property
    def phase(self) -> str:
        """Its phase."""
        return str(self.status.get("phase", "Pending"))

    @property
    def ended(self) -> bool:
        """Whether it is over; a suspended one may go on."""
        return self.phase in TERMINAL_PHASES


class Cluster:
    """Requests of one subcommand. Every method raises ApiError if the API server refuses or is not there."""

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
        """Wait for something."""

        async def wait() -> Result:
            return await work

        return self._runner.run(wait())

    def view(self, name: str) -> ClusterJob:
        """The job of this name. Raises JobNotFoundError."""
        document = self.run(self.api.get(JOBS, self.namespace, name))
        if document is None:
            where = f"in namespace {self.namespace!r}; `megatronapp get -A` lists the jobs"
            raise JobNotFoundError(f'megatronjobs.megatronapp.io "{name}" not found {where}')
        return ClusterJob(document)

    def views(self) -> Sequence[ClusterJob]:
        """All jobs of the namespace, by name."""
        return self.views_of(self.namespace)

    def views_of(self, namespace: str | None) -> Sequence[ClusterJob]:
        """All jobs of a namespace, or (None) of all, by namespace and name."""
        found = [ClusterJob(document) for document in self.run(self.api.list_objects(JOBS, namespace)).items]
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def apply(self, document: Object) -> ClusterJob:
        """Store a job as it was written; fields of other writers stay theirs."""
        path = JOBS.path(self.namespace, document["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true"}
        return ClusterJob(
            self.request("PATCH", path, query=query, body=document, content="application/apply-patch+yaml")
        )

    def events(self, job: ClusterJob) -> list[dict[str, Any]]:
        """What was reported about a job, oldest first."""
        about = f"involvedObject.uid={job.uid}"
        found = self.request("GET", Resource("v1", "events").path(job.namespace), query={"fieldSelector": about})
        return sorted((_event(one) for one in found["items"]), key=lambda one: str(one["time"]))

    def bearer(self) -> str | None:
        """The token of the caller's kubeconfig; None where they show a certificate."""
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
        """One request that is answered with an object."""
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
        """One request whose answer is still to be read. Raises ApiError for anything but a success."""
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
    """The cluster that the command line names. Raises OperatorError if there is no such one."""
    with asyncio.Runner() as runner:
        client, namespace = runner.run(_client(arguments.kubeconfig, _context(arguments)))
        try:
            yield Cluster(runner, client, arguments, arguments.namespace or namespace)
        finally:
            runner.run(client.close())


def _context(arguments: argparse.Namespace) -> str | None:
    return arguments.context or os.environ.get(CONTEXT_VARIABLE) or None


async def _client(kubeconfig: str | None, context: str | None) -> tuple[ApiClient, str]:
    """A client, and the namespace of the context."""
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
    """Say plainly that there is no file, of which the library says that it is not valid. Raises OperatorError."""
    places = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not any(one and pathlib.Path(one).expanduser().exists() for one in places.split(os.pathsep)):
        raise OperatorError(f"no cluster: there is no {places}; {HOW_TO_NAME_ONE}")


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
