"""`megatronapp wait`."""

import argparse
import dataclasses
import time

from megatronapp_operator.backends.process import registry
from megatronapp_operator.backends.process.registry import JobView
from megatronapp_operator.errors import JobNotFoundError, OperatorError

POLL_S = 0.2
FINAL = frozenset({"Complete", "Failed", "Suspended"})


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is waited for: a condition with a status, or (no type) that the job is gone."""

    type: str
    status: str = "True"

    def holds(self, job: JobView) -> bool:
        """Whether it is so."""
        conditions = job.status.get("conditions", ())
        return any(
            self._equal(one["type"], self.type) and self._equal(one["status"], self.status) for one in conditions
        )

    def hopeless(self, job: JobView) -> bool:
        """Whether it can never be so, because the job has ended in another way."""
        return bool(self.type) and job.ended and not self.holds(job)

    @staticmethod
    def _equal(one: str, other: str) -> bool:
        return one.lower() == other.lower()


def main(arguments: argparse.Namespace) -> int:
    """Wait; returns the exit code."""
    wanted = parse_condition(arguments.condition)
    deadline = time.monotonic() + arguments.timeout if arguments.timeout >= 0 else float("inf")
    while True:
        if _reached(arguments.job, wanted):
            word = "condition met" if wanted.type else "deleted"
            print(f"megatronjob.megatronapp.io/{arguments.job} {word}")
            return 0
        if time.monotonic() >= deadline:
            raise OperatorError(f"timed out waiting for the condition on megatronjobs/{arguments.job}")
        time.sleep(POLL_S)


def parse_condition(text: str) -> Wanted:
    """The value of --for. Raises OperatorError."""
    if text == "delete":
        return Wanted("")
    word, _, rest = text.partition("=")
    name, _, status = rest.partition("=")
    if word != "condition" or not name:
        raise OperatorError(f"--for={text}: write condition=Complete, condition=Running=false, or delete")
    return Wanted(name, status or "True")


def _reached(name: str, wanted: Wanted) -> bool:
    try:
        job = registry.view(name)
    except JobNotFoundError:
        if wanted.type:
            raise
        return True
    if wanted.type and wanted.holds(job):
        return True
    if wanted.hopeless(job):
        ends = [one for one in job.status.get("conditions", ()) if one["type"] in FINAL and one["status"] == "True"]
        last = ends[-1] if ends else None
        why = "" if last is None else f" ({last['reason']}: {last['message']})"
        raise OperatorError(f"{name} has ended as {job.phase}{why}; {wanted.type} cannot become {wanted.status}")
    return False
