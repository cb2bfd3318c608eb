"""Whether the model that runs were given to is still there: when rank 0 goes, its runs can have no end of their own.

An agent whose connection breaks off may come back with the same ranks; one that says goodbye, a rank that leaves its
agent, and a newer attempt are for good. Pure: the caller gives the time in seconds.
"""

import dataclasses

PATIENCE_S = 30.0
"""For an agent to connect again."""


@dataclasses.dataclass(slots=True)
class EngineLiveness:
    """`away_s`: since when rank 0 cannot be heard; None while it can."""

    lost_since_s: float | None = None

    def mark_lost(self, now_s: float) -> None:
        """The connection of rank 0's agent is gone."""
        self.lost_since_s = now_s if self.lost_since_s is None else self.lost_since_s

    def mark_alive(self) -> None:
        """Rank 0 is there."""
        self.lost_since_s = None

    def due_s(self) -> float | None:
        """When it counts as lost."""
        return None if self.lost_since_s is None else self.lost_since_s + PATIENCE_S

    def take_timeout(self, now_s: float) -> bool:
        """Whether it has been away for too long; said once."""
        if self.lost_since_s is None or now_s < self.lost_since_s + PATIENCE_S:
            return False
        self.lost_since_s = None
        return True
