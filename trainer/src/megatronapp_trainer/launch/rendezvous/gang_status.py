"""What worker 0 knows of the gang, for those who ask over HTTP."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_trainer.launch.rendezvous.rank_table import RankTable


class GangPhase(enum.StrEnum):
    """How far the gang is."""

    GATHERING = "Gathering"
    PREFLIGHT = "Preflight"
    RUNNING = "Running"
    STOPPING = "Stopping"


class GangStatus:
    """Written by the launcher, read by the threads of the server; every value is replaced, never changed."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.phase = GangPhase.GATHERING
        self.missing: Sequence[int] = ()
        """Workers that have not come yet."""
        self.table: RankTable | None = None
        self.progress: Mapping[str, Any] | None = None
        """The newest progress page of any worker."""

    def document(self) -> dict[str, Any]:
        """The answer of docs/contracts.md, section 3."""
        table, progress = self.table, self.progress
        return {
            "attempt": self.attempt,
            "phase": self.phase,
            "missing": list(self.missing),
            "rankTable": None if table is None else table.to_json(),
            "progress": None if progress is None else {name: _json_value(value) for name, value in progress.items()},
        }


def _json_value(value: object) -> object:
    """JSON has no word for NaN and Inf."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
