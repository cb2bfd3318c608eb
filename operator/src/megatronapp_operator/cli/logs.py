"""`megatronapp logs` for jobs of this machine."""

import argparse
import pathlib
import sys
import time

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.cli.follower import LogTail, rank_log, reporting_rank
from megatronapp_operator.errors import JobNotFoundError, OperatorError

POLL_S = 0.2


def main(arguments: argparse.Namespace) -> int:
    """Print a log; return the exit code."""
    job = registry.view(arguments.job)
    attempt = _attempt(job, arguments.attempt)
    path = _path(job, arguments, attempt)
    if not path.exists() and not arguments.follow:
        raise OperatorError(f"{path}: this log does not exist (yet); {_launcher_hint(job, arguments)}")
    tail = LogTail(path)
    lines = tail.lines(final=job.ended)
    _print(lines if arguments.tail is None else lines[max(0, len(lines) - arguments.tail) :])
    if not lines:
        print(f"note: {_empty(job, arguments)}", file=sys.stderr)
    if arguments.follow:
        _follow(arguments.job, tail, path, moving=arguments.attempt is None, arguments=arguments)
    return 0


def _attempt(job: JobView, wanted: int | None) -> int:
    attempts = job.paths.attempts()
    if wanted is None:
        return attempts[-1] if attempts else 0
    if wanted not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise OperatorError(f"{job.name}: attempt {wanted} does not exist; known attempts: {known}")
    return wanted


def _path(job: JobView, arguments: argparse.Namespace, attempt: int) -> pathlib.Path:
    loaded = _loaded(job)
    if arguments.worker is not None:
        if not 0 <= arguments.worker < loaded.world.nodes:
            raise OperatorError(f"{job.name} has no worker {arguments.worker}; take 0 to {loaded.world.nodes - 1}")
        return job.paths.run_dir(attempt, arguments.worker) / "launcher.log"
    rank = reporting_rank(loaded) if arguments.rank is None else arguments.rank
    return rank_log(loaded, job.paths, attempt, rank)


def _launcher_hint(job: JobView, arguments: argparse.Namespace) -> str:
    if arguments.worker is not None:
        return "the worker was not started"
    return f"the launcher's log may say why: megatronapp logs {job.name} --worker 0"


def _empty(job: JobView, arguments: argparse.Namespace) -> str:
    """Return why a log may be empty, and which ones are not."""
    if arguments.worker is not None:
        return f"the log of worker {arguments.worker}'s launcher is empty"
    rank = reporting_rank(_loaded(job))
    read = f"the launchers log starts and ends: megatronapp logs {job.name} --worker 0"
    if arguments.rank in {None, rank}:
        return f"the log of rank {rank} is empty; {read}"
    return f"the log of rank {arguments.rank} is empty; rank {rank} reports the loss, and {read}"


def _loaded(job: JobView) -> MegatronJob:
    return load_job({key: value for key, value in job.document.items() if key != "status"})


def _print(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _follow(name: str, tail: LogTail, path: pathlib.Path, *, moving: bool, arguments: argparse.Namespace) -> None:
    """Print new lines until the job has ended; continue with the log of the next attempt."""
    while True:
        try:
            job = registry.view(name)
        except JobNotFoundError:
            return
        newest = _path(job, arguments, _attempt(job, None))
        _print(tail.lines(final=job.ended or newest != path))
        if moving and newest != path:
            path, tail = newest, LogTail(newest)
        elif job.ended:
            return
        time.sleep(POLL_S)
