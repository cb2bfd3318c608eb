"""Tables in the format of kubectl: upper-case headings, columns three blanks apart."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatronapp_common.job import read_status
from megatronapp_common.job.api.status import ConditionType
from megatronapp_common.text.terminal import to_single_line
from megatronapp_common.text.times import seconds_of
from megatronapp_operator.cli.jobs import JobHandle
from megatronapp_operator.cli.text.durations import human_duration
from megatronapp_operator.plan.policies.report import HANG, NAMED_STATES

GAP = 3
NONE = "<none>"
COLUMNS = ("NAME", "PHASE", "WORKERS", "RESTARTS", "ITERATION", "SLOW", "AGE")
WIDE_COLUMNS = (*COLUMNS, "ATTEMPT", "WORLD", "LOSS", "TOKENS/S", "HUB")


class Table:
    """Table that is printed in parts: columns keep their width, or grow, so that later rows stay aligned."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def print(self, rows: Iterable[Sequence[str]]) -> None:
        """Print more rows, aligned with the earlier ones."""
        sys.stdout.write(self.format(list(rows)))
        sys.stdout.flush()

    def format(self, written: Sequence[Sequence[str]]) -> str:
        """Return more rows as text, without blanks at line ends; each cell is one line without control characters."""
        rows = [[to_single_line(cell) for cell in row] for row in written]
        for row in rows:
            needed = [len(cell) + GAP for cell in row]
            self._widths = [max(pair) for pair in zip(needed, self._widths or needed, strict=True)]
        return "".join(f"{self._line(row)}\n" for row in rows)

    def _line(self, row: Sequence[str]) -> str:
        return "".join(cell.ljust(width) for cell, width in zip(row, self._widths, strict=True)).rstrip()


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a whole table as text."""
    return Table().format(rows)


def job_row(job: JobHandle, *, wide: bool) -> list[str]:
    """Return one job as a row of the table."""
    status, replicas = job.status, job.status.get("replicaStatuses", {})
    progress = status.get("progress", {})
    row = [
        job.name,
        f"{job.phase},Paused" if is_paused(status) else job.phase,
        f"{replicas.get('running', 0)}/{replicas.get('desired', 0)}",
        str(status.get("restarts", 0)),
        iteration(progress),
        ",".join(slow_subjects(status)) or NONE,
        age(job.document["metadata"].get("creationTimestamp")),
    ]
    if not wide:
        return row
    return [
        *row,
        str(status.get("attempt", 0)),
        str(status.get("worldSize", NONE)),
        number(progress.get("loss"), ".4f"),
        number(progress.get("tokensPerSecond"), ".0f"),
        status.get("hubUrl", NONE),
    ]


def is_paused(status: Mapping[str, Any]) -> bool:
    """Return True while an order holds the training in a pause."""
    return read_status({"conditions": status.get("conditions")}).is_true(ConditionType.PAUSED)


def slow_subjects(status: Mapping[str, Any]) -> list[str]:
    """Return labels of slow subjects, such as rank-1 or link-0-2, without suspects and hung ranks."""
    verdicts = read_status({"slowRanks": status.get("slowRanks")}).slow_ranks
    return [
        "-".join((verdict.subject, *map(str, verdict.ranks)))
        for verdict in verdicts
        if verdict.state in NAMED_STATES and verdict.cause != HANG
    ]


def iteration(progress: Mapping[str, Any]) -> str:
    """Return finished steps of all steps, such as 3/10."""
    if "iteration" not in progress:
        return NONE
    total = progress.get("totalIterations")
    return str(progress["iteration"]) if total is None else f"{progress['iteration']}/{total}"


def number(value: float | None, form: str) -> str:
    """Format a number, or return <none>."""
    return NONE if value is None else format(value, form)


def age(moment: str | None) -> str:
    """Return the time since a moment (RFC 3339)."""
    return "<unknown>" if moment is None else human_duration(time.time() - seconds_of(moment))
