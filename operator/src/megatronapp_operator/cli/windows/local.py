"""`megatronapp trace window` for jobs of this machine."""

import argparse
from typing import Any

from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import controller_access
from megatronapp_operator.cli.inject import post
from megatronapp_operator.errors import OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Order a window from the job's hub; return the exit code."""
    job = registry.view(arguments.job)
    if job.ended:
        raise OperatorError(f"{job.name} has ended ({job.phase}); windows need a running job")
    url, token = controller_access(job.paths)
    print(describe_window(post(f"{url}/api/v1/trace/windows", token=token, document=window_of(arguments))))
    return 0


def window_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the window as a document of the hub's API."""
    window: dict[str, Any] = {"steps": arguments.steps, "granularity": arguments.granularity}
    if arguments.ranks:
        window["ranks"] = sorted(set(arguments.ranks))
    if arguments.from_step is not None:
        window["fromStep"] = arguments.from_step
    return window


def describe_window(answer: dict[str, Any]) -> str:
    """Describe the accepted window as one line."""
    first, last = int(answer["fromStep"]), int(answer["fromStep"]) + int(answer["steps"]) - 1
    ranks = answer.get("ranks")
    of_ranks = "all ranks" if ranks is None else "tensor groups of ranks " + ", ".join(map(str, ranks))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{answer['id']}: {steps}, {answer['granularity']}, {of_ranks}"
