"""`megatronapp trace window` for jobs of this machine."""

import argparse
from typing import Any
from urllib.parse import quote

from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import controller_access
from megatronapp_operator.cli.inject import delete, post
from megatronapp_operator.errors import OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Order a window from the job's hub, or cancel it; return the exit code."""
    check_cancel(arguments)
    job = registry.view(arguments.job)
    if job.ended:
        raise OperatorError(f"{job.name} has ended ({job.phase}); windows need a running job")
    url, token = controller_access(job.paths)
    windows = f"{url}/api/v1/trace/windows"
    if arguments.cancel is None:
        print(describe_window(post(windows, token=token, document=window_of(arguments))))
    else:
        delete(f"{windows}/{quote(arguments.cancel, safe='')}", token=token)
        print(f"{arguments.cancel}: cancelled")
    return 0


def check_cancel(arguments: argparse.Namespace) -> None:
    """Raises OperatorError for flags of a new window next to `--cancel`."""
    given = {"--from-step": arguments.from_step is not None, "--ranks": bool(arguments.ranks)}
    flags = [flag for flag, is_given in given.items() if is_given]
    if arguments.cancel is not None and flags:
        raise OperatorError(f"{' and '.join(flags)} describe a new window, and --cancel ends one; leave out either")


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
