"""Steps that wait for their parts: closed when all ranks have reported, or some time after the first. Pure.

The caller gives the time in seconds; any order of frames gives the same steps.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.scope.merge import Piece
from megatronapp_common.frames import Frame

WAIT_S = 0.2
"""From the first frame of a step to the moment when it is closed without what is missing."""
MAX_OPEN = 64
"""Steps that wait, of all runs; beyond, the oldest is closed as it is."""

StepKey = tuple[str, int]
"""Run and step."""


@dataclasses.dataclass(slots=True)
class OpenStep:
    """What has come of a step."""

    began_s: float
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    reported: set[int] = dataclasses.field(default_factory=set)
    tokens: Frame | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClosedStep:
    """A step that is ready to be shown."""

    run: str
    step: int
    tokens: Frame
    pieces: Sequence[Piece]
    missing: tuple[int, ...]
    """Ranks that had not reported."""


@dataclasses.dataclass(slots=True)
class StepBook:
    """All steps that wait. A run's steps are closed in their order."""

    wait_s: float = WAIT_S
    late: int = 0
    """Frames that came after their step was closed."""
    _open: dict[StepKey, OpenStep] = dataclasses.field(default_factory=dict)
    _next: dict[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def add_part(self, key: StepKey, rank: int, pieces: Iterable[Piece], now_s: float, *, more: bool) -> None:
        """Pieces of one rank; `more`: this rank sends others of the same step."""
        if (step := self._step(key, now_s)) is not None:
            step.pieces += pieces
            if not more:
                step.reported.add(rank)

    def add_tokens(self, key: StepKey, tokens: Frame, now_s: float) -> None:
        """Tokens of a step."""
        if (step := self._step(key, now_s)) is not None:
            step.tokens = tokens

    def _step(self, key: StepKey, now_s: float) -> OpenStep | None:
        run, step = key
        if not run or step < 0:
            raise ProtocolError("bad-part", f"a frame of run {run[:32]!r}, step {step}")
        if step < self._next.get(run, 0):
            self.late += 1
            return None
        return self._open.setdefault(key, OpenStep(now_s))

    def close(self, expected: Iterable[int], now_s: float) -> list[ClosedStep]:
        """Steps that are ready, in the order of their runs' steps. `expected`: ranks that publish."""
        ranks = frozenset(expected)
        closed: list[ClosedStep | None] = []
        for run in sorted({run for run, _ in self._open}):
            closed += self._close_run(run, ranks, now_s)
        while len(self._open) > MAX_OPEN:
            oldest = min(self._open, key=lambda one: (self._open[one].began_s, one))
            closed.append(self._shut(oldest, ranks))
        return [step for step in closed if step is not None]

    def _close_run(self, run: str, ranks: frozenset[int], now_s: float) -> Iterator["ClosedStep | None"]:
        """Nothing overtakes: a step that is ready waits for the one before it, as long as that one may wait."""
        waiting = sorted(step for one, step in self._open if one == run)
        for number in waiting:
            step = self._open[run, number]
            overdue = now_s - step.began_s >= self.wait_s
            follows = number == self._next.get(run, 0)
            whole = step.tokens is not None and step.reported >= ranks
            given_up = overdue and (step.tokens is not None or number != waiting[-1])
            if not given_up and not (whole and follows):
                return
            yield self._shut((run, number), ranks)

    def _shut(self, key: StepKey, ranks: frozenset[int]) -> ClosedStep | None:
        step = self._open.pop(key)
        self._next[key[0]] = max(self._next.get(key[0], 0), key[1] + 1)
        if step.tokens is None:
            return None
        missing = tuple(sorted(ranks - step.reported))
        return ClosedStep(run=key[0], step=key[1], tokens=step.tokens, pieces=step.pieces, missing=missing)

    def waits(self, run: str) -> bool:
        """Whether a step of this run may still be shown."""
        return any(one == run for one, _ in self._open)

    def due_s(self) -> float | None:
        """When the next step may be due; None if none waits."""
        began = [step.began_s for step in self._open.values()]
        return min(began) + self.wait_s if began else None

    def forget(self, run: str) -> None:
        """A run has ended for good."""
        for key in [key for key in self._open if key[0] == run]:
            del self._open[key]
        self._next.pop(run, None)


def number(header: Any, name: str) -> int:  # noqa: ANN401
    """A whole number of a frame's header. Raises ProtocolError."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ProtocolError("bad-frame", f"{name} is {str(value)[:64]!r}, not a whole number from 0 on")
    return value
