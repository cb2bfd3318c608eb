"""Check of flags and data by the trainer before a job starts."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.job import MegatronJob, place_of
from megatronapp_operator.backends.process.spawn import inherited_environment
from megatronapp_operator.errors import ManifestError

DEADLINE_S = 180.0
"""Seconds for the check: corpora may be on a slow disk; the ranks read them again later."""
_FLAG = re.compile(r"--[a-z][\w-]*")


def preflight(job: MegatronJob, command: Sequence[str]) -> None:
    """Run the trainer's check (`megatronapp_trainer.training.check`) in the job's environment, in this folder.

    A check that cannot run rejects nothing: the launcher reports a missing trainer by itself, and any other cause is
    printed as a warning. An empty `command` means no check.

    Raises ManifestError, one problem a line, each with its place in the manifest.
    """
    if not command:
        return
    environment = inherited_environment() | {entry.name: entry.value for entry in job.spec.env}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _warn(str(error))
        return
    report = _report(done.stdout)
    if report is None:
        if "No module named" not in done.stderr:
            _warn((done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1])
        return
    lines = [line for problem in report for line in _line(job, problem).splitlines()]
    if lines:
        raise ManifestError("\n".join(lines))


def _warn(reason: str) -> None:
    print(f"warning: flags and data could not be checked before the start: {reason}", file=sys.stderr)


def _report(text: str) -> list[Mapping[str, Any]] | None:
    """Return the problems in the check's answer, or None if it has another shape."""
    try:
        problems = json.loads(text)["problems"]
    except (ValueError, KeyError, TypeError):
        return None
    return problems if isinstance(problems, list) else None


def _line(job: MegatronJob, problem: Mapping[str, Any]) -> str:
    """Return a problem with its place; flags that the manifest has as fields are replaced by the fields' names."""
    message, places = problem["message"], [place_of(job, flag, problem["value"]) for flag in problem["flags"]]
    in_args = next((place for place in places if place is not None and place.startswith("spec.args")), None)
    if in_args is not None:
        return f"{in_args}: {message}"
    place = next((place for place in places if place is not None), None)
    if place is None:
        return f"spec.args: {message}"
    text = _FLAG.sub(lambda found: (place_of(job, found[0]) or found[0]).removeprefix("spec."), message)
    return f"{place}: {text.removeprefix(place.removeprefix('spec.')).lstrip()}"
