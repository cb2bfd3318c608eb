"""Liveness of rank 0: once it is lost, its runs cannot end by themselves.

An agent whose connection breaks may return with the same ranks; one that says goodbye, a rank that leaves its agent,
and a newer attempt are final. Pure: the caller gives the time in seconds.
"""

import dataclasses

PATIENCE_S = 30.0
"""Seconds that an agent has to connect again."""


@dataclasses.dataclass(slots=True)
class EngineLiveness:
    """`lost_since_s`: when the connection of rank 0 was lost; None while it is connected."""

    lost_since_s: float | None = None

    def mark_lost(self, now_s: float) -> None:
        """Note that the agent of rank 0 has disconnected."""
        self.lost_since_s = now_s if self.lost_since_s is None else self.lost_since_s

    def mark_alive(self) -> None:
        """Note that rank 0 publishes."""
        self.lost_since_s = None

    def due_s(self) -> float | None:
        """Return when rank 0 is given up; None while it is connected."""
        return None if self.lost_since_s is None else self.lost_since_s + PATIENCE_S

    def take_timeout(self, now_s: float) -> bool:
        """Return True once rank 0 has been disconnected for too long, and only the first time."""
        if self.lost_since_s is None or now_s < self.lost_since_s + PATIENCE_S:
            return False
        self.lost_since_s = None
        return True
