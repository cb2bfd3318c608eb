"""Supervision of the ranks of a worker: starts, signals and reaps them, and stops them after a failure of the gang."""

import asyncio
import dataclasses
import logging
import math
import pathlib
import signal
import time
from collections.abc import Callable

from megatronapp_trainer.launch.ranks import outcome as outcomes
from megatronapp_trainer.launch.ranks import process
from megatronapp_trainer.launch.ranks.failure_cause import Event, FailureState, RankEnd, judge
from megatronapp_trainer.launch.ranks.outcome import LauncherOutcome
from megatronapp_trainer.launch.rendezvous.gang_connection import GangConnection
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, StopNotice
from megatronapp_trainer.parallel.peer_loss import END_AT_CHECKPOINT, PEER_LOST, SAVE

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank that was started."""

    rank: int
    local_rank: int
    pid: int
    log: pathlib.Path


class Supervisor:
    """Watches ranks and gang; must be created and used inside a running event loop of the main thread.

    After the first sign of a failure the other ranks receive `PEER_LOST` and have `grace_s` seconds to end by
    themselves and log what they saw; then they are killed. The cause may be learned within that time, too.
    """

    def __init__(
        self, *, worker: int, gang: GangConnection, grace_s: float, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        self._worker = worker
        self._gang = gang
        self._grace_s = grace_s
        self._on_stop = on_stop
        self._running: dict[int, RankProcess] = {}
        self._logs: dict[int, pathlib.Path] = {}
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._stop_requested = False
        self._ends_at_checkpoint = False
        self._warned = False
        """True once the ranks were warned of a failure."""
        self._deadline = math.inf
        """When ranks are killed, and the cause of a failure is awaited no longer (time.monotonic)."""
        self._killed = False
        self._reported: EndNotice | None = None

    def start(self, start_rank: Callable[[int], RankProcess], num_ranks: int) -> list[RankProcess]:
        """Start the ranks. They ignore these signals, as this process does, until they watch for them."""
        for number in (PEER_LOST, END_AT_CHECKPOINT):
            signal.signal(number, signal.SIG_IGN)
        for local_rank in range(num_ranks):
            rank = start_rank(local_rank)
            self._running[rank.pid] = rank
            self._logs[rank.rank] = rank.log
            log.info("rank %d runs as process %d, output in %s", rank.rank, rank.pid, rank.log)
        return list(self._running.values())

    def stop(self) -> None:
        """Request a stop of all ranks of the gang, which they do together, at a step boundary."""
        if not self._stop_requested:
            self._gang.broadcast(StopNotice(worker=self._worker))
            self._stop_ranks()

    def stop_within(self, grace_s: float) -> None:
        """Request a stop of all ranks of the gang, and kill those of this worker that run after `grace_s` seconds."""
        self.stop()
        self._end_within(grace_s)
        self._changed.set()

    def end_at_checkpoint(self, ends: bool) -> None:
        """Let the ranks of the gang end with their next checkpoint, on which they agree as on a stop, or not any more.

        The signal says that the order has changed; ranks read it.
        """
        if self._ends_at_checkpoint != ends:
            self._ends_at_checkpoint = ends
            log.info("the ranks %s", "are to end with their next checkpoint" if ends else "are to continue after all")
            self._signal_ranks(END_AT_CHECKPOINT)

    def save(self) -> None:
        """Let the ranks of the gang write a checkpoint after the current step, and continue."""
        log.info("the ranks are to write a checkpoint")
        self._signal_ranks(SAVE)

    def _stop_ranks(self) -> None:
        """Send SIGTERM once only: a rank that is about to end would die of a second signal."""
        self._stop_requested = True
        self._on_stop()
        self._signal_ranks(signal.SIGTERM)

    def reap(self) -> None:
        """Reap and note the children that have ended."""
        for ended in process.reap():
            rank = self._running.pop(ended.pid, None)
            if rank is not None:
                self._note_end(rank, ended)

    @property
    def pids(self) -> dict[int, int]:
        """Return the pid of each rank that still runs, by local rank. Thread-safe."""
        return {rank.local_rank: rank.pid for rank in list(self._running.values())}

    async def run(self) -> LauncherOutcome:
        """Wait for the end of all ranks; reports the end to the gang, a failure as soon as it is certain.

        If the ranks have lost a peer, its worker may still identify it: its notice is awaited, too.
        """
        listener = asyncio.create_task(self._listen())
        try:
            while self._running or self._awaits_cause():
                self._changed.clear()
                self._act()
                await self._wait()
        finally:
            listener.cancel()
        self._report()
        return self.outcome()

    def outcome(self) -> LauncherOutcome:
        """Return the outcome of the events so far."""
        judgement = judge(self._events, stop_requested=self._stop_requested)
        if judgement.reason is None:
            return outcomes.complete([event for event in self._events if isinstance(event, RankEnd)])
        return outcomes.failed(judgement.reason, lambda rank: outcomes.tail(self._logs[rank]))

    def _note_end(self, rank: RankProcess, ended: process.ReapedProcess) -> None:
        how = f"exit code {ended.code}" if ended.signal is None else f"signal {ended.signal}"
        log.info("rank %d ended with %s", rank.rank, how)
        self._events.append(
            RankEnd(
                rank=rank.rank,
                local_rank=rank.local_rank,
                code=ended.code,
                signal=ended.signal,
                killed_by_us=self._killed,
            )
        )
        self._changed.set()

    async def _listen(self) -> None:
        while True:
            notice = await self._gang.notices.get()
            if isinstance(notice, EndNotice):
                log.info("worker %d: %s", notice.worker, notice.message or f"ended with exit code {notice.code}")
                self._events.append(notice)
            elif not self._stop_requested:
                log.info("worker %d was asked to stop, so all stop", notice.worker)
                self._stop_ranks()
            self._changed.set()

    def _end_within(self, grace_s: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _awaits_cause(self) -> bool:
        if len(self._gang.briefing.table.workers) == 1 or time.monotonic() >= self._deadline:
            return False
        return judge(self._events, stop_requested=self._stop_requested).standing is FailureState.SUSPICIOUS

    def _act(self) -> None:
        standing = judge(self._events, stop_requested=self._stop_requested).standing
        if standing is not FailureState.FINE and not self._warned:
            self._warned = True
            self._end_within(self._grace_s)
            self._signal_ranks(PEER_LOST)
        overdue = time.monotonic() >= self._deadline
        if standing is FailureState.CERTAIN or (standing is FailureState.SUSPICIOUS and overdue):
            self._report()
        if overdue and self._running and not self._killed:
            self._kill()

    def _report(self) -> None:
        if self._reported is None:
            self._reported = outcomes.notice_of(self.outcome(), self._worker)
            self._gang.broadcast(self._reported)

    def _kill(self) -> None:
        self._killed = True
        log.info("killing %s", ", ".join(f"rank {rank.rank}" for rank in self._running.values()))
        self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for rank in self._running.values():
            process.send(rank.pid, number)

    async def _wait(self) -> None:
        """Wait for an event or for the end of a grace period."""
        bounded = self._deadline < math.inf and not self._killed
        wait_s = max(0.0, self._deadline - time.monotonic()) if bounded else None
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return
