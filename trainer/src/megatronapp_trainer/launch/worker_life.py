"""The life of a launcher: one attempt, or with restart in place one attempt after another in the same pod."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from megatronapp_common.attempt_order import POLL_S, AttemptOrder, lock_path, take_lock
from megatronapp_common.names import ExitCode
from megatronapp_common.web.tokens import TokenRole
from megatronapp_trainer.errors import TrainerError
from megatronapp_trainer.launch.config.interface import find_worker_address
from megatronapp_trainer.launch.config.settings import LauncherSettings
from megatronapp_trainer.launch.launcher import Launcher, LauncherOptions, launcher_token, outcome_of_error
from megatronapp_trainer.launch.preflight import run as preflight
from megatronapp_trainer.launch.ranks import process
from megatronapp_trainer.launch.ranks.outcome import STOPPED, LauncherOutcome, notice_of
from megatronapp_trainer.launch.rendezvous.gang_status import GangPhase, GangStatus
from megatronapp_trainer.launch.rendezvous.messages import COORDINATOR
from megatronapp_trainer.launch.reporting.status_server import serve_status

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FINAL = frozenset({ExitCode.OK, ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FINITE, ExitCode.SUPERSEDED})
"""Codes with which a launcher ends at once: the worker is complete, or no restart helps."""
OF_RANKS = frozenset({"RankFailed", "RankKilled", "PeerLost", "Preempted"})
"""Reasons that say nothing against the pod. After any other (preflight, gathering, the launcher itself) it ends."""


def may_continue(outcome: LauncherOutcome) -> bool:
    """Return True if another attempt may run in the pod of a worker that ended so."""
    return outcome.code not in FINAL and outcome.reason in OF_RANKS


class WorkerLife:
    """Runs attempts until the worker is complete, is asked to stop, or gets no order for another; can run only once."""

    def __init__(self, settings: LauncherSettings, options: LauncherOptions, arguments: Sequence[str]) -> None:
        self._settings = settings
        self._options = options
        self._arguments = arguments
        self._status = GangStatus(self._settings.attempt)
        self._launcher: Launcher | None = None
        self._stopped = asyncio.Event()

    @property
    def attempt(self) -> int:
        """Attempt that was run last."""
        return self._settings.attempt

    @property
    def worker(self) -> int:
        """Index of the worker in that attempt."""
        return self._settings.index

    async def run(self) -> LauncherOutcome:
        """Run the worker to its end; errors become outcomes."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        process.let_through(STOP_SIGNALS)
        settings = self._settings
        try:
            if settings.attempt_file is not None:
                take_lock(lock_path(settings.shm_dir, settings.uid, settings.index))
            with self._served_status():
                if (order := settings.order()) is not None:
                    self._follow(order)
                elif settings.spare and (outcome := await self._wait_as_spare()) is not None:
                    return outcome
                return await self._run_attempts()
        except TrainerError as error:
            log.error("%s", error)
            return outcome_of_error(error)
        except OSError as error:
            log.exception("internal error of the launcher")
            return LauncherOutcome(code=ExitCode.OWN_FAILURE, reason="LauncherFailed", message=str(error))

    def _follow(self, order: AttemptOrder) -> None:
        """Begin the attempt that is ordered. Raises UsageError if the order names no place of the gang."""
        self._settings = self._settings.following(order)
        self._status.begin(order.attempt)

    async def _wait_as_spare(self) -> LauncherOutcome | None:
        """Check the node, and wait for the order to take a place of the gang; an outcome if this worker ends before."""
        settings = self._settings
        place, whose = find_worker_address(os.environ, socket.gethostname()), f"the spare on node {settings.node}"
        fault = await preflight.check_node(settings.preflight, whose=whose, place=place, shm=settings.shm_dir)
        if fault is not None:
            log.error("%s", fault.message)
            return fault
        self._status.phase = GangPhase.STANDBY
        log.info("waiting as a spare for the place of a worker")
        order = await self._await_order(math.inf)
        if order is None:
            return STOPPED
        self._follow(order)
        log.info("taking the place of worker %d in attempt %d", self._settings.index, order.attempt)
        return None

    def _stop(self) -> None:
        log.info("stop requested by signal")
        self._stopped.set()
        if self._launcher is not None:
            self._launcher.stop()

    def _served_status(self) -> contextlib.AbstractContextManager[object]:
        """Serve the status of the gang on worker 0, over all its attempts.

        A spare serves from the beginning: if its place is that of worker 0, and it does not follow the order, the
        attempt in its answer says so.
        """
        settings = self._settings
        if not (settings.spare or settings.index == COORDINATOR) or settings.status_port is None:
            return contextlib.nullcontext()
        place = find_worker_address(os.environ, socket.gethostname())
        token = launcher_token(settings.secret_file, TokenRole.VIEWER)
        return serve_status(self._status, token=token, address=place.listen_address, port=settings.status_port)

    async def _run_attempts(self) -> LauncherOutcome:
        while True:
            outcome = await self._run_attempt()
            self._status.add_end(notice_of(outcome, self._settings.index))
            order = await self._next_order(outcome)
            if order is None:
                return outcome
            log.info("continuing with attempt %d in place", order.attempt)
            self._follow(order)

    async def _run_attempt(self) -> LauncherOutcome:
        launcher = self._launcher = Launcher(self._settings, self._options, self._arguments, self._status)
        if self._stopped.is_set():
            launcher.stop()
        watches = [asyncio.create_task(self._watch(launcher))] if self._settings.attempt_file is not None else []
        watches += [asyncio.create_task(self._watch_saves(launcher))] if self._settings.save_file is not None else []
        try:
            return await launcher.run()
        finally:
            for watch in watches:
                watch.cancel()

    async def _watch(self, launcher: Launcher) -> None:
        """Stop an attempt once there is an order for a later one, or with its checkpoint if that is ordered."""
        while (order := self._settings.order()) is None:
            launcher.end_at_checkpoint(self._settings.ends_at_checkpoint())
            await asyncio.sleep(POLL_S)
        log.info("attempt %d is over: attempt %d is ordered", self._settings.attempt, order.attempt)
        launcher.stop(within_s=order.grace_s)

    async def _watch_saves(self, launcher: Launcher) -> NoReturn:
        """Let the ranks write a checkpoint for each request about this attempt."""
        done_time = 0
        while True:
            request = self._settings.save_request()
            if request is not None and request.time > done_time and launcher.save():
                done_time = request.time
            await asyncio.sleep(POLL_S)

    async def _next_order(self, outcome: LauncherOutcome) -> AttemptOrder | None:
        """Wait for the order to run another attempt; None: this worker has ended.

        A worker whose end is served nowhere ends, so that its pod shows that it failed.
        """
        if self._settings.attempt_file is None or outcome.code == ExitCode.OK:
            return None
        order = self._settings.order()
        is_served = self._launcher is None or self._launcher.end_is_served
        if order is None and not (is_served and may_continue(outcome)):
            return None
        self._status.phase = GangPhase.STANDBY
        log.info("ended with code %d (%s); waiting for the next attempt", outcome.code, outcome.reason)
        return await self._await_order(self._options.standby_s)

    async def _await_order(self, limit_s: float) -> AttemptOrder | None:
        """Wait for the order to run another attempt; None: there was none in time, or this worker is asked to stop."""
        order, end = self._settings.order(), time.monotonic() + limit_s
        while order is None and not self._stopped.is_set() and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), POLL_S)
            order = self._settings.order()
        return None if self._stopped.is_set() else order
