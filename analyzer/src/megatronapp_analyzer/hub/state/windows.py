"""Windows of detailed spans that were ordered: in every worker's control document until their steps are over."""

import math
import pathlib
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_analyzer.model import Cause, Verdict
from megatronapp_common.web.models import ApiModel

MAX_WINDOWS = 4
"""Windows that the control document holds at a time."""
MAX_RANKS = 64
"""Ranks that a window names; without any it is of all."""
MAX_STEPS = 1000
MAX_FIRST_STEP = 2**31 - 1
"""Largest step that the ranks' control document can hold."""
MAX_LEAD = 100_000
"""Steps from the newest known one to the begin of a window, so that each leaves the document."""
SUSPECT_STEPS = 3
"""Steps of a window that a verdict brings."""
SUSPECT_INTERVAL_S = 600.0
"""Least time between two of those windows: details of a fault change less than the fault."""
STEPS_AHEAD = 5
SECONDS_AHEAD = 2.0
"""Least lead of a window, so that the documents of all workers have it when the step before its first one begins."""


class WindowRequest(ApiModel):
    """A window to record."""

    model_config = ConfigDict(strict=True)

    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    granularity: Literal["base", "full"] = "full"
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_RANKS)] | None = None
    """With the other ranks of their tensor groups; null: all ranks."""
    from_step: Annotated[int | None, Field(ge=0, le=MAX_FIRST_STEP)] = None
    """First step; null, or one that is too near: as soon as all ranks can know of it."""


class Window(WindowRequest):
    """A window that was ordered. `reason` is the verdict for which the hub ordered it by itself, or null."""

    id: str
    from_step: Annotated[int, Field(ge=0)]
    reason: str | None = None

    @property
    def last_step(self) -> int:
        """The last step of the window."""
        return self.from_step + self.steps - 1


def first_step(newest_step: int | None, step_s: float | None) -> int:
    """Return the first step that a window surely covers whole, from the newest finished step and the time of steps."""
    ahead = STEPS_AHEAD if not step_s else max(STEPS_AHEAD, math.ceil(SECONDS_AHEAD / step_s))
    return ahead if newest_step is None else newest_step + ahead


class WindowStore:
    """Windows whose steps are not over. `on_change` is called after each change."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        self._file = JsonFile(path, writable=writable)
        stored = self._file.read() or {}
        self._number = int(stored.get("number", 0))
        self._windows = [Window.model_validate(entry) for entry in stored.get("windows", ())]
        self.on_change: Callable[[], None] = lambda: None

    def current(self, newest_step: int | None) -> list[Window]:
        """Return the windows that are not over after the newest finished step."""
        return [window for window in self._windows if newest_step is None or window.last_step > newest_step]

    def entries(self) -> list[dict[str, Any]]:
        """Return the part `windows` of the control document."""
        return [window.model_dump(include={"from_step", "steps", "granularity", "ranks"}) for window in self._windows]

    def add(
        self, request: WindowRequest, *, from_step: int, newest_step: int | None, reason: str | None = None
    ) -> Window | None:
        """Take a window and give it an id; None if MAX_WINDOWS are not over yet."""
        self._windows = self.current(newest_step)
        if len(self._windows) >= MAX_WINDOWS:
            return None
        self._number += 1
        fields = request.model_dump(by_alias=False) | {"from_step": from_step}
        window = Window(id=f"window-{self._number}", reason=reason, **fields)
        self._windows.append(window)
        self._store()
        return window

    def cancel(self, window_id: str, *, earliest: int) -> bool:
        """Let a window end before `earliest`, the first step of which all ranks can know that; False for an unknown id.

        A window that has begun is not deleted at once, so that all tensor groups end it at the same step.
        """
        found = next((window for window in self._windows if window.id == window_id), None)
        if found is None:
            return False
        steps = min(found.steps, earliest - found.from_step)
        shortened = [found.model_copy(update={"steps": steps})] if steps > 0 else []
        place = self._windows.index(found)
        self._windows[place : place + 1] = shortened
        self._store()
        return True

    def _store(self) -> None:
        self._file.write({"number": self._number, "windows": [window.model_dump() for window in self._windows]})
        self.on_change()


class SuspectWindows:
    """Orders a window of the ranks of a new verdict, so that its evidence has parts of layers and all collectives."""

    def __init__(self, store: WindowStore, now_s: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._now_s = now_s
        self._last_s: float | None = None

    def order(self, verdict: Verdict, *, newest_step: int, step_s: float | None, has_layers: bool) -> Window | None:
        """Order a window for a verdict that was not known before.

        None if the last one was less than SUSPECT_INTERVAL_S ago, for a hang, in which no step ends, or where the store
        is full.
        """
        now_s = self._now_s()
        is_soon = self._last_s is not None and now_s - self._last_s < SUSPECT_INTERVAL_S
        if is_soon or verdict.cause is Cause.HANG or not verdict.subject.ranks:
            return None
        request = WindowRequest(
            steps=SUSPECT_STEPS,
            granularity="full" if has_layers else "base",
            ranks=sorted(verdict.subject.ranks)[:MAX_RANKS],
        )
        window = self._store.add(
            request, from_step=first_step(newest_step, step_s), newest_step=newest_step, reason=verdict.id
        )
        if window is not None:
            self._last_s = now_s
        return window
