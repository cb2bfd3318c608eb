"""Choice of the steps in which a rank records parts of its passes: by flags, and by windows of the control page."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_trainer.config import TraceWindows
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.windows.budget import WindowBudget

MAX_NUMBER = 2_147_483_647


class TraceLevel(enum.IntEnum):
    """Detail of the spans of a step."""

    PHASE = 0
    """Passes, transfers, waits, and the first tensor-parallel collective of each pass."""
    COLLECTIVE = 1
    """All tensor-parallel collectives, too: MegatronApp's `base`."""
    LAYER = 2
    """Parts of layers, too: MegatronApp's `full`."""


LEVELS = {"base": TraceLevel.COLLECTIVE, "full": TraceLevel.LAYER}
"""Levels by MegatronApp's names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandedWindow:
    """A window that users or the hub have ordered."""

    from_step: int
    steps: int
    level: TraceLevel
    ranks: frozenset[int] | None = None
    """Ranks of the launcher; None: all."""

    @classmethod
    def from_json(cls, document: object) -> "CommandedWindow":
        """Parse a window of the control page.

        Raises UsageError.
        """
        if not isinstance(document, Mapping):
            raise UsageError(f"window {document!r}: give an object with fromStep, steps, granularity, ranks")
        try:
            ranks = document.get("ranks")
            window = cls(
                from_step=int(document["fromStep"]),
                steps=int(document["steps"]),
                level=LEVELS[document["granularity"]],
                ranks=None if ranks is None else frozenset(int(rank) for rank in ranks),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"window {dict(document)}: {error!r}; give fromStep, steps, granularity (base or full), ranks"
            ) from error
        if not (0 <= window.from_step <= MAX_NUMBER and 1 <= window.steps <= MAX_NUMBER):
            raise UsageError(f"window {dict(document)}: fromStep is 0 or more, steps 1 or more, below 2^31")
        return window

    def covers(self, step: int, members: frozenset[int]) -> bool:
        """Return True if it covers `step` of a tensor group with these members."""
        is_theirs = self.ranks is None or bool(self.ranks & members)
        return is_theirs and self.from_step <= step < self.from_step + self.steps


def commanded_windows(document: Mapping[str, Any]) -> list[CommandedWindow]:
    """Parse the windows of a control page.

    Raises UsageError.
    """
    windows = document.get("windows", ())
    if not isinstance(windows, list | tuple):
        raise UsageError(f"windows is {type(windows).__name__}; give a list")
    return [CommandedWindow.from_json(window) for window in windows]


def is_in_periodic_window(step: int, flags: TraceWindows) -> bool:
    """Return True if MegatronApp's flags select a step: those after each `interval` steps, and not step 0.

    As there: with --trace-interval 5 and --continuous-trace-iterations 2 the steps 1, 2, 6, 7, 11, 12, ...
    """
    return step > 0 and (step - 1) % flags.interval < flags.count


class WindowPlan:
    """Level of each step of a rank. A tensor group is in a window if one of its members is."""

    def __init__(self, members: Iterable[int], flags: TraceWindows | None) -> None:
        """Take the launcher's numbers of the ranks of the tensor group, and the windows of the flags, if any."""
        self._members = frozenset(members)
        self._flags = flags
        self._commanded: list[CommandedWindow] = []
        self._stopped: frozenset[CommandedWindow] = frozenset()

    def command(self, windows: Iterable[CommandedWindow]) -> None:
        """Replace the windows of the control page."""
        self._commanded = list(windows)
        self._stopped &= frozenset(self._commanded)

    def stop(self, step: int) -> bool:
        """End the windows of the control page that cover a step, for this rank; return True if there are any."""
        covering = {window for window in self._commanded if window.covers(step, self._members)} - self._stopped
        self._stopped |= covering
        return bool(covering)

    def has_stopped(self, step: int) -> bool:
        """Return True if a window that would cover a step was ended by `stop`."""
        return any(window.covers(step, self._members) for window in self._stopped)

    def is_periodic(self, step: int) -> bool:
        """Return True if a window of the flags covers a step, on all ranks alike."""
        return self._flags is not None and is_in_periodic_window(step, self._flags)

    def commanded_level(self, step: int) -> TraceLevel:
        """Return the most detailed level that a window of the control page requests for `step`, as this rank knows it.

        The ranks of a group may know different pages at a time; see `agreement`.
        """
        known = (window for window in self._commanded if window not in self._stopped)
        levels = (window.level for window in known if window.covers(step, self._members))
        return max(levels, default=TraceLevel.PHASE)

    def periodic_level(self, step: int, budget: WindowBudget | None = None) -> TraceLevel:
        """Return the level that the flags request for `step`; PHASE outside of their windows, or above a budget."""
        if self._flags is None or not self.is_periodic(step) or not (budget is None or budget.allows(step)):
            return TraceLevel.PHASE
        return LEVELS[self._flags.granularity]
