"""Lines of one attempt in the log of a pod, which several attempts share if it was restarted in place."""

import re
from collections.abc import Iterable, Iterator

from megatronapp_common.names import LABEL_ATTEMPT, Env
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.errors import OperatorError

CONTAINER = "trainer"
_BEGIN = re.compile(
    r"\S+ \S+ INFO (?:continuing with attempt (\d+) in place|taking the place of worker \d+ in attempt (\d+))"
)
"""Line of a launcher that begins a further attempt in its pod (the trainer's `launch.worker_life`)."""


def _attempts(pod: Object) -> tuple[int, int]:
    """Return the attempt that a pod was created for, and the newest that it has been ordered to run in place."""
    newest = int(pod["metadata"].get("labels", {}).get(LABEL_ATTEMPT, "0"))
    containers = pod.get("spec", {}).get("containers", ())
    variables = (item for made in containers if made["name"] == CONTAINER for item in made.get("env", ()))
    first = next((int(item["value"]) for item in variables if item["name"] == Env.ATTEMPT), newest)
    return first, newest


def check_attempt(pod: Object, attempt: int) -> None:
    """Raise OperatorError if a pod has not run an attempt."""
    name, (first, newest) = pod["metadata"]["name"], _attempts(pod)
    if attempt > newest:
        raise OperatorError(f"{name} is of attempt {newest}; attempt {attempt} has not begun there")
    if attempt < first:
        raise OperatorError(
            f"{name} is of attempt {first}{' and later' if newest > first else ''}; the log of attempt {attempt} was "
            "deleted with its pod; look for it in the log storage of the cluster"
        )


def of_attempt(lines: Iterable[str], pod: Object, attempt: int) -> Iterator[str]:
    """Yield the lines of one attempt, between lines of the launcher that begin attempts in place.

    Raises OperatorError if it does not begin in the log: nodes drop the oldest lines of long logs.
    """
    first, newest = _attempts(pod)
    current = first if newest == first else None
    begun, before = current == attempt, list[str]()
    for line in lines:
        if (found := _BEGIN.fullmatch(line)) is not None:
            number = int(found[1] or found[2])
            if current is None and attempt == first and found[1] and number == first + 1:
                yield from before  # of the first attempt, even if its oldest lines were dropped
                return
            current = number
            if current > attempt:
                break
            begun = begun or current == attempt
        if current == attempt:
            yield line
        elif current is None and attempt == first:
            before.append(line)
    if not begun:
        raise OperatorError(
            f"{pod['metadata']['name']} was restarted in place, and attempts {first} to {newest} share its log, in "
            f"which attempt {attempt} does not begin: it has yet to, or the node has dropped its oldest lines; omit "
            "--attempt to print all lines that there are"
        )
