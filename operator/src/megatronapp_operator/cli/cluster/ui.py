"""`megatronapp ui` on a cluster: a connection to the gateway, and an address that logs the browser in once."""

import argparse
import sys
import time
import webbrowser

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.addresses import page_query
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import ClusterJob, opened
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError

POLL_S = 0.5
OTHER_NAME = (
    "a browser that cannot resolve this name (Safari) can open {url}, with the same ending; "
    "other servers of this machine then receive its login cookie"
)
NO_NAME = (
    "note: other programs listen on [::1] at every port that was tried, so this address has no separate name: "
    "other servers of this machine receive its login cookie"
)


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the pages, open it, and keep the connection until Ctrl-C; return the exit code."""
    with opened(arguments) as cluster:
        job = None if arguments.job is None else cluster.view(arguments.job)
        with gateway_client.open_gateway(cluster) as gateway:
            address = login_address(gateway, tokens.token_for(cluster, gateway, job), job)
            print(address, flush=True)
            if not address.startswith(f"{gateway.url}/"):
                print(OTHER_NAME.format(url=gateway.url), file=sys.stderr)
            elif gateway.forward is not None:
                print(NO_NAME, file=sys.stderr)
            if not arguments.print_only and not webbrowser.open(address):
                print("no browser was found; open the address above; it works once, within five minutes")
            if gateway.forward is not None:
                print("a port is forwarded to the gateway until Ctrl-C", file=sys.stderr)
                while True:
                    time.sleep(POLL_S)  # a Ctrl-C that arrives just before a longer wait would be handled after it
    return 0


def login_address(gateway: GatewayEndpoint, token: str, job: ClusterJob | None) -> str:
    """Return an address that logs a browser in once, at a job's page or the list of jobs. Raises HubError."""
    answer = gateway_client.call_gateway(gateway, "POST", "/api/v1/tickets", token=token)
    if not answer.is_success:
        raise HubError(replace_control_characters(problem_of(answer)))
    return f"{gateway.page}/{_query(job)}#code={answer.json()['ticket']}"


def _query(job: ClusterJob | None) -> str:
    if job is None:
        return ""
    return page_query(job.document["spec"].get("mode"), job=f"{job.namespace}/{job.name}")
