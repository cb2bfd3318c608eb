"""What was asked of the model once more, and what has come of it. Pure."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from megatronapp_analyzer.hub.scope.merge import Piece

MAX_PROBES = 64
"""That are waited for; beyond, the oldest is forgotten."""
MAX_PROBE_BYTES = 256 << 20
"""That may come of one probe."""


@dataclasses.dataclass(slots=True)
class _Probe:
    done: Callable[[Sequence[Piece]], None]
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    reported: set[int] = dataclasses.field(default_factory=set)
    bytes: int = 0


class ProbeBook:
    """Probes by their id. `key` tells probes for the same apart from others, so that none is asked twice."""

    def __init__(self) -> None:
        self._probes: OrderedDict[str, _Probe] = OrderedDict()
        self._by_key: dict[object, str] = {}
        self._early: OrderedDict[str, list[tuple[int, list[Piece], bool]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probes)

    def asked(self, key: object) -> str | None:
        """The probe that was asked for this and has not come yet."""
        return self._by_key.get(key)

    def expect(self, probe: str, key: object, done: Callable[[Sequence[Piece]], None]) -> None:
        """Wait for a probe; what came before its answer did is taken, too."""
        self._probes[probe] = _Probe(done)
        self._by_key[key] = probe
        for rank, pieces, more in self._early.pop(probe, ()):
            self.add(probe, rank, pieces, more=more)
        while len(self._probes) > MAX_PROBES:
            self._forget(next(iter(self._probes)))

    def add(self, probe: str, rank: int, pieces: Iterable[Piece], *, more: bool) -> None:
        """Pieces of one rank. Of probes that nobody waits for a few are kept: their answer may be on its way."""
        known = self._probes.get(probe)
        if known is None:
            self._early.setdefault(probe, []).append((rank, list(pieces), more))
            while len(self._early) > 4:
                self._early.popitem(last=False)
            return
        for piece in pieces:
            known.bytes += piece.tensor.nbytes
            if known.bytes <= MAX_PROBE_BYTES:
                known.pieces.append(piece)
        if not more:
            known.reported.add(rank)

    def settle(self, expected: Iterable[int]) -> None:
        """Hand on what is complete: all of these ranks have reported."""
        ranks = set(expected)
        if not ranks or min(ranks) < 0:
            return
        for probe in [name for name, one in self._probes.items() if one.reported >= ranks]:
            found = self._probes[probe]
            self._forget(probe)
            found.done(found.pieces)

    def _forget(self, probe: str) -> None:
        del self._probes[probe]
        self._by_key = {key: name for key, name in self._by_key.items() if name != probe}
