"""Roles of ranks: the passes that each runs."""

import enum


class RankRole(enum.StrEnum):
    """The passes that a rank runs. Values are those of `WorkerRole` in the job's world."""

    ALL = "all"
    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def has_optimizer(self) -> bool:
        """Return True if the rank updates weights; a forward rank receives them."""
        return self is not RankRole.FORWARD
