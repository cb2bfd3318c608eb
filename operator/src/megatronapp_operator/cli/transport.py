"""`megatronapp transport bench --job` for jobs of this machine: transfers that the job's hub has measured."""

import argparse

import httpx

from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import hub_access
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.cli.text.transfers import print_transfers, read_transfers, refuse_other_options
from megatronapp_operator.errors import HubError

TIMEOUT_S = 30.0
"""Seconds for the answer, for which the hub may have to read many steps."""


def main(arguments: argparse.Namespace) -> int:
    """Print the transfers; return the exit code."""
    refuse_other_options(arguments)
    job = registry.view(arguments.job)
    url, token = hub_access(job.paths)
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = client.get(f"{url}/api/v1/pipeline", headers={"Authorization": f"Bearer {token}"})
        document = answer.json() if answer.is_success else None
    except httpx.HTTPError as error:
        raise HubError(f"{url}: the hub does not answer: {error}; see hub.log in the job's state folder") from error
    except ValueError:
        document = None
    if not answer.is_success:
        raise HubError(problem_of(answer))
    print_transfers(read_transfers(job.name, document), as_json=arguments.json)
    return 0
