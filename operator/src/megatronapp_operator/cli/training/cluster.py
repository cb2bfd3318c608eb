"""`megatronapp training` on a cluster: through the gateway to the job's hub, and from there to agents and ranks."""

import argparse
from collections.abc import Mapping
from typing import Any

import httpx

from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.training import orders
from megatronapp_operator.errors import OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Give an order to the training of a job; return the exit code."""
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        if job.ended:
            raise OperatorError(f"{job.name} has ended ({job.phase}); orders need a running job")
        with gateway_client.open_gateway(cluster) as gateway:
            token = tokens.token_for(cluster, gateway, job)
            base = f"/api/v1/jobs/{job.namespace}/{job.name}/training"

            def call(method: str, path: str, document: Mapping[str, Any] | None = None, /) -> httpx.Response:
                return gateway_client.call_gateway(gateway, method, f"{base}{path}", token=token, json=document)

            return orders.main(arguments, call)
