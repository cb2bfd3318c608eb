"""Assembles steps of parts: a step is closed when all ranks have reported, or some time after the first. Pure.

The caller gives the time in seconds; any order of frames gives the same steps. Every step is closed: without its tokens
some time after its newest part, and soon once its run has ended.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.merge import ShardTensor
from megatronapp_analyzer.scope.parts.part_tracker import PartHeader, PartTracker
from megatronapp_common.frames import Frame

WAIT_S = 0.2
"""Seconds from the newest frame of a step until it is closed without missing parts: those of a long prompt arrive over
seconds, and tokens may overtake the last of them."""
TOKENS_WAIT_S = 60.0
"""Seconds from the newest part of a step until it is closed without tokens: first stages report far earlier."""
MAX_OPEN = 64
"""Open steps of all runs; beyond, the oldest is closed."""

StepKey = tuple[str, int]
"""Run and step."""


@dataclasses.dataclass(slots=True)
class OpenStep:
    """The frames of a step that have arrived."""

    began_s: float
    received_s: float
    tensors: list[ShardTensor] = dataclasses.field(default_factory=list)
    parts: PartTracker = dataclasses.field(default_factory=PartTracker)
    tokens: Frame | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClosedStep:
    """A step that is ready to be shown."""

    run: str
    step: int
    first: int
    """Below `step` if no frame of the steps before arrived: the first of those."""
    tokens: Frame | None
    """None if they were lost."""
    tensors: Sequence[ShardTensor]
    missing: tuple[int, ...]
    """Ranks that had not reported all parts."""
    dropped: tuple[int, ...]
    """Ranks that reported a dropped part."""


@dataclasses.dataclass(slots=True)
class ScopeStepAssembler:
    """All open steps. Steps of a run are closed in order."""

    wait_s: float = WAIT_S
    tokens_wait_s: float = TOKENS_WAIT_S
    late: int = 0
    """Frames that arrived after their step was closed."""
    _open: dict[StepKey, OpenStep] = dataclasses.field(default_factory=dict)
    _next: dict[str, int] = dataclasses.field(default_factory=dict)
    _ended: set[str] = dataclasses.field(default_factory=set)

    def __len__(self) -> int:
        return len(self._open)

    def add_part(self, key: StepKey, pieces: Iterable[ShardTensor], now_s: float, part: PartHeader) -> None:
        """Add tensors of one rank."""
        if (step := self._step(key, now_s)) is not None:
            step.tensors += pieces
            step.parts.add(part)

    def add_tokens(self, key: StepKey, tokens: Frame, now_s: float) -> None:
        """Add the tokens of a step."""
        if (step := self._step(key, now_s)) is not None:
            step.tokens = tokens

    def end(self, run: str) -> None:
        """Note that a run has ended: its missing tokens are not waited for."""
        self._ended.add(run)

    def reopen(self, run: str) -> None:
        """Note that a run has not ended, although its end was reported."""
        self._ended.discard(run)

    def _step(self, key: StepKey, now_s: float) -> OpenStep | None:
        run, step = key
        if not run or step < 0:
            raise ProtocolError("bad-part", f"a frame of run {run[:32]!r}, step {step}")
        if step < self._next.get(run, 0):
            self.late += 1
            return None
        found = self._open.setdefault(key, OpenStep(now_s, now_s))
        found.received_s = now_s
        return found

    def close(self, expected: Iterable[int], now_s: float) -> list[ClosedStep]:
        """Close steps that are ready, in the order of their runs' steps. `expected`: ranks that publish."""
        ranks = frozenset(expected)
        closed: list[ClosedStep] = []
        for run in sorted({run for run, _ in self._open}):
            closed += self._close_run(run, ranks, now_s)
        while len(self._open) > MAX_OPEN:
            oldest = min(self._open, key=lambda key: (self._open[key].began_s, key))
            closed.append(self._shut(oldest, ranks))
        return closed

    def _close_run(self, run: str, ranks: frozenset[int], now_s: float) -> Iterator[ClosedStep]:
        """Yield steps in order: a step that is ready waits for the one before it, until that one is due."""
        for number in self._waiting(run):
            step = self._open[run, number]
            follows = number == self._next.get(run, 0)
            whole = step.tokens is not None and step.parts.finished >= ranks
            if not (whole and follows) and now_s < self._deadline_s(run, number):
                return
            yield self._shut((run, number), ranks)

    def _waiting(self, run: str) -> list[int]:
        return sorted(step for other, step in self._open if other == run)

    def _deadline_s(self, run: str, number: int) -> float:
        """Return when a step is closed without what is missing. Tokens of a later step show that its own were lost."""
        step = self._open[run, number]
        later = (
            later_step.tokens for (other, place), later_step in self._open.items() if other == run and place > number
        )
        known = step.tokens is not None or run in self._ended or any(tokens is not None for tokens in later)
        return step.received_s + (self.wait_s if known else self.tokens_wait_s)

    def _shut(self, key: StepKey, ranks: frozenset[int]) -> ClosedStep:
        run, number = key
        step = self._open.pop(key)
        first = min(self._next.get(run, 0), number)
        self._next[run] = max(self._next.get(run, 0), number + 1)
        return ClosedStep(
            run=run,
            step=number,
            first=first,
            tokens=step.tokens,
            tensors=step.tensors,
            missing=tuple(sorted(ranks - step.parts.finished)),
            dropped=tuple(sorted(step.parts.dropped)),
        )

    def waits(self, run: str) -> bool:
        """Return whether steps of this run are open."""
        return any(other == run for other, _ in self._open)

    def due_s(self) -> float | None:
        """Return when the next step closes at the latest; None if none is open."""
        runs = {run for run, _ in self._open}
        return min((self._deadline_s(run, self._waiting(run)[0]) for run in runs), default=None)

    def forget(self, run: str) -> None:
        """Remove all steps of a run."""
        for key in [key for key in self._open if key[0] == run]:
            del self._open[key]
        self._next.pop(run, None)
        self._ended.discard(run)


def number(header: Any, name: str) -> int:  # noqa: ANN401
    """Return a whole number of a frame's header. Raises ProtocolError."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ProtocolError("bad-frame", f"{name} is {str(value)[:64]!r}, not a whole number from 0 on")
    return value
