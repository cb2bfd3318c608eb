"""`megatronapp ui` for jobs of this machine."""

import argparse
import sys
import time
import webbrowser
from collections.abc import Callable

import httpx

from megatronapp_operator.backends.process.settings_builder import hub_command
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.backends.process.stored_hub import stored_hub
from megatronapp_operator.cli.addresses import hub_access, login_address, page_address
from megatronapp_operator.errors import HubError, OperatorError

READY_S = 120.0
"""Seconds that a hub may take to answer: usually a few, on a machine with too much work a minute or two."""
POLL_S = 0.1


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the pages and open it; return the exit code."""
    if arguments.job is None:
        raise OperatorError("name a job of this machine; `megatronapp get` lists them")
    job = registry.view(arguments.job)
    if job.ended and not job.alive:
        return show_stored(job, print_only=arguments.print_only)
    url, _ = hub_access(job.paths)
    wait_ready(url)
    show(page_address(job.paths, mode=job.document["spec"].get("mode")), print_only=arguments.print_only)
    return 0


def show(address: str, *, print_only: bool) -> None:
    """Print an address and open it in a browser."""
    print(address, flush=True)
    if not print_only and not webbrowser.open(address):
        print("no browser was found; open the address above; it works once, within a minute")


def show_stored(job: JobView, *, print_only: bool) -> int:
    """Serve the stored pages of a job that has ended, until Ctrl-C; return the exit code."""
    if job.document["spec"].get("mode") == "serve":
        raise OperatorError(
            f"{job.name}: the pages of a served model end with the job and are not stored; "
            f"serve it again, or open a session that was saved: megatronapp scope replay FILE"
        )
    if not job.paths.hub_state.is_dir():
        raise HubError(f"{job.name}: no pages are stored; a job stores them with spec.analyzer.enabled: true")
    with stored_hub(job, hub_command()) as (url, process):
        wait_ready(url, ended=lambda: process.poll() is not None)
        show(login_address(url, job.paths, mode=None), print_only=print_only)
        try:
            print(f"{job.name} has ended as {job.phase}; Ctrl-C closes its pages", file=sys.stderr, flush=True)
            while (code := process.poll()) is None:
                time.sleep(POLL_S)  # a Ctrl-C that arrives just before a longer wait would be handled after it
        except KeyboardInterrupt:
            return 0
        raise HubError(f"the hub ended with code {code}; see hub.log in the job's state folder")


def wait_ready(url: str, *, ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until a hub that was just started answers. Raises HubError once it has ended, or after two minutes."""
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
            if ended() or time.monotonic() > deadline:
                raise HubError(f"{url}: the hub does not answer: {reason}; see hub.log in the job's state folder")
            time.sleep(POLL_S)
