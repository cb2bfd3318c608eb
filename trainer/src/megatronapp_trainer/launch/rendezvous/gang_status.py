"""Status of the gang that worker 0 serves over HTTP."""

import enum
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.messages import EndNotice
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable


class GangPhase(enum.StrEnum):
    """Progress of the gang's gathering."""

    GATHERING = "Gathering"
    PREFLIGHT = "Preflight"
    RUNNING = "Running"
    STOPPING = "Stopping"
    STANDBY = "Standby"
    """The ranks of this worker have ended, and its launcher waits for the next attempt (restart in place)."""


class GangStatus:
    """State that the launcher writes and the server's threads read; values are replaced, never changed."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.phase = GangPhase.GATHERING
        self.missing: Sequence[int] = ()
        """Workers that have not joined yet."""
        self.table: RankTable | None = None
        self.progress: Mapping[str, Any] | None = None
        """Newest progress document of any worker."""
        self.ends: Mapping[int, Mapping[str, Any]] = {}
        """How the ranks of workers ended whose launchers still run, by worker."""

    def begin(self, attempt: int) -> None:
        """Forget everything of the attempt before."""
        self.phase, self.missing, self.table, self.progress, self.ends = GangPhase.GATHERING, (), None, None, {}
        self.attempt = attempt

    def add_end(self, notice: EndNotice) -> None:
        """Store how the ranks of a worker ended; a first record stays. An end with success is none."""
        if notice.code == ExitCode.OK or notice.worker in self.ends:
            return
        end = {
            "worker": notice.worker,
            "code": notice.code,
            "reason": notice.reason,
            "rank": notice.rank,
            "signal": notice.signal,
            "message": notice.log,
            "finishedAt": round(time.time(), 3),
        }
        self.ends = {**self.ends, notice.worker: end}

    def document(self) -> dict[str, Any]:
        """Return the answer of docs/contracts.md, section 3."""
        table, progress = self.table, self.progress
        return {
            "attempt": self.attempt,
            "phase": self.phase,
            "missing": list(self.missing),
            "rankTable": None if table is None else table.to_json(),
            "ends": list(self.ends.values()),
            "progress": None if progress is None else {name: _json_value(value) for name, value in progress.items()},
        }


def _json_value(value: object) -> object:
    """Replace NaN and infinite numbers, which JSON cannot write."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
