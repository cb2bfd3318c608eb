"""`megatronapp ui` on a cluster: a way to the door, and an address that logs the browser in once."""

import argparse
import sys
import urllib.parse
import webbrowser

from megatronapp_common.texts import plain
from megatronapp_operator.cli.cluster import doors
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the pages, open it, and keep the way open until Ctrl-C; returns the exit code."""
    with opened(arguments) as cluster:
        job = None if arguments.job is None else cluster.view(arguments.job)
        with doors.reached(cluster) as (door, forward):
            answer = doors.call(door, "POST", "/api/v1/tickets", token=doors.token_for(cluster, door, job))
            if not answer.is_success:
                raise HubError(plain(problem_of(answer)))
            query = {"token": answer.json()["ticket"]}
            query |= {} if job is None else {"job": f"{job.namespace}/{job.name}"}
            address = f"{door}/?{urllib.parse.urlencode(query)}"
            print(address, flush=True)
            if not arguments.print_only and not webbrowser.open(address):
                print("no browser was found; open the address above; it is good once, for five minutes")
            if forward is not None:
                print("a port is forwarded to the door until Ctrl-C", file=sys.stderr)
                forward.hold()
    return 0
