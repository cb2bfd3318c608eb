"""Tracks which parts of a step or probe have arrived: ranks number them, and report those they dropped. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError

MAX_PARTS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PartHeader:
    """Number of a PART frame. `number` None: the rank does not count, and its parts arrive in order."""

    rank: int
    number: int | None = None
    more: bool = False
    dropped: bool = False


def part_of(rank: int, header: Mapping[str, Any]) -> PartHeader:
    """Parse the header of a PART frame. Raises ProtocolError."""
    number = header.get("part")
    if number is not None and (type(number) is not int or not 0 <= number < MAX_PARTS):
        raise ProtocolError("bad-part", f"PART frame: part is {str(number)[:64]!r}, not a number from 0 on")
    return PartHeader(rank, number, more=bool(header.get("more")), dropped=bool(header.get("dropped")))


@dataclasses.dataclass(slots=True)
class _RankParts:
    seen: set[int] = dataclasses.field(default_factory=set)
    count: int | None = None
    """Known once the last part has arrived."""


@dataclasses.dataclass(slots=True)
class PartTracker:
    """The parts of all ranks of one step or probe."""

    finished: set[int] = dataclasses.field(default_factory=set)
    """Ranks of which all parts have arrived, or were reported as dropped."""
    dropped: set[int] = dataclasses.field(default_factory=set)
    _ranks: dict[int, _RankParts] = dataclasses.field(default_factory=dict)

    def add(self, part: PartHeader) -> None:
        """Note that a part has arrived."""
        known = self._ranks.setdefault(part.rank, _RankParts())
        number = len(known.seen) if part.number is None else part.number
        known.seen.add(number)
        if not part.more:
            known.count = number + 1
        if part.dropped:
            self.dropped.add(part.rank)
        if known.count is not None and len(known.seen) >= known.count:
            self.finished.add(part.rank)
