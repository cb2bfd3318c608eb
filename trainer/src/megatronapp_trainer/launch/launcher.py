"""The life of one worker, from gathering the gang to clean-up."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from megatronapp_common.attempt_order import POLL_S
from megatronapp_common.names import RANK_TABLE_FILE, Env, ExitCode
from megatronapp_common.pid_namespace import pid_namespace
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret
from megatronapp_trainer.errors import RendezvousError, StoppedError, TrainerError
from megatronapp_trainer.launch.config import address
from megatronapp_trainer.launch.config.interface import WorkerAddress, find_worker_address
from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.config.settings import LauncherSettings
from megatronapp_trainer.launch.preflight import reachability
from megatronapp_trainer.launch.preflight import run as preflight
from megatronapp_trainer.launch.ranks import process, shared_memory
from megatronapp_trainer.launch.ranks.environment import rank_environment
from megatronapp_trainer.launch.ranks.outcome import STOPPED, LauncherOutcome, notice_of
from megatronapp_trainer.launch.ranks.roles import fbd_world_of_flags
from megatronapp_trainer.launch.ranks.supervisor import RankProcess, Supervisor
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.coordinator import Coordinator
from megatronapp_trainer.launch.rendezvous.gang_connection import GangConnection, SingleWorkerGang
from megatronapp_trainer.launch.rendezvous.gang_status import GangPhase, GangStatus
from megatronapp_trainer.launch.rendezvous.member import join_gang
from megatronapp_trainer.launch.rendezvous.messages import COORDINATOR, ExpectedGang, JoinRequest, StopNotice
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable
from megatronapp_trainer.launch.reporting.log_relay import LogRelay
from megatronapp_trainer.launch.reporting.progress import report_progress

log = logging.getLogger(__name__)
T = TypeVar("T")

DRAIN_S = 2.0
"""Seconds that the agent has to read the rings after the ranks have ended."""
ENDS_S = 30.0
"""Longest time in seconds for which a launcher waits for how the ranks of the others ended."""
STDOUT = 1
CODE_REASONS = {
    ExitCode.USAGE: "BadSettings",
    ExitCode.RENDEZVOUS: "NotGathered",
    ExitCode.PREEMPTED: "Preempted",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """Flags of the launcher itself."""

    gather_timeout_s: float
    grace_s: float
    program: tuple[str, ...]
    """Program of each rank: arguments of the Python interpreter."""
    standby_s: float = 900.0
    """Seconds for which a launcher whose ranks have ended waits for the next attempt (restart in place)."""


def outcome_of_error(error: TrainerError) -> LauncherOutcome:
    """Convert an error of the launcher to the outcome of its worker."""
    reason = CODE_REASONS.get(error.exit_code, "LauncherFailed")
    return LauncherOutcome(code=error.exit_code, reason=reason, message=str(error))


class Launcher:
    """Gathers the gang, checks the node, supervises the ranks and cleans up; runs one attempt (see `worker_life`)."""

    def __init__(
        self, settings: LauncherSettings, options: LauncherOptions, arguments: Sequence[str], status: GangStatus
    ) -> None:
        self._settings = settings
        self._options = options
        self._arguments = arguments
        self._status = status
        self._supervisor: Supervisor | None = None
        self._preparing: asyncio.Future[Any] | None = None
        self._stop_requested = False
        self.end_is_served = True
        """False if worker 0, which serves how the ranks of all workers ended, has itself ended with success."""

    async def run(self) -> LauncherOutcome:
        """Run the worker to the end of its attempt; errors become outcomes."""
        shared_memory.remove_leftovers(self._settings.shm_dir, self._settings.shm_prefix)
        try:
            return await self._run()
        except TrainerError as error:
            log.error("%s", error)
            return outcome_of_error(error)
        except OSError as error:
            log.exception("internal error of the launcher")
            return LauncherOutcome(code=ExitCode.OWN_FAILURE, reason="LauncherFailed", message=str(error))
        finally:
            shared_memory.remove_all(self._settings.shm_dir, self._settings.shm_prefix)

    def stop(self, within_s: float | None = None) -> None:
        """Stop the gang. `within_s`: seconds after which ranks of this worker are killed."""
        self._stop_requested = True
        self._note_stop()
        if self._supervisor is None:
            if self._preparing is not None:
                self._preparing.cancel()
        elif within_s is None:
            self._supervisor.stop()
        else:
            self._supervisor.stop_within(within_s)

    def end_at_checkpoint(self, ends: bool) -> None:
        """Let the ranks of the gang end with their next checkpoint, or not any more; has an effect once they run."""
        if self._supervisor is not None:
            self._supervisor.end_at_checkpoint(ends)

    def save(self) -> bool:
        """Let the ranks of the gang write a checkpoint and continue; return False if they do not run yet."""
        if self._supervisor is not None:
            self._supervisor.save()
        return self._supervisor is not None

    def _note_stop(self) -> None:
        self._status.phase = GangPhase.STOPPING

    async def _run(self) -> LauncherOutcome:
        settings = self._settings
        place = find_worker_address(os.environ, socket.gethostname())
        async with contextlib.AsyncExitStack() as stack:
            port = stack.enter_context(address.reserved_port(place.address))
            probe_port = 0
            if settings.preflight is not None:
                line = reachability.answer(settings.uid, settings.attempt, settings.index)
                probe_port = await stack.enter_async_context(reachability.answer_probes(place.address, line))
            return await self._run_at(place, self._join(place, port, probe_port))

    async def _run_at(self, place: WorkerAddress, join: JoinRequest) -> LauncherOutcome:
        gang = await self._unless_stopped(self._gather(place, join))
        try:
            result = await self._run_ranks(gang, place)
            if self._settings.attempt_file is not None and result.code != ExitCode.OK:
                self._status.add_end(notice_of(result, self._settings.index))
                self.end_is_served = await self._unless_ordered(gang.await_ends(ENDS_S)) is not False
            return result
        finally:
            await gang.close()

    async def _run_ranks(self, gang: GangConnection, place: WorkerAddress) -> LauncherOutcome:
        try:
            result = await self._unless_stopped(self._check(gang, place))
            if result is None:
                return await self._supervise(gang, place)
            log.error("%s", result.message)
            gang.broadcast(notice_of(result, self._settings.index))
            return result
        except StoppedError:
            gang.broadcast(StopNotice(worker=self._settings.index))
            gang.broadcast(notice_of(STOPPED, self._settings.index))
            return STOPPED

    async def _unless_ordered(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Wait for a result, but not beyond a request to stop or the order for the next attempt: then it is None."""
        task = asyncio.ensure_future(waiting)
        while not task.done() and not self._stop_requested and self._settings.order() is None:
            await asyncio.wait([task], timeout=POLL_S)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    async def _unless_stopped(self, preparing: Coroutine[Any, Any, T]) -> T:
        """Return the result of `preparing`.

        Raises StoppedError if this worker is asked to stop before it is available.
        """
        task = asyncio.ensure_future(preparing)
        if self._stop_requested:
            task.cancel()
        self._preparing = task
        try:
            return await task
        except asyncio.CancelledError:
            raise StoppedError(STOPPED.message) from None
        finally:
            self._preparing = None

    def _join(self, place: WorkerAddress, port: int, probe_port: int) -> JoinRequest:
        settings = self._settings
        return JoinRequest(
            uid=settings.uid,
            attempt=settings.attempt,
            index=settings.index,
            address=place.address,
            node=settings.node,
            num_ranks=settings.num_ranks,
            port=port,
            topology=settings.topology,
            probe_port=probe_port,
        )

    async def _gather(self, place: WorkerAddress, join: JoinRequest) -> GangConnection:
        gang = await self._enter(place, join)
        self._status.table = gang.briefing.table
        _write_table(self._settings.run_dir, gang.briefing.table)
        return gang

    async def _enter(self, place: WorkerAddress, join: JoinRequest) -> GangConnection:
        settings, timeout_s = self._settings, self._options.gather_timeout_s
        status = self._status if settings.status_port is not None else None
        fbd = fbd_world_of_flags(self._arguments, sum(settings.proc_per_node))
        if settings.coordinator is None:
            briefing = Briefing.of([join], settings.rank_order, report=status is not None, fbd=fbd)
            return SingleWorkerGang(briefing, status)
        token = launcher_token(settings.secret_file, TokenRole.GATHER)
        if settings.index != COORDINATOR:
            return await join_gang(settings.coordinator, token=token, own=join, timeout_s=timeout_s)
        expected = ExpectedGang(
            uid=settings.uid,
            attempt=settings.attempt,
            proc_per_node=settings.proc_per_node,
            in_place=settings.attempt_file is not None,
        )
        coordinator = Coordinator(
            token=token, expected=expected, own=join, order=settings.rank_order, fbd=fbd, status=status
        )
        try:
            await coordinator.gather(address.listening_socket(settings.coordinator, place.listen_address), timeout_s)
        except BaseException:
            await coordinator.close()
            raise
        return coordinator

    async def _check(self, gang: GangConnection, place: WorkerAddress) -> LauncherOutcome | None:
        """Return why the ranks must not start, or None if they may."""
        settings = self._settings
        if settings.preflight is None:
            return None
        self._status.phase = GangPhase.PREFLIGHT
        check = self._preflight(settings.preflight, gang.briefing, place)
        return await preflight.until_notice(gang, asyncio.create_task(check))

    async def _preflight(
        self, requirements: PreflightRequirements, briefing: Briefing, place: WorkerAddress
    ) -> LauncherOutcome | None:
        settings, table, begun = self._settings, briefing.table, time.monotonic()
        result = await preflight.run_preflight(
            requirements, briefing, uid=settings.uid, index=settings.index, place=place, shm=settings.shm_dir
        )
        if result is not None:
            return result
        environments = {
            rank: self._environment(table, local_rank, place)
            for local_rank, rank in enumerate(table.worker(settings.index).ranks)
        }
        return await preflight.try_paths(
            max(1.0, requirements.timeout_s - (time.monotonic() - begun)),
            briefing,
            index=settings.index,
            environments=environments,
            arguments=self._arguments,
            folder=settings.run_dir,
        )

    async def _supervise(self, gang: GangConnection, place: WorkerAddress) -> LauncherOutcome:
        settings, table = self._settings, gang.briefing.table
        if self._stop_requested:
            raise StoppedError(STOPPED.message)
        log.info("world of %d ranks, table %s", table.world_size, table.digest[:12])
        self._status.phase = GangPhase.RUNNING
        supervisor = Supervisor(
            worker=settings.index, gang=gang, grace_s=self._options.grace_s, on_stop=self._note_stop
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, supervisor.reap)
        started = supervisor.start(lambda local_rank: self._start_rank(table, local_rank, place), settings.num_ranks)
        self._supervisor = supervisor
        async with contextlib.AsyncExitStack() as stack:
            if settings.log_to_stdout:
                stack.enter_context(LogRelay(STDOUT, {rank.rank: rank.log for rank in started}))
            if gang.briefing.report:
                stack.enter_context(report_progress(settings.progress_file, gang.report))
            stack.enter_context(_counters(settings, place.address, supervisor))
            result = await supervisor.run()
            process.kill_descendants()
        if settings.hub_url:
            await asyncio.sleep(DRAIN_S)
        return result

    def _start_rank(self, table: RankTable, local_rank: int, place: WorkerAddress) -> RankProcess:
        rank = table.worker(self._settings.index).ranks[local_rank]
        path = self._settings.run_dir / f"rank-{rank}.log"
        environment = self._environment(table, local_rank, place)
        command = [sys.executable, *self._options.program, *self._arguments]
        pid = process.spawn(command, environment=environment, log=path)
        return RankProcess(rank=rank, local_rank=local_rank, pid=pid, log=path)

    def _environment(self, table: RankTable, local_rank: int, place: WorkerAddress) -> dict[str, str]:
        return rank_environment(
            {**os.environ, Env.ATTEMPT: str(self._settings.attempt), Env.SHM_PREFIX: self._settings.shm_prefix},
            table,
            worker=self._settings.index,
            local_rank=local_rank,
            place=place,
            arguments=self._arguments,
        )


def launcher_token(secret_file: pathlib.Path | None, role: TokenRole) -> str:
    """Return the token of a role. Raises RendezvousError if the secret cannot be read."""
    assert secret_file is not None  # Settings has asked for it
    try:
        return derive_token(read_secret(secret_file), role)
    except (OSError, ValueError) as error:
        raise RendezvousError(f"the job's secret in {secret_file} cannot be read: {error}") from error


def _write_table(run_dir: pathlib.Path, table: RankTable) -> None:
    """Write the table to a temporary file and rename it: a reader that finds the file finds all of it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    draft = run_dir / f"{RANK_TABLE_FILE}.new"
    draft.write_text(json.dumps(table.to_json(), indent=1) + "\n", encoding="utf-8")
    draft.rename(run_dir / RANK_TABLE_FILE)


def _counters(
    settings: LauncherSettings, own: str, supervisor: Supervisor
) -> contextlib.AbstractContextManager[object]:
    """Sample counters, if an agent may read them."""
    if not settings.hub_url:
        return contextlib.nullcontext()
    from megatronapp_trainer.launch.preflight.gpu_counters import DeviceReader
    from megatronapp_trainer.launch.reporting.counters import CounterSampler, CounterThread

    devices = DeviceReader()
    metadata = {
        "worker": settings.index,
        "node": settings.node,
        "address": own,
        "pid": os.getpid(),
        "pidNamespace": pid_namespace(),
        "localRanks": settings.num_ranks,
        "devices": devices.count,
    }
    path = shared_memory.worker_ring(settings.shm_dir, settings.shm_prefix)
    sampler = CounterSampler(lambda: supervisor.pids, devices)
    return CounterThread(path, attempt=settings.attempt, metadata=metadata, sampler=sampler)
