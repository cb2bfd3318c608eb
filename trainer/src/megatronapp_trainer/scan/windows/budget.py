"""Limit on the time that windows of the flags cost a rank."""

import logging

log = logging.getLogger(__name__)


class WindowBudget:
    """Time that recorded parts of passes have cost, as a part of all time, against its limit.

    The cost is the number of spans times the measured cost of a span; the calls of the hooks are not in it.
    """

    def __init__(self, limit: float, span_cost_ns: float | None) -> None:
        """Take the limit, 0 to 1, and the cost of a span in ns; an unknown cost (None) limits nothing."""
        self._limit = limit
        self._span_cost_ns = span_cost_ns or 0.0
        self._spent_ns = 0.0
        self._elapsed_ns = 0
        self._is_over = False

    @property
    def used(self) -> float:
        """Return the part of the time so far."""
        return self._spent_ns / self._elapsed_ns if self._elapsed_ns else 0.0

    def step_done(self, length_ns: int, spans: int) -> None:
        """Count a step of `length_ns` with this number of spans of parts."""
        self._elapsed_ns += length_ns
        self._spent_ns += spans * self._span_cost_ns

    def allows(self, step: int) -> bool:
        """Return True if a window may cover a step; the log says when that changes."""
        is_over = self.used > self._limit
        if is_over and not self._is_over:
            log.warning(
                "step %d: windows have cost %.2g %% of the time, above --trace-budget %.2g; those of the flags are not "
                "recorded until they are below it",
                step,
                100 * self.used,
                100 * self._limit,
            )
        elif self._is_over and not is_over:
            log.info("step %d: windows of the flags are recorded again", step)
        self._is_over = is_over
        return not is_over
