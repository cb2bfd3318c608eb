"""`megatronapp ui` on a cluster: a way to the door, and an address that logs the browser in once."""

import argparse
import sys
import webbrowser

from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.addresses import page_query
from megatronapp_operator.cli.cluster import doors, tokens
from megatronapp_operator.cli.cluster.connection import ClusterJob, opened
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError

OTHER_NAME = (
    "a browser that does not find this name (Safari) finds {url}, with the same ending; "
    "its login is then seen by other servers of this machine"
)
NO_NAME = (
    "note: somebody else has [::1] at every port that was tried, so that this address has no name of its own: "
    "its login is seen by other servers of this machine"
)


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the pages, open it, and keep the way open until Ctrl-C; returns the exit code."""
    with opened(arguments) as cluster:
        job = None if arguments.job is None else cluster.view(arguments.job)
        with doors.open_gateway(cluster) as door:
            answer = doors.call_gateway(door, "POST", "/api/v1/tickets", token=tokens.token_for(cluster, door, job))
            if not answer.is_success:
                raise HubError(replace_control_characters(problem_of(answer)))
            page = door.page
            address = f"{page}/{_query(job)}#code={answer.json()['ticket']}"
            print(address, flush=True)
            if page != door.url:
                print(OTHER_NAME.format(url=door.url), file=sys.stderr)
            elif door.forward is not None:
                print(NO_NAME, file=sys.stderr)
            if not arguments.print_only and not webbrowser.open(address):
                print("no browser was found; open the address above; it is good once, for five minutes")
            if door.forward is not None:
                print("a port is forwarded to the door until Ctrl-C", file=sys.stderr)
                door.forward.hold()
    return 0


def _query(job: ClusterJob | None) -> str:
    if job is None:
        return ""
    return page_query(job.document["spec"].get("mode"), job=f"{job.namespace}/{job.name}")
