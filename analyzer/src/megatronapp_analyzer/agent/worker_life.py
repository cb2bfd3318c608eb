"""The life of an agent: one attempt of its worker, or with restart in place one attempt after another."""

import asyncio
import logging
import signal
import time

from megatronapp_analyzer.agent.rings import RingLibrary
from megatronapp_analyzer.agent.service import Agent
from megatronapp_analyzer.agent.settings import AgentSettings
from megatronapp_common.attempt_order import POLL_S, AttemptOrder, lock_path
from megatronapp_common.processes import is_locked

LOG = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AgentLife:
    """Runs an agent for each attempt, until the launcher has ended or a signal is received; can run only once."""

    def __init__(self, settings: AgentSettings, library: RingLibrary) -> None:
        order = settings.order()
        self._lock = lock_path(settings.shm_dir, settings.uid, settings.worker)
        self._settings = settings if order is None else settings.following(order)
        self._library = library
        self._agent: Agent | None = None
        self._stopped = False

    async def run(self) -> None:
        """Run until the rings of the last attempt have ended or a signal is received."""
        for sent in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(sent, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # those that `__main__` holds, too
        if self._settings.spare:
            await self._await_launcher()
        else:
            await self._run_attempt()
        while (order := await self._next_order()) is not None:
            self._settings = self._settings.following(order)
            LOG.info("continuing with attempt %d as worker %d", self._settings.attempt, self._settings.worker)
            await self._run_attempt()

    async def _await_launcher(self) -> None:
        """Wait until the launcher of a spare lives: without its lock it would be taken for one that has ended."""
        while not self._stopped and not is_locked(self._lock):
            await asyncio.sleep(POLL_S)

    def _stop(self) -> None:
        self._stopped = True
        if self._agent is not None:
            self._agent.stop()

    async def _run_attempt(self) -> None:
        agent = self._agent = Agent(self._settings, self._library, monotonic_ns=time.monotonic_ns)
        watch = asyncio.create_task(self._watch(agent)) if self._settings.attempt_file is not None else None
        try:
            await agent.run()
        finally:
            if watch is not None:
                watch.cancel()

    async def _watch(self, agent: Agent) -> None:
        """Let the agent end with the launcher's current attempt once there is an order for a later one."""
        while self._settings.order() is None:
            await asyncio.sleep(POLL_S)
        agent.stop()

    async def _next_order(self) -> AttemptOrder | None:
        """Wait for the next attempt; None: the launcher has ended, or the agent was asked to stop."""
        settings = self._settings
        if settings.attempt_file is None:
            return None
        while not self._stopped:
            lives = is_locked(self._lock)
            if (order := settings.order()) is not None:
                return order
            if not lives:
                return None
            await asyncio.sleep(POLL_S)
        return None
