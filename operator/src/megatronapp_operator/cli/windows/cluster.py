"""`megatronapp trace window` on a cluster: through the gateway to the job's hub."""

import argparse
from urllib.parse import quote

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.cli.windows.local import check_cancel, describe_window, window_of
from megatronapp_operator.errors import HubError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Order a window from the job's hub, or cancel it; return the exit code."""
    check_cancel(arguments)
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        if job.ended:
            raise OperatorError(f"{job.name} has ended ({job.phase}); windows need a running job")
        with gateway_client.open_gateway(cluster) as gateway:
            token = tokens.token_for(cluster, gateway, job)
            path = f"/api/v1/jobs/{job.namespace}/{job.name}/trace/windows"
            if arguments.cancel is None:
                answer = gateway_client.call_gateway(gateway, "POST", path, token=token, json=window_of(arguments))
            else:
                path = f"{path}/{quote(arguments.cancel, safe='')}"
                answer = gateway_client.call_gateway(gateway, "DELETE", path, token=token)
    if not answer.is_success:
        raise HubError(replace_control_characters(problem_of(answer)))
    text = describe_window(answer.json()) if arguments.cancel is None else f"{arguments.cancel}: cancelled"
    print(replace_control_characters(text))
    return 0
