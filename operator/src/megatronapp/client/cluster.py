"""Jobs of one namespace of a cluster."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from megatronapp.client.hub import Hub
from megatronapp.client.job import Page
from megatronapp_common.job import MegatronJob
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.delete import delete_job, kill_pods
from megatronapp_operator.cli.cluster.describe import cluster_layers
from megatronapp_operator.cli.cluster.logs import WorkerLog
from megatronapp_operator.cli.cluster.run import store
from megatronapp_operator.cli.cluster.ui import login_address
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.errors import ManifestError

ANSWER_S = 120.0
"""Seconds for an answer of a hub, which may have to read its disk."""
logger = logging.getLogger("megatronapp.client")


class ClusterNamespace:
    """Jobs of a namespace."""

    POLL_S = 1.0

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def view(self, name: str) -> ClusterJob:
        """Return the current state of a job. Raises JobNotFoundError."""
        return self._cluster.view(name)

    def views(self) -> Sequence[ClusterJob]:
        """Return all jobs of the namespace, by name."""
        return self._cluster.views()

    def layers(self, name: str) -> LayeredJob:
        """Return the layers of the spec of a job. Raises JobNotFoundError or OperatorError."""
        return cluster_layers(self._cluster.view(name))

    def submit(self, job: MegatronJob, document: Mapping[str, Any], profiles: Sequence[str]) -> str:
        """Store a job; return its name.

        Raises JobConflictError for a job that has ended, ManifestError for profiles, or another namespace.
        """
        if profiles:
            raise ManifestError("profiles: a cluster has its own; apply the file to the cluster, and omit the argument")
        named = job.metadata.namespace if "namespace" in job.metadata.model_fields_set else None
        if named not in {None, self._cluster.namespace}:
            problem = f"metadata.namespace: {named!r} is not the namespace of this client, {self._cluster.namespace!r}"
            raise ManifestError(f"{problem}; omit it, or use Client.cluster(namespace={named!r})")
        stored, change = store(self._cluster, job)
        logger.info("%s/%s %s", stored.namespace, stored.name, change)
        return stored.name

    def delete(self, name: str, *, force: bool) -> None:
        """Delete a job; its pods stop after it, with time for a checkpoint unless `force`. Raises JobNotFoundError."""
        job = self._cluster.view(name)
        delete_job(self._cluster, job)
        if force:
            kill_pods(self._cluster, job)

    def log(self, name: str, selection: LogSelection, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a log, with `follow` until the job has ended. Raises OperatorError."""
        log = WorkerLog.of(self._cluster, self._cluster.view(name), selection, logger.warning)
        yield from log.following() if follow else log.lines(log.pod())

    @contextlib.contextmanager
    def hub(self, name: str) -> Iterator[Hub]:
        """Connect to the hub of a job through the gateway. Raises HubError."""
        job = self._cluster.view(name)
        with gateway_client.open_gateway(self._cluster) as gateway:
            token = tokens.token_for(self._cluster, gateway, job, report=logger.info)
            root = f"/api/v1/jobs/{job.namespace}/{job.name}"

            def send(path: str, query: Mapping[str, str]) -> httpx.Response:
                return gateway_client.call_gateway(
                    gateway, "GET", f"{root}/{path}", token=token, query=query, timeout_s=ANSWER_S
                )

            yield Hub(send, address=f"{gateway.url}{root}", token=token)

    @contextlib.contextmanager
    def page(self, name: str) -> Iterator[Page]:
        """Connect to the page of a job through the gateway. Raises HubError."""
        job = self._cluster.view(name)
        with gateway_client.open_gateway(self._cluster) as gateway:
            token = tokens.token_for(self._cluster, gateway, job, report=logger.info)
            yield Page(login_address(gateway, token, job))

    def close(self) -> None:
        """Close the connection to the API server."""
        self._cluster.close()
