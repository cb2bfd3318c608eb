"""`megatronapp inject` on a cluster: through the gateway to the job's hub, and from there to its agents and ranks."""

import argparse

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli import inject
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.cluster.describe import cluster_layers
from megatronapp_operator.errors import HubError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Send a fault to the job's hub; return the exit code."""
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        if job.ended:
            raise OperatorError(f"{job.name} has ended ({job.phase}); faults need a running job")
        inject.check(cluster_layers(job).job, arguments)
        with gateway_client.open_gateway(cluster) as gateway:
            token = tokens.token_for(cluster, gateway, job)
            path = f"/api/v1/jobs/{job.namespace}/{job.name}/faults"
            answer = gateway_client.call_gateway(gateway, "POST", path, token=token, json=inject.fault_of(arguments))
    if not answer.is_success:
        raise HubError(replace_control_characters(inject.problem_of(answer)))
    print(replace_control_characters(inject.describe_fault(answer.json(), arguments)))
    return 0
