"""Status of the gang that worker 0 serves over HTTP."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_trainer.launch.rendezvous.rank_table import RankTable


class GangPhase(enum.StrEnum):
    """Progress of the gang's gathering."""

    GATHERING = "Gathering"
    PREFLIGHT = "Preflight"
    RUNNING = "Running"
    STOPPING = "Stopping"


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

    def document(self) -> dict[str, Any]:
        """Return the answer of docs/contracts.md, section 3."""
        table, progress = self.table, self.progress
        return {
            "attempt": self.attempt,
            "phase": self.phase,
            "missing": list(self.missing),
            "rankTable": None if table is None else table.to_json(),
            "progress": None if progress is None else {name: _json_value(value) for name, value in progress.items()},
        }


def _json_value(value: object) -> object:
    """Replace NaN and infinite numbers, which JSON cannot write."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
