"""Limits on the time that tracing costs a rank: of windows by flags, of windows that are ordered, of all records."""

import logging
from collections.abc import Callable

from megatronapp_native.errors import RingError

log = logging.getLogger(__name__)

ALLOWANCE_NS = 1_000_000_000
"""Cost of ordered windows above the limit that is let pass: without it a window at the begin of a training, or in one
of short steps, would be over after a step."""
SAVED_NS = 600_000_000_000
"""Time whose unspent part of the limit ordered windows may spend, so that they cost no more after days of training."""
COST_STEPS = 100
"""Steps over which the cost of all records is measured."""


class WindowBudget:
    """Time that recorded parts of passes have cost, as a part of all time, against its limit.

    The cost is the number of spans times the measured cost of a span; the calls of the hooks are not in it.
    """

    def __init__(self, limit: float, span_cost_ns: float | None) -> None:
        """Take the limit, 0 to 1, and the cost of a span in ns; an unknown cost (None) limits nothing."""
        self.limit = limit
        self._span_cost_ns = span_cost_ns or 0.0
        self._spent_ns = 0.0
        self._elapsed_ns = 0
        self._debt_ns = 0.0
        self._is_over = False
        self.used_in_window = 0.0
        """Part of the newest step in a window."""

    @property
    def used(self) -> float:
        """Return the part of the time so far."""
        return self._spent_ns / self._elapsed_ns if self._elapsed_ns else 0.0

    def step_done(self, length_ns: int, spans: int, *, in_window: bool = True) -> None:
        """Count a step of `length_ns` with this number of spans of parts.

        Outside of windows these are the first collectives of passes, which no ordered window is charged with.
        """
        cost_ns = spans * self._span_cost_ns
        self._elapsed_ns += length_ns
        self._spent_ns += cost_ns
        charged_ns = cost_ns if in_window else 0.0
        self._debt_ns = max(self._debt_ns + charged_ns - self.limit * length_ns, -self.limit * SAVED_NS)
        if in_window and length_ns:
            self.used_in_window = cost_ns / length_ns

    def allows_ordered(self) -> bool:
        """Return True if windows of the control page may continue."""
        return self._debt_ns <= ALLOWANCE_NS

    def allows(self, step: int) -> bool:
        """Return True if a window of the flags may cover a step; the log says when that changes."""
        is_over, was_over = self._update()
        if is_over and not was_over:
            log.warning(
                "step %d: windows have cost %.2g %% of the time, above --trace-budget %.2g; those of the flags are not "
                "recorded until they are below it",
                step,
                100 * self.used,
                100 * self.limit,
            )
        elif was_over and not is_over:
            log.info("step %d: windows of the flags are recorded again", step)
        return not is_over

    def watch_files(self, step: int) -> None:
        """Log when windows whose steps are the same on all ranks, and so have no limit, are above it."""
        is_over, was_over = self._update()
        if is_over and not was_over:
            log.warning(
                "step %d: windows have cost %.2g %% of the time, above --trace-budget %.2g; with --trace-dir they are "
                "recorded all the same, as files of all ranks have the same steps: a larger --trace-interval, or "
                "--trace-granularity base, costs less",
                step,
                100 * self.used,
                100 * self.limit,
            )

    def _update(self) -> tuple[bool, bool]:
        """Return whether the time is above the limit, and whether it was at the last call."""
        was_over, self._is_over = self._is_over, self.used > self.limit
        return self._is_over, was_over


class TracingCost:
    """Part of a rank's time that all records of its ring cost, against the limit of windows.

    Spans of phases are recorded in every step and have no limit, so that the log alone says when they cost more.
    """

    def __init__(self, limit: float, record_cost_ns: float, records: Callable[[], int]) -> None:
        """Take the limit, 0 to 1, the cost of a record in ns, and what counts the records of the ring so far.

        `records` raises RingError if the ring cannot be read; it is then not measured any more.
        """
        self._limit = limit
        self._cost_ns = record_cost_ns
        self._records = records
        self._counted: int | None = self._count()
        self._elapsed_ns = 0
        self._steps = 0
        self._is_over = False

    def step_done(self, step: int, length_ns: int) -> None:
        """Count the step before `step`; the log says when COST_STEPS of them go above the limit, or below again."""
        self._elapsed_ns += length_ns
        self._steps += 1
        if self._counted is None or self._steps < COST_STEPS or not self._elapsed_ns:
            return
        counted = self._count()
        if counted is None:
            self._counted = None
            return
        records = counted - self._counted
        used = records * self._cost_ns / self._elapsed_ns
        if used > self._limit and not self._is_over:
            log.warning(
                "step %d: tracing has cost %.2g %% of the last %d steps, above --trace-budget %.2g: %.0f records a "
                "step, of %.0f ns each; spans of phases are recorded in every step, so larger microbatches cost less",
                step,
                100 * used,
                self._steps,
                100 * self._limit,
                records / self._steps,
                self._cost_ns,
            )
        elif self._is_over and used <= self._limit:
            log.info("step %d: tracing has cost %.2g %% of the last %d steps", step, 100 * used, self._steps)
        self._is_over = used > self._limit
        self._counted, self._elapsed_ns, self._steps = counted, 0, 0

    def _count(self) -> int | None:
        try:
            return self._records()
        except RingError as error:
            log.warning("what tracing costs is not measured: %s", error)
            return None
