"""Connection of a subcommand to a cluster: sequential requests with the caller's kubeconfig and rights."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatronapp_common.job import TERMINAL_PHASES
from megatronapp_operator.backends.kubernetes.client.decoding import decode_object
from megatronapp_operator.backends.kubernetes.client.errors import ConflictError, NotFoundError, UnavailableError
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object, Resource
from megatronapp_operator.cli.cluster import CONTEXT_VARIABLE
from megatronapp_operator.cli.cluster.official_client import OfficialClient
from megatronapp_operator.errors import JobNotFoundError

CORE_EVENTS = Resource("v1", "events")
FIELD_MANAGER = "megatronapp"
REQUEST_S = 30.0
"""Seconds for one request to the API server."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSelection:
    """Selection of a cluster, a namespace, and a way to its gateway; None where the kubeconfig or discovery decides."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    gateway: str | None = None
    """URL, or NAMESPACE/SERVICE."""
    service_account: str | None = None
    """[NAMESPACE/]NAME of the account whose token logs in at the gateway."""


class Cluster:
    """Requests of one caller. Every method raises ApiError if the API server refuses or cannot be reached."""

    def __init__(self, client: OfficialClient, selection: ClusterSelection) -> None:
        self.client = client
        self.selection = selection
        self.namespace = selection.namespace or client.namespace

    def close(self) -> None:
        self.client.close()

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """Return one object, of a namespace or of the cluster; None if it does not exist."""
        try:
            return self.request("GET", resource.path(namespace, name))
        except NotFoundError:
            return None

    def list_objects(self, resource: Resource, namespace: str | None, **selectors: str) -> list[Object]:
        """Return the objects of a namespace, or (None) of all, that match `labelSelector` and `fieldSelector`."""
        found: list[Object] = self.request("GET", resource.path(namespace), query=selectors)["items"]
        return found

    def delete(self, resource: Resource, found: Object, *, grace_s: int | None = None) -> None:
        """Delete exactly this object, unless it does not exist any more, or another one has its name."""
        metadata = found["metadata"]
        options: Object = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        options |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        with contextlib.suppress(NotFoundError, ConflictError):
            self.request("DELETE", resource.path(metadata["namespace"], metadata["name"]), body=options)

    def apply(self, document: Object) -> ClusterJob:
        """Store a job by server-side apply; fields of other managers are kept."""
        path = JOBS.path(self.namespace, document["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true"}
        return ClusterJob(
            self.request("PATCH", path, query=query, body=document, content="application/apply-patch+yaml")
        )

    def view(self, name: str) -> ClusterJob:
        """Return the job of this name. Raises JobNotFoundError."""
        document = self.get(JOBS, self.namespace, name)
        if document is None:
            where = f"in namespace {self.namespace!r}; `megatronapp get -A --cluster` lists the jobs"
            raise JobNotFoundError(f'megatronjobs.megatronapp.io "{name}" not found {where}')
        return ClusterJob(document)

    def views(self) -> Sequence[ClusterJob]:
        """Return all jobs of the namespace, by name."""
        return self.views_of(self.namespace)

    def views_of(self, namespace: str | None) -> Sequence[ClusterJob]:
        """Return all jobs of a namespace, or (None) of all, by namespace and name."""
        found = [ClusterJob(document) for document in self.list_objects(JOBS, namespace)]
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def events(self, job: ClusterJob) -> list[dict[str, Any]]:
        """Return the Events of a job, oldest first."""
        found = self.list_objects(CORE_EVENTS, job.namespace, fieldSelector=f"involvedObject.uid={job.uid}")
        return sorted((_event(event) for event in found), key=lambda event: str(event["time"]))

    def bearer(self) -> str | None:
        """Return the bearer token of the kubeconfig; None if it has a client certificate."""
        scheme, _, token = (self.client.authorization() or "").partition(" ")
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
        answer = self.client.request(method, path, query=query, body=body, content=content, limit_s=REQUEST_S)
        try:
            return decode_object(answer)
        except UnavailableError as error:
            raise UnavailableError(f"{method} {path}: {error}") from error


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Cluster]:
    """Connect to the cluster that the command line selects. Raises OperatorError if the kubeconfig has none."""
    fields = (field.name for field in dataclasses.fields(ClusterSelection))
    selection = ClusterSelection(**{name: getattr(arguments, name, None) for name in fields})
    with contextlib.closing(connect(selection)) as cluster:
        yield cluster


def connect(selection: ClusterSelection) -> Cluster:
    """Return a connection to a cluster, to be closed. Raises OperatorError if the kubeconfig has none."""
    context = selection.context or os.environ.get(CONTEXT_VARIABLE) or None
    return Cluster(OfficialClient(selection.kubeconfig, context), selection)


def _event(event: Object) -> dict[str, Any]:
    moment = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return {
        "uid": event["metadata"]["uid"],
        "type": event.get("type", "Normal"),
        "reason": event.get("reason", ""),
        "message": event.get("message", ""),
        "time": moment,
    }
