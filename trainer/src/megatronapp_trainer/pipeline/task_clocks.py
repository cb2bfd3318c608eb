"""Clocks of a rank's tasks: how long each one took, and on a device what it has yet to finish."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from megatronapp_trainer.pipeline.planning.lateness import OwnWork
from megatronapp_trainer.pipeline.planning.tasks import Task, TaskKind


class TaskTime(NamedTuple):
    """Length of a task in seconds, and its end on the host's monotonic clock."""

    task: Task
    seconds: float
    ended: float


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Times of the tasks that a rank ran in a step; moments are on the monotonic clock of its machine."""

    tasks: list[TaskTime] = dataclasses.field(default_factory=list)
    """In their order."""
    received: dict[Task, float] = dataclasses.field(default_factory=dict)
    """Moments at which the inputs were here that other ranks sent, by the task that takes each."""
    transfers: list[float] = dataclasses.field(default_factory=list)
    """Seconds of the transfers of inputs, where hosts run the tasks: ranks may be on several machines then."""
    begun: float = 0.0
    """Beginning of the step's tasks."""

    @property
    def ended(self) -> float:
        """Return the end of the last task."""
        return self.tasks[-1].ended


class TaskClock(Protocol):
    """Measures the tasks of a step, one after another."""

    def begin_step(self, usual_seconds: Mapping[tuple[TaskKind, int], float]) -> None:
        """Begin a step. `usual_seconds`: lengths of this rank's tasks, by kind and chunk, as far as they are known."""

    def begin(self, task: Task, *, input_seconds: float = 0.0) -> None:
        """Begin a task, whose input will be there in `input_seconds`."""

    def end(self) -> None:
        """End the task; on a device its work is launched."""

    def own_work(self) -> OwnWork:
        """Return what the device has yet to finish."""

    def has_inputs(self) -> bool:
        """Return whether the last task has begun; before it no task waits for its input any more."""

    def times(self) -> StepTimes | None:
        """Return the times of the step before, once; None before the first step, and if they have been returned."""


class TimingEvent(Protocol):
    """Methods used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return True if the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 - an event of the same kind
        """Return the milliseconds from this event to `end`."""


class HostTaskClock:
    """Tasks that have ended when their call returns."""

    def __init__(self) -> None:
        self._times: StepTimes | None = None

    def begin_step(self, usual_seconds: Mapping[tuple[TaskKind, int], float]) -> None:
        """Begin the times of a step; the usual lengths are not needed."""
        self._times = StepTimes(begun=time.perf_counter())

    def begin(self, task: Task, *, input_seconds: float = 0.0) -> None:
        """Begin a task, whose input is there."""
        self._task, self._begun = task, time.perf_counter()

    def end(self) -> None:
        """End the task, whose work is done."""
        assert self._times is not None
        ended = time.perf_counter()
        self._times.tasks.append(TaskTime(self._task, ended - self._begun, ended))

    def own_work(self) -> OwnWork:
        """Return no work: the host waits for each task."""
        return OwnWork(tasks=0, seconds=0.0)

    def has_inputs(self) -> bool:
        """Return True, as all tasks have ended."""
        return True

    def times(self) -> StepTimes | None:
        """Return the times of the step before, once."""
        times, self._times = self._times, None
        return times


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedTask:
    task: Task
    start: TimingEvent
    end: TimingEvent
    """Events of the compute stream."""
    launched: float
    """Host time at which its launch began."""
    usual_seconds: float
    input_at: float
    """Host time at which its input is expected."""


class DeviceTaskClock:
    """Tasks of the current CUDA stream, between two events each; nothing waits for the device within a step.

    The events of a step are read when the next one begins, as they have passed by then. That gives times in the step;
    the host's time of its beginning follows from the moments at which the host saw events that had passed: none can be
    seen before it has passed, and the smallest difference is off by the time between two queries at most.
    """

    def __init__(
        self, new_event: Callable[[], TimingEvent] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """Take the maker of events that measure time (torch's) and the host's clock in seconds."""
        self._new_event = new_event or _timing_event
        self._now = now
        self._free: list[TimingEvent] = []
        self._begun: TimingEvent
        self._launched: list[_LaunchedTask] = []
        self._unfinished: collections.deque[_LaunchedTask] = collections.deque()
        self._seen: list[tuple[TimingEvent, float]] = []
        """Events that had passed, and the host's time of that query."""
        self._free_at = 0.0
        """Host time at which the device was last seen to have finished a task."""

    def begin_step(self, usual_seconds: Mapping[tuple[TaskKind, int], float]) -> None:
        """Begin a step; `times` has been called for the one before."""
        self._usual_seconds = usual_seconds
        self._launched, self._seen = [], []
        self._unfinished.clear()
        self._begun = self._recorded()
        self._free_at = self._now()

    def begin(self, task: Task, *, input_seconds: float = 0.0) -> None:
        """Record where the compute stream begins the task, after the wait for its input."""
        self._task, self._launch_begun, self._input_seconds = task, self._now(), input_seconds
        self._start = self._recorded()

    def end(self) -> None:
        """Record where it ends."""
        launched = _LaunchedTask(
            task=self._task,
            start=self._start,
            end=self._recorded(),
            launched=self._launch_begun,
            usual_seconds=self._usual_seconds.get((self._task.kind, self._task.chunk), 0.0),
            input_at=self._launch_begun + self._input_seconds,
        )
        self._launched.append(launched)
        self._unfinished.append(launched)

    def own_work(self) -> OwnWork:
        """Return the tasks that the device has not finished, and the usual time until it has."""
        now = self._now()
        while self._unfinished and self._unfinished[0].end.query():
            self._seen.append((self._unfinished.popleft().end, now))
            self._free_at = now
        if not self._unfinished:
            return OwnWork(tasks=0, seconds=0.0)
        free = self._free_at
        for launched in self._unfinished:
            free = max(free, launched.launched, launched.input_at) + launched.usual_seconds
        return OwnWork(tasks=len(self._unfinished), seconds=max(free - now, 0.0))

    def has_inputs(self) -> bool:
        """Return whether the device has begun the last task, and so has passed all waits for inputs."""
        return not self._launched or self._launched[-1].start.query()

    def times(self) -> StepTimes | None:
        """Return the times of the step before, once; waits for its last task, which has ended long ago."""
        if not self._launched:
            return None
        last = self._launched[-1].end
        last.synchronize()
        self._seen.append((last, self._now()))
        begun = min(seen - 1e-3 * self._begun.elapsed_time(event) for event, seen in self._seen)
        times = StepTimes(
            tasks=[
                TaskTime(
                    launched.task,
                    1e-3 * launched.start.elapsed_time(launched.end),
                    begun + 1e-3 * self._begun.elapsed_time(launched.end),
                )
                for launched in self._launched
            ],
            begun=begun,
        )
        self._free += [self._begun, *(event for task in self._launched for event in (task.start, task.end))]
        self._launched = []
        return times

    def _recorded(self) -> TimingEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def _timing_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's own gap
    return event
