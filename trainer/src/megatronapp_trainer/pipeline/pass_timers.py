"""Announces the passes of megatron-core's schedules to an observer."""

from collections.abc import Callable, Iterable, Iterator

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.hooks.step_observer import ObservedTimer, ObserverTimers, StepObserver, ignore_timer


class PassTimers:
    """Announces each pass of megatron-core's schedules to an observer, as megatron-core's timers delimit it.

    A callable in the place of those timers; `others` has all but those of passes. Forward spans begin in our
    forward step, after the data wait. A backward timer does not say which pass it is of: megatron-core's schedules run
    them in a fixed order, which `begin_step` takes; where tasks run in any order, `begin_task` takes each.
    """

    def __init__(self, observer: StepObserver, others: ObserverTimers) -> None:
        self._observer = observer
        self._others = others
        self._backwards: Iterator[tuple[int, int]] = iter(())
        self._early = False
        self._passes = {
            "forward-compute": ObservedTimer(ignore_timer, lambda: observer.end(RecordKind.FORWARD)),
            "backward-compute": ObservedTimer(self._begin_backward, lambda: observer.end(RecordKind.BACKWARD)),
        }

    def __call__(self, name: str, log_level: int | None = None) -> ObservedTimer:
        """Return the timer of this name."""
        return self._passes.get(name) or self._others(name, log_level)

    def begin_step(self, backwards: Iterable[tuple[int, int]]) -> None:
        """Take the order of (chunk, microbatch) in which the backward passes of the step run."""
        self._backwards = iter(backwards)

    def begin_task(self, chunk: int, microbatch: int, *, early: bool) -> None:
        """Take the task that runs next; `early`: before its turn in the plan."""
        self._backwards = iter([(chunk, microbatch)])
        self._early = early

    def weight(self, chunk: int, microbatch: int, function: Callable[[int], None]) -> None:
        """Run `function`, which computes the weight gradients of a microbatch, within a span of WEIGHT."""
        self._observer.begin(RecordKind.WEIGHT, chunk, microbatch, early=self._early)
        function(microbatch)
        self._observer.end(RecordKind.WEIGHT)

    def gather(self, function: Callable[[], None]) -> None:
        """Run `function` within a span of PARAM_GATHER."""
        self._others.timed(RecordKind.PARAM_GATHER, function)()

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        """Begin a forward pass, whose data has been read."""
        self._observer.begin(RecordKind.FORWARD, chunk, microbatch, early=self._early)

    def _begin_backward(self) -> None:
        self._observer.begin(RecordKind.BACKWARD, *next(self._backwards), early=self._early)
