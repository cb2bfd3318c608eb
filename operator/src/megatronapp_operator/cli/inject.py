"""`megatronapp inject` for jobs of this machine."""

import argparse
from typing import Any

import httpx

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_common.job.arguments import gives
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import TIMEOUT_S, controller_access
from megatronapp_operator.errors import HubError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Send a fault to the job's hub; return the exit code."""
    job = registry.view(arguments.job)
    if job.ended:
        raise OperatorError(f"{job.name} has ended ({job.phase}); faults need a running job")
    check(load_job({key: value for key, value in job.document.items() if key != "status"}), arguments)
    url, token = controller_access(job.paths)
    print(describe_fault(post(f"{url}/api/v1/faults", token=token, document=fault_of(arguments)), arguments))
    return 0


def fault_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fault as a document of the hub's API."""
    fault = {
        "rank": arguments.rank,
        "kind": arguments.kind,
        "factor": arguments.factor,
        "fromStep": arguments.from_step,
        "steps": arguments.steps,
    }
    return fault if arguments.peer is None else fault | {"peer": arguments.peer}


def describe_fault(answer: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Describe the accepted fault as one line."""
    last = arguments.from_step + arguments.steps - 1
    peer = "" if arguments.peer is None else f" from rank {arguments.peer}"
    return (
        f"fault {answer['id']}: rank {arguments.rank}, {arguments.kind}{peer} x {arguments.factor:g}, "
        f"steps {arguments.from_step} to {last}"
    )


def check(job: MegatronJob, arguments: argparse.Namespace) -> None:
    """Check a fault against the job. Raises OperatorError if it could never act in this job."""
    size = job.world.world_size
    for rank in (arguments.rank, arguments.peer):
        if rank is not None and rank >= size:
            raise OperatorError(f"rank {rank} is outside of this world of {size}; take 0 to {size - 1}")
    if arguments.peer is not None and arguments.kind != "link":
        raise OperatorError(f"--peer works only with --kind link; omit it for {arguments.kind}")
    if arguments.peer is not None and arguments.peer == arguments.rank:
        raise OperatorError(f"--peer {arguments.peer} is the slow rank itself; name another rank")
    if job.spec.training is None:
        raise OperatorError(
            f"{job.metadata.name} serves a model, but faults slow down training steps; name another job"
        )
    total = job.spec.training.train_iters
    args_decide = gives(job, "--train-iters") or gives(job, "--train-samples")
    if arguments.from_step >= total and not args_decide:
        raise OperatorError(
            f"--from-step {arguments.from_step} is after the last step of this job: "
            f"it trains {total} iterations, steps 0 to {total - 1}"
        )


def post(url: str, *, token: str, document: dict[str, Any]) -> dict[str, Any]:
    """POST to the hub and return its answer. Raises HubError with the hub's message."""
    result: dict[str, Any] = _send("POST", url, token=token, document=document).json()
    return result


def delete(url: str, *, token: str) -> None:
    """DELETE at the hub. Raises HubError with the hub's message."""
    _send("DELETE", url, token=token, document=None)


def _send(method: str, url: str, *, token: str, document: dict[str, Any] | None) -> httpx.Response:
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = client.request(method, url, json=document, headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError as error:
        raise HubError(f"{url}: the hub does not answer: {error}") from error
    if not answer.is_success:
        raise HubError(problem_of(answer))
    return answer


def problem_of(answer: httpx.Response) -> str:
    """Return the problem in the hub's answer, with its hint."""
    try:
        problem = answer.json()
        message, hint = str(problem["message"]), str(problem["hint"])
        return message if "/api/" in hint else f"{message}; {_lowered(hint)}"  # paths are for programs
    except (ValueError, KeyError, TypeError):
        return f"the hub refused with status {answer.status_code}: {answer.text[:200]}"


def _lowered(text: str) -> str:
    """Return a sentence to follow a semicolon, with a small first letter unless its first term is in capitals."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
