"""The launcher's life: settings, gathering, ranks, record, clean-up."""

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Sequence

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.tokens import Role, derive, read_secret
from megatronapp_trainer.errors import RendezvousError, TrainerError, UsageError
from megatronapp_trainer.launch import address, outcome, process, shared_memory
from megatronapp_trainer.launch.coordinator import Coordinator
from megatronapp_trainer.launch.environment import rank_environment
from megatronapp_trainer.launch.gang import Alone, Gang
from megatronapp_trainer.launch.member import join_gang
from megatronapp_trainer.launch.messages import Expected, Join
from megatronapp_trainer.launch.outcome import Outcome
from megatronapp_trainer.launch.settings import Settings
from megatronapp_trainer.launch.supervise import RankProcess, Supervisor
from megatronapp_trainer.launch.table import RankTable, build_table

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Time of the agent to read the rings after the ranks have ended."""
TABLE_FILE = "rank-table.json"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED_EARLY = Outcome(code=ExitCode.PREEMPTED, reason="Preempted", message="stopped before its ranks began")
CODE_REASONS = {ExitCode.USAGE: "BadSettings", ExitCode.RENDEZVOUS: "NotGathered"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The launcher's own flags."""

    gather_timeout_s: float
    grace_s: float
    program: tuple[str, ...]
    """What each rank runs: arguments of the Python interpreter."""


def build_parser() -> argparse.ArgumentParser:
    """Flags before `--`; everything behind it belongs to the ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_trainer.launch",
        description="Start and supervise the ranks of one worker. Its place in the gang comes from the MEGATRONAPP_* "
        "variables that a backend sets.",
    )
    parser.add_argument("--gather-timeout-s", type=float, default=600.0, help="how long to wait for the whole gang")
    parser.add_argument(
        "--grace-s", type=float, default=3.0, help="after a failure, how long the other ranks may take to end"
    )
    parser.add_argument("--program", default="-m megatronapp_trainer.pretrain", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", metavar="MEGATRON_ARGUMENT", help="passed to every rank, after `--`")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch; returns the exit code (`names.ExitCode`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parsed = build_parser().parse_args(given[:split])
    options = Options(
        gather_timeout_s=parsed.gather_timeout_s, grace_s=parsed.grace_s, program=tuple(parsed.program.split())
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    return _launch(options, [*parsed.arguments, *given[split + 1 :]])


def _launch(options: Options, arguments: Sequence[str]) -> int:
    try:
        settings = Settings.from_environment(os.environ, host_name=socket.gethostname())
    except UsageError as error:
        log.error("%s", error)
        if path := os.environ.get(Env.TERMINATION_LOG):
            _record(pathlib.Path(path), _refused(error), attempt=None, worker=None)
        return ExitCode.USAGE
    if os.environ.get(Env.JOB_UID):
        process.stop_with_parent()
    process.adopt_orphans()
    result = asyncio.run(Launcher(settings, options, arguments).run())
    log.info("worker %d ends with code %d (%s)", settings.index, result.code, result.reason)
    if settings.termination_log is not None:
        _record(settings.termination_log, result, attempt=settings.attempt, worker=settings.index)
    return result.code


def _record(path: pathlib.Path, result: Outcome, *, attempt: int | None, worker: int | None) -> None:
    now = datetime.datetime.now(datetime.UTC)
    try:
        outcome.write(path, outcome.to_json(result, attempt=attempt, worker=worker, now=now))
    except OSError as error:
        log.error("the outcome could not be written: %s", error)


def _refused(error: TrainerError) -> Outcome:
    return Outcome(code=error.exit_code, reason=CODE_REASONS.get(error.exit_code, "LauncherFailed"), message=str(error))


class Launcher:
    """One worker from gathering to clean-up."""

    def __init__(self, settings: Settings, options: Options, arguments: Sequence[str]) -> None:
        self._settings = settings
        self._options = options
        self._arguments = arguments
        self._supervisor: Supervisor | None = None
        self._gathering: asyncio.Task[Gang] | None = None
        self._asked_to_stop = False

    async def run(self) -> Outcome:
        """Everything; errors become outcomes."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop)
        shared_memory.remove_leftovers(self._settings.shm_dir, self._settings.shm_prefix)
        try:
            return await self._run()
        except TrainerError as error:
            log.error("%s", error)
            return _refused(error)
        except OSError as error:
            log.exception("the launcher itself failed")
            return Outcome(code=ExitCode.OWN_FAILURE, reason="LauncherFailed", message=str(error))
        finally:
            shared_memory.remove_all(self._settings.shm_dir, self._settings.shm_prefix)

    def _stop(self) -> None:
        log.info("asked to stop")
        self._asked_to_stop = True
        if self._supervisor is not None:
            self._supervisor.stop()
        elif self._gathering is not None:
            self._gathering.cancel()

    async def _run(self) -> Outcome:
        own = address.own_address(self._settings.address, socket.gethostname())
        with address.held_port(own) as port:
            return await self._run_at(own, port)

    async def _run_at(self, own: str, port: int) -> Outcome:
        self._gathering = asyncio.create_task(self._gather(own, port))
        try:
            gang = await self._gathering
        except asyncio.CancelledError:
            return STOPPED_EARLY
        try:
            return await self._supervise(gang, own)
        finally:
            await gang.close()

    async def _gather(self, own: str, port: int) -> Gang:
        settings = self._settings
        join = Join(
            uid=settings.uid,
            attempt=settings.attempt,
            index=settings.index,
            address=own,
            node=settings.node,
            num_ranks=settings.num_ranks,
            port=port,
        )
        gang = await self._enter(join)
        _write_table(settings.run_dir, gang.table)
        return gang

    async def _enter(self, join: Join) -> Gang:
        settings = self._settings
        if settings.coordinator is None or settings.secret_file is None:
            return Alone(build_table([join]))
        token = _gather_token(settings.secret_file)
        if settings.index != 0:
            timeout_s = self._options.gather_timeout_s
            return await join_gang(settings.coordinator, token=token, own=join, timeout_s=timeout_s)
        expected = Expected(uid=settings.uid, attempt=settings.attempt, proc_per_node=settings.proc_per_node)
        coordinator = Coordinator(token=token, expected=expected, own=join)
        try:
            listener = address.listening_socket(settings.coordinator, join.address)
            await coordinator.gather(listener, self._options.gather_timeout_s)
        except BaseException:
            await coordinator.close()
            raise
        return coordinator

    async def _supervise(self, gang: Gang, own: str) -> Outcome:
        settings = self._settings
        if self._asked_to_stop:
            gang.tell(outcome.notice_of(STOPPED_EARLY, settings.index))
            return STOPPED_EARLY
        log.info("world of %d ranks, table %s", gang.table.world_size, gang.table.digest[:12])
        supervisor = Supervisor(worker=settings.index, gang=gang, grace_s=self._options.grace_s)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, supervisor.reap)
        supervisor.start(lambda local_rank: self._start_rank(gang.table, local_rank, own), range(settings.num_ranks))
        self._supervisor = supervisor
        with _counters(settings, own, supervisor):
            result = await supervisor.run()
        process.kill_descendants()
        if settings.hub_url:
            await asyncio.sleep(DRAIN_S)
        return result

    def _start_rank(self, table: RankTable, local_rank: int, own: str) -> RankProcess:
        rank = table.workers[self._settings.index].ranks[local_rank]
        path = self._settings.run_dir / f"rank-{rank}.log"
        environment = rank_environment(
            os.environ, table, worker=self._settings.index, local_rank=local_rank, address=own
        )
        command = [sys.executable, *self._options.program, *self._arguments]
        pid = process.spawn(command, environment=environment, log=path)
        return RankProcess(rank=rank, local_rank=local_rank, pid=pid, log=path)


def _gather_token(secret_file: pathlib.Path) -> str:
    try:
        return derive(read_secret(secret_file), Role.GATHER)
    except (OSError, ValueError) as error:
        raise RendezvousError(f"the job's secret in {secret_file} cannot be read: {error}") from error


def _write_table(run_dir: pathlib.Path, table: RankTable) -> None:
    """Beside and renamed: who sees the file sees all of it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    draft = run_dir / f"{TABLE_FILE}.new"
    draft.write_text(json.dumps(table.to_json(), indent=1) + "\n", encoding="utf-8")
    draft.rename(run_dir / TABLE_FILE)


def _counters(settings: Settings, own: str, supervisor: Supervisor) -> contextlib.AbstractContextManager[object]:
    """Counters are sampled only where an agent may read them."""
    if not settings.hub_url:
        return contextlib.nullcontext()
    from megatronapp_trainer.launch.counters import CounterThread, Sampler
    from megatronapp_trainer.launch.devices import DeviceReader

    devices = DeviceReader()
    metadata = {
        "worker": settings.index,
        "node": settings.node,
        "address": own,
        "pid": os.getpid(),
        "localRanks": settings.num_ranks,
        "devices": devices.count,
    }
    path = shared_memory.worker_ring(settings.shm_dir, settings.shm_prefix)
    sampler = Sampler(lambda: supervisor.pids, devices)
    return CounterThread(path, attempt=settings.attempt, metadata=metadata, sampler=sampler)
