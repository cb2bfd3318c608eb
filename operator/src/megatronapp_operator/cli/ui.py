"""`megatronapp ui`."""

import argparse
import time
import webbrowser

import httpx

from megatronapp_operator.backends.process import registry
from megatronapp_operator.cli.addresses import hub_access, page_address
from megatronapp_operator.errors import HubError, OperatorError

READY_S = 30.0
POLL_S = 0.1


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the pages, and open it; returns the exit code."""
    if arguments.job is None:
        raise OperatorError("name a job of this machine; `megatronapp get` lists them")
    job = registry.view(arguments.job)
    url, _ = hub_access(job.paths)
    wait_ready(url)
    address = page_address(job.paths, mode=job.document["spec"].get("mode"))
    print(address, flush=True)
    if not arguments.print_only and not webbrowser.open(address):
        print("no browser was found; open the address above; it is good once, for a minute")
    return 0


def wait_ready(url: str) -> None:
    """Wait until a hub that was just started answers. Raises HubError after half a minute."""
    deadline = time.monotonic() + READY_S
    with httpx.Client(timeout=1.0, trust_env=False) as client:
        while True:
            try:
                if client.get(f"{url}/readyz").is_success:
                    return
            except httpx.HTTPError as error:
                reason = str(error)
            else:
                reason = "it is not ready"
            if time.monotonic() > deadline:
                raise HubError(f"{url}: the hub does not answer: {reason}; see hub.log in the job's state folder")
            time.sleep(POLL_S)
