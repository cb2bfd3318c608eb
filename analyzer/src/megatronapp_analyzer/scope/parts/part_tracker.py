"""Which parts of a step or probe have come: ranks number them, and say when they had to drop one. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError

MAX_PARTS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PartHeader:
    """What a PART frame says of itself. `number` None: of a rank that does not count, whose parts come in order."""

    rank: int
    number: int | None = None
    more: bool = False
    dropped: bool = False


def part_of(rank: int, header: Mapping[str, Any]) -> PartHeader:
    """Of a frame's header. Raises ProtocolError."""
    number = header.get("part")
    if number is not None and (type(number) is not int or not 0 <= number < MAX_PARTS):
        raise ProtocolError("bad-part", f"PART frame: part is {str(number)[:64]!r}, not a number from 0 on")
    return PartHeader(rank, number, more=bool(header.get("more")), dropped=bool(header.get("dropped")))


@dataclasses.dataclass(slots=True)
class _RankParts:
    seen: set[int] = dataclasses.field(default_factory=set)
    count: int | None = None
    """Known once the last part has come."""


@dataclasses.dataclass(slots=True)
class PartTracker:
    """The parts of all ranks of one step or probe."""

    finished: set[int] = dataclasses.field(default_factory=set)
    """Ranks of which all parts have come, or the word that they were dropped."""
    dropped: set[int] = dataclasses.field(default_factory=set)
    _ranks: dict[int, _RankParts] = dataclasses.field(default_factory=dict)

    def add(self, part: PartHeader) -> None:
        """One part has come."""
        known = self._ranks.setdefault(part.rank, _RankParts())
        number = len(known.seen) if part.number is None else part.number
        known.seen.add(number)
        if not part.more:
            known.count = number + 1
        if part.dropped:
            self.dropped.add(part.rank)
        if known.count is not None and len(known.seen) >= known.count:
            self.finished.add(part.rank)
