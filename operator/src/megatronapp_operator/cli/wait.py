"""`megatronapp wait` for jobs of this machine."""

import argparse
import dataclasses
import difflib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatronapp_operator.backends.kubernetes.client.errors import ThrottledError, UnavailableError
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.jobs import JobHandle, JobLookup
from megatronapp_operator.errors import JobNotFoundError, OperatorError
from megatronapp_operator.plan import ConditionType, Phase

POLL_S = 0.2
T = TypeVar("T")
ALIASES = {"succeeded": "Complete", "done": "Complete", "interrupted": "Suspended", "ready": "Running"}
"""Names that users give a condition and that are not similar to its own."""
STATUSES = ("True", "False", "Unknown")
FINAL = frozenset({"Complete", "Failed", "Suspended"})


@dataclasses.dataclass(frozen=True, slots=True)
class WaitCondition:
    """Condition with its status that is awaited; without a type, the deletion of the job."""

    type: str
    status: str = "True"

    def holds(self, job: JobHandle) -> bool:
        """Return True if the job has the condition."""
        conditions = job.status.get("conditions", ())
        if self == WaitCondition(ConditionType.RUNNING) and job.phase == Phase.SUCCEEDED:
            return True  # a short job may run between two polls
        return any(
            self._equal(condition["type"], self.type) and self._equal(condition["status"], self.status)
            for condition in conditions
        )

    def is_unreachable(self, job: JobHandle) -> bool:
        """Return True if the job has ended in another way, so that the condition cannot be met."""
        return bool(self.type) and job.ended and not self.holds(job)

    @staticmethod
    def _equal(first: str, other: str) -> bool:
        return first.lower() == other.lower()


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Outages:
    """Requests that are repeated and may fail for a while, with one warning for each outage."""

    def __init__(self, report: Callable[[str], None] = print_warning, *, began: bool = False) -> None:
        """Allow requests to fail once the first has succeeded; with `began`, that was before."""
        self._report = report
        self._began = began
        self._down = False

    def answer(self, request: Callable[[], T]) -> T | None:
        """Return the result of a request; None if the server fails, is throttled or cannot be reached for now."""
        try:
            found = request()
        except (UnavailableError, ThrottledError) as error:
            if not self._began:
                raise
            if not self._down:
                self._report(f"{error}; trying again")
            self._down = True
            return None
        self._began, self._down = True, False
        return found


def main(arguments: argparse.Namespace) -> int:
    """Wait for a job of this machine; return the exit code."""
    return wait(registry, arguments)


def wait(place: JobLookup, arguments: argparse.Namespace, *, poll_s: float = POLL_S) -> int:
    """Wait for a job of `place`; return the exit code. Raises OperatorError on a timeout or another end."""
    condition = parse_condition(arguments.condition)
    wait_for(place, arguments.job, condition, timeout_s=arguments.timeout, poll_s=poll_s)
    print(f"megatronjob.megatronapp.io/{arguments.job} {'condition met' if condition.type else 'deleted'}")
    return 0


def wait_for(
    place: JobLookup,
    name: str,
    condition: WaitCondition,
    *,
    timeout_s: float,
    poll_s: float = POLL_S,
    report: Callable[[str], None] = print_warning,
) -> None:
    """Wait for a job, without end if `timeout_s` is negative. Raises OperatorError on a timeout or another end.

    Later requests than the first may fail until the deadline; `report` receives a warning for each outage.
    """
    deadline = time.monotonic() + timeout_s if timeout_s >= 0 else float("inf")
    outages = Outages(report)
    while not outages.answer(lambda: _reached(place, name, condition)):
        if time.monotonic() >= deadline:
            raise OperatorError(f"timed out waiting for the condition on megatronjobs/{name}")
        time.sleep(poll_s)


def parse_condition(text: str) -> WaitCondition:
    """Parse the value of --for. Raises OperatorError."""
    if text == "delete":
        return WaitCondition("")
    word, _, rest = text.partition("=")
    name, _, status = rest.partition("=")
    if word != "condition" or not name:
        raise OperatorError(f"--for={text}: write condition=Complete, condition=Running=false, or delete")
    return named_condition(name, status or "True", place=f"--for={text}")


def named_condition(name: str, status: str, *, place: str) -> WaitCondition:
    """Return the condition of this name in any case. Raises OperatorError that begins with `place`."""
    return WaitCondition(_known(place, name, [kind.value for kind in ConditionType]), _known(place, status, STATUSES))


def _known(place: str, word: str, known: Sequence[str]) -> str:
    """Return the known name that matches `word` in any case. Raises OperatorError that lists all."""
    by_small = {name.lower(): name for name in known}
    if word.lower() in by_small:
        return by_small[word.lower()]
    words = by_small | {other: meant for other, meant in ALIASES.items() if meant in known}
    nearest = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    meant = f"did you mean {words[nearest[0]]}? " if nearest else ""
    raise OperatorError(f"{place}: {word!r} is not known; {meant}known: {', '.join(known)}")


def _reached(place: JobLookup, name: str, wanted: WaitCondition) -> bool:
    try:
        job = place.view(name)
    except JobNotFoundError:
        if wanted.type:
            raise
        return True
    if wanted.type and wanted.holds(job):
        return True
    if wanted.is_unreachable(job):
        ends = [
            condition
            for condition in job.status.get("conditions", ())
            if condition["type"] in FINAL and condition["status"] == "True"
        ]
        last = ends[-1] if ends else None
        why = "" if last is None else f" ({last['reason']}: {last['message']})"
        raise OperatorError(f"{name} has ended as {job.phase}{why}; {wanted.type} cannot become {wanted.status}")
    return False
