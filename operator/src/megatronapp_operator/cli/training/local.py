"""`megatronapp training` for jobs of this machine."""

import argparse
from collections.abc import Mapping
from typing import Any

import httpx

from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import TIMEOUT_S, controller_access
from megatronapp_operator.cli.training import orders
from megatronapp_operator.errors import HubError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Give an order to the training of a job; return the exit code."""
    job = registry.view(arguments.job)
    if job.ended:
        raise OperatorError(f"{job.name} has ended ({job.phase}); orders need a running job")
    url, token = controller_access(job.paths)
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:

        def call(method: str, path: str, document: Mapping[str, Any] | None = None, /) -> httpx.Response:
            try:
                return client.request(method, f"{url}/api/v1/training{path}", json=document)
            except httpx.HTTPError as error:
                raise HubError(f"{url}: the hub does not answer: {error}") from error

        return orders.main(arguments, call)
