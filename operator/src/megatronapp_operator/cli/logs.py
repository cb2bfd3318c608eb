"""`megatronapp logs` for jobs of this machine."""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.cli.follower import LogTail, rank_log, reporting_rank
from megatronapp_operator.errors import JobNotFoundError, OperatorError

POLL_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """Selection of a log: that of a rank (of the reporting one by default), or of the launcher of a worker."""

    rank: int | None = None
    worker: int | None = None
    attempt: int | None = None
    """None: the newest."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "LogSelection":
        """Return the selection of a command line."""
        return cls(rank=arguments.rank, worker=arguments.worker, attempt=arguments.attempt)


def main(arguments: argparse.Namespace) -> int:
    """Print a log; return the exit code."""
    job, selection = registry.view(arguments.job), LogSelection.of(arguments)
    log = OpenLog(job, selection)
    if not arguments.follow:
        log.require()
    lines = log.lines()
    _print(lines if arguments.tail is None else lines[max(0, len(lines) - arguments.tail) :])
    if not lines:
        print(f"note: {_empty(job, selection)}", file=sys.stderr)
    if arguments.follow:
        for more in log.following():
            _print(more)
    return 0


class OpenLog:
    """Log of a job that is read from its start, and continues with the logs of later attempts."""

    def __init__(self, job: JobView, selection: LogSelection) -> None:
        """Find the log. Raises OperatorError for an attempt or a worker that does not exist."""
        self._job = job
        self._selection = selection
        self._path = _path(job, selection, _attempt(job, selection.attempt))
        self._tail = LogTail(self._path)

    def require(self) -> None:
        """Raise OperatorError if the log does not exist."""
        if not self._path.exists():
            hint = _launcher_hint(self._job, self._selection)
            raise OperatorError(f"{self._path}: this log does not exist (yet); {hint}")

    def lines(self) -> list[str]:
        """Return the lines since the last call."""
        return self._tail.lines(final=self._job.ended)

    def following(self) -> Iterator[list[str]]:
        """Yield new lines until the job has ended, those of later attempts included unless an attempt is selected."""
        while True:
            try:
                self._job = job = registry.view(self._job.name)
            except JobNotFoundError:
                return
            newest = _path(job, self._selection, _attempt(job, None))
            yield self._tail.lines(final=job.ended or newest != self._path)
            if self._selection.attempt is None and newest != self._path:
                self._path, self._tail = newest, LogTail(newest)
            elif job.ended or newest != self._path:
                return
            time.sleep(POLL_S)


def _attempt(job: JobView, wanted: int | None) -> int:
    attempts = job.paths.attempts()
    if wanted is None:
        return attempts[-1] if attempts else 0
    if wanted not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise OperatorError(f"{job.name}: attempt {wanted} does not exist; known attempts: {known}")
    return wanted


def _path(job: JobView, selection: LogSelection, attempt: int) -> pathlib.Path:
    loaded = _loaded(job)
    if selection.worker is not None:
        if not 0 <= selection.worker < loaded.world.nodes:
            raise OperatorError(f"{job.name} has no worker {selection.worker}; take 0 to {loaded.world.nodes - 1}")
        return job.paths.run_dir(attempt, selection.worker) / "launcher.log"
    rank = reporting_rank(loaded) if selection.rank is None else selection.rank
    return rank_log(loaded, job.paths, attempt, rank)


def _launcher_hint(job: JobView, selection: LogSelection) -> str:
    if selection.worker is not None:
        return "the worker was not started"
    return f"the launcher's log may say why: megatronapp logs {job.name} --worker 0"


def _empty(job: JobView, selection: LogSelection) -> str:
    """Return why a log may be empty, and which ones are not."""
    if selection.worker is not None:
        return f"the log of worker {selection.worker}'s launcher is empty"
    rank = reporting_rank(_loaded(job))
    read = f"the launchers log starts and ends: megatronapp logs {job.name} --worker 0"
    if selection.rank in {None, rank}:
        return f"the log of rank {rank} is empty; {read}"
    return f"the log of rank {selection.rank} is empty; rank {rank} reports the loss, and {read}"


def _loaded(job: JobView) -> MegatronJob:
    return load_job({key: value for key, value in job.document.items() if key != "status"})


def _print(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
