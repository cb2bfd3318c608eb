"""All runs that the hub knows."""

import asyncio
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatronapp_analyzer.scope.parts.wire_models import RunHeader, read
from megatronapp_analyzer.scope.store.frame_log import LogEntry
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget
from megatronapp_analyzer.scope.store.run import ScopeRun

MAX_REMOVED = 1024
"""Ids of removed runs that are remembered."""


class StateChange(NamedTuple):
    """A run in its new state, the frame that shows it, and ids of runs that were removed to make room."""

    run: ScopeRun
    entry: LogEntry
    removed: Sequence[str]


class RunStore(Mapping[str, ScopeRun]):
    """Runs by id, oldest first. Their frames and numbers share one memory budget."""

    def __init__(self, limit: int, budget: MemoryBudget) -> None:
        self.budget = budget
        self._limit = limit
        self._runs: dict[str, ScopeRun] = {}
        self._waiters: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._removed: deque[str] = deque(maxlen=MAX_REMOVED)

    def __getitem__(self, run: str) -> ScopeRun:
        return self._runs[run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def summaries(self) -> list[dict[str, Any]]:
        """Return a summary of each run, newest first."""
        return [run.summary() for run in reversed(self._runs.values())]

    def holds(self, run: ScopeRun) -> bool:
        """Return whether this very run is stored: another one may have taken its id."""
        return self._runs.get(run.id) is run

    def was_removed(self, run: str) -> bool:
        """Return whether the run was removed: an agent that connects again reports its end once more."""
        return run in self._removed

    def set_state(self, header: Mapping[str, Any]) -> StateChange:
        """Change the state of a run, or add it. Raises ProtocolError."""
        name = read(RunHeader, "RUN", header).run
        run = self._runs.get(name) or ScopeRun(name, self.budget)
        entry = run.set_state(header)
        self._runs[name] = run
        if (waiter := self._waiters.pop(name, None)) is not None:
            waiter.set()
        return StateChange(run, entry, self._remove_oldest())

    def _remove_oldest(self) -> list[str]:
        removed: list[str] = []
        while len(self._runs) > self._limit:
            oldest = next((run for run in self._runs.values() if run.ended), next(iter(self._runs.values())))
            self._runs.pop(oldest.id).close()
            removed.append(oldest.id)
        self._removed += removed
        return removed

    async def wait_for(self, run: str) -> None:
        """Wait until the run has a state."""
        if run not in self._runs:
            await self._waiters.setdefault(run, asyncio.Event()).wait()
