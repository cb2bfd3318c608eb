"""Command line of the launcher, and the termination record that it writes."""

import argparse
import asyncio
import datetime
import logging
import os
import pathlib
import socket
import sys
from collections.abc import Sequence

from megatronapp_common.names import Env, ExitCode
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.launch.config.settings import LauncherSettings
from megatronapp_trainer.launch.launcher import LauncherOptions, outcome_of_error
from megatronapp_trainer.launch.ranks import outcome, process
from megatronapp_trainer.launch.ranks.outcome import LauncherOutcome
from megatronapp_trainer.launch.worker_life import WorkerLife

log = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Parse flags before `--`; all arguments after it are passed to the ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_trainer.launch",
        description="Start and supervise the ranks of one worker. Its index and its gang are read "
        "from the MEGATRONAPP_* variables that a backend sets.",
    )
    parser.add_argument("--gather-timeout-s", type=float, default=600.0, help="seconds to wait for the whole gang")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=3.0,
        help="seconds that the other ranks have to end after a failure, and to learn why a peer was lost",
    )
    parser.add_argument(
        "--standby-s",
        type=float,
        default=900.0,
        help="with restart in place: seconds to wait for the next attempt after the ranks have ended",
    )
    parser.add_argument("--program", default="-m megatronapp_trainer.pretrain", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", metavar="MEGATRON_ARGUMENT", help="passed to every rank, after `--`")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch a worker and return the exit code (`names.ExitCode`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parsed = build_parser().parse_args(given[:split])
    options = LauncherOptions(
        gather_timeout_s=parsed.gather_timeout_s,
        grace_s=parsed.grace_s,
        program=tuple(parsed.program.split()),
        standby_s=parsed.standby_s,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    return _launch(options, [*parsed.arguments, *given[split + 1 :]])


def _launch(options: LauncherOptions, arguments: Sequence[str]) -> int:
    try:
        settings = LauncherSettings.from_environment(os.environ, host_name=socket.gethostname())
    except UsageError as error:
        log.error("%s", error)
        if path := os.environ.get(Env.TERMINATION_LOG):
            _record(pathlib.Path(path), outcome_of_error(error), attempt=None, worker=None)
        return ExitCode.USAGE
    if os.environ.get(Env.JOB_UID):
        process.stop_with_parent()
    process.adopt_orphans()
    life = WorkerLife(settings, options, arguments)
    result = asyncio.run(life.run())
    if settings.termination_log is not None:  # before logging, because a blocked stdout would block us
        _record(settings.termination_log, result, attempt=life.attempt, worker=life.worker)
    log.info("worker %d ends with code %d (%s)", settings.index, result.code, result.reason)
    return result.code


def _record(path: pathlib.Path, result: LauncherOutcome, *, attempt: int | None, worker: int | None) -> None:
    now = datetime.datetime.now(datetime.UTC)
    try:
        outcome.write(path, outcome.to_json(result, attempt=attempt, worker=worker, now=now))
    except OSError as error:
        log.error("the outcome could not be written: %s", error)
