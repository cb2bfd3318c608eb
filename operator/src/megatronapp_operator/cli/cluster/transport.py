"""`megatronapp transport bench --job` on a cluster: transfers that the job's hub has measured, through the gateway."""

import argparse

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.cli.text.transfers import print_transfers, read_transfers, refuse_other_options
from megatronapp_operator.errors import HubError


def main(arguments: argparse.Namespace) -> int:
    """Print the transfers; return the exit code."""
    refuse_other_options(arguments)
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        with gateway_client.open_gateway(cluster) as gateway:
            token = tokens.token_for(cluster, gateway, job)
            path = f"/api/v1/jobs/{job.namespace}/{job.name}/pipeline"
            answer = gateway_client.call_gateway(gateway, "GET", path, token=token)
    if not answer.is_success:
        raise HubError(replace_control_characters(problem_of(answer)))
    try:
        document = answer.json()
    except (ValueError, RecursionError):
        document = None
    print_transfers(read_transfers(job.name, document), as_json=arguments.json)
    return 0
