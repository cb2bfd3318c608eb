"""The executor on a device: inputs on their way, late ones, progress, and times without a wait for the device."""

import collections
from collections.abc import Iterable
from typing import Any

import pytest

pytestmark = pytest.mark.torch

MS = 1e-3


class Timeline:
    """A device in the test's time: tasks run one after another, each after the input that it waits for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, moment: float) -> None:
        self.free = max(self.free, moment)

    def run(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def event(self) -> "TimelineEvent":
        return TimelineEvent(self)


class TimelineEvent:
    """An event of the device's stream."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self._timeline.now, self._timeline.free)

    def query(self) -> bool:
        return self._timeline.now >= self.at

    def synchronize(self) -> None:
        self._timeline.now = max(self._timeline.now, self.at)

    def elapsed_time(self, end: "TimelineEvent") -> float:
        return (end.at - self.at) / MS


class PlannedTransport:
    """Inputs whose tasks end at given times, each number n of a sender at `ends[n]`; a copy may take longer."""

    def __init__(self, timeline: Timeline, inputs: dict[Any, tuple[float, float, int, float]]) -> None:
        """`inputs`: (posted, arrived, number of the task that makes it, end of that task) by the task that takes it."""
        self._timeline = timeline
        self._inputs = inputs
        self.events: list[str] = []

    def begin_step(self, expected: Iterable[Any]) -> None:
        assert set(expected) == set(self._inputs)
        self._left = dict(self._inputs)

    def poll(self) -> dict[Any, Any]:
        arrived = [task for task, (_, at, _, _) in self._left.items() if at <= self._timeline.now]
        return {task: self._left.pop(task) and f"input {task}" for task in arrived}

    def posted(self) -> dict[Any, Any]:
        from megatronapp_trainer.pipeline.transport.task_transport import Posted

        now = self._timeline.now
        return {task: Posted(1, number) for task, (at, end, number, _) in self._left.items() if at <= now < end}

    def take_posted(self, task: Any) -> str:
        self.events.append(f"early {task}")
        self._timeline.wait_until(self._left.pop(task)[1])
        return f"input {task}"

    def sender_progress(self, task: Any) -> int:
        now = self._timeline.now
        return sum((end <= now) + (end - 5 * MS <= now) for _, _, _, end in self._inputs.values())

    def copied_ns(self, task: Any) -> tuple[int, int] | None:
        return (0, 0) if self._inputs[task][1] <= self._timeline.now else None

    def mark_progress(self, index: int, stream: object = None) -> None:
        self.events.append(f"mark {index}")

    def send(self, target: Any, tensor: Any) -> None:
        self.events.append(f"send {target.task}")

    def wait(self, limit_s: float | None = None) -> None:
        self._timeline.sleep(50e-6)


class LandingTransport(PlannedTransport):
    """Inputs that land as soon as the rank asks for their sender's progress, and whose copies never get times."""

    def sender_progress(self, task: Any) -> int:
        number = super().sender_progress(task)
        if self._timeline.now >= self._inputs[task][3] - 0.25 * MS:
            self._timeline.sleep(max(self._inputs[task][1] - self._timeline.now, 0.0))
        return number

    def copied_ns(self, task: Any) -> tuple[int, int] | None:
        return None


class LostTransport(PlannedTransport):
    """Inputs on their way, all of which are too late."""

    def take_posted(self, task: Any) -> str:
        self._timeline.wait_until(1e9)
        return super().take_posted(task)


class RecordedPasses:
    """Passes that take given times on the device and none on the host."""

    def __init__(self, timeline: Timeline, seconds: dict[str, float]) -> None:
        self._timeline = timeline
        self._seconds = seconds
        self.begun: list[tuple[str, float, bool]] = []

    def announce(self, task: Any, *, early: bool) -> None:
        self._early = early

    def _run(self, task: Any) -> None:
        self._timeline.run(self._seconds[task.kind.value])
        self.begun.append((str(task), round(self._timeline.free - self._seconds[task.kind.value], 6), self._early))

    def forward(self, task: Any, received: Any) -> str:
        self._run(task)
        return f"output {task}"

    def backward(self, task: Any, received: Any) -> None:
        assert received == f"input {task}"
        self._run(task)

    def weight(self, task: Any) -> None:
        self._run(task)


class FirstStage:
    """One step of the first of two stages, with three microbatches and a split backward pass."""

    SECONDS = {"F": 5 * MS, "B": 5 * MS, "W": 4 * MS}  # noqa: RUF012 - a constant

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        gradients: dict[int, tuple[float, float]],
        *,
        fixed: bool,
        kind: Any = PlannedTransport,
    ) -> None:
        """`gradients`: (end of its task, end of its copy) of the gradient of each microbatch, in ms."""
        from megatronapp_trainer.pipeline import executor
        from megatronapp_trainer.pipeline.planning.lateness import LaunchRule, SenderWatch, UsualTimes
        from megatronapp_trainer.pipeline.planning.orders import interleaved, with_weights
        from megatronapp_trainer.pipeline.planning.policies import PlanGuided, Static
        from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind
        from megatronapp_trainer.pipeline.task_clocks import DeviceTaskClock

        placement, timeline = Placement(2), Timeline()
        inputs = {
            Task.backward(microbatch, 0): (MS * (end - 6), MS * copied, 2 * microbatch + 2, MS * end)
            for microbatch, (end, copied) in gradients.items()
        }
        self.transport = kind(timeline, inputs)
        self.passes = RecordedPasses(timeline, self.SECONDS)
        self.clock = DeviceTaskClock(timeline.event, lambda: timeline.now)
        usual = {(rank, kind, 0): self.SECONDS[kind.value] for rank in range(2) for kind in TaskKind}
        watch = SenderWatch(placement, 0, UsualTimes(task_seconds=usual, transfer_seconds=0.1 * MS))
        order = interleaved(placement, 3, 0)
        monkeypatch.setattr("time.sleep", timeline.sleep)
        monkeypatch.setattr("time.perf_counter", lambda: timeline.now)
        self.clock.begin_step({(kind, 0): self.SECONDS[kind.value] for kind in TaskKind})
        executor.run_tasks(
            executor.StepTasks(
                placement=placement,
                rank=0,
                num_microbatches=3,
                split=True,
                policy=Static(with_weights(order)) if fixed else PlanGuided(order, cap=3),
                first_number=10,
                deadline_s=0.1,
                launch_rule=LaunchRule(lead_seconds=0.25 * MS, tolerance_seconds=0.25 * MS),
            ),
            passes=self.passes,  # type: ignore[arg-type]
            transport=self.transport,
            clock=self.clock,
            watch=watch,
        )
        self.timeline = timeline

    @property
    def order(self) -> str:
        return " ".join(name for name, _, _ in self.passes.begun)


IN_TIME = {0: (10.0, 10.1), 1: (20.0, 20.1), 2: (25.0, 25.1)}


@pytest.mark.parametrize("fixed", [False, True])
def test_planned_tasks_wait_on_the_device_for_inputs_in_time(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    run = FirstStage(monkeypatch, IN_TIME, fixed=fixed)
    assert "early B0.0" in run.transport.events
    assert dict((name, begun) for name, begun, _ in run.passes.begun)["B0.0"] == 0.0101
    assert not any(early for _, _, early in run.passes.begun)


def test_another_task_runs_while_an_input_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FirstStage(monkeypatch, IN_TIME | {0: (8.0, 16.0)}, fixed=False)
    assert run.passes.begun[2][0] == "F2.0"
    assert run.passes.begun[2][2], "before its turn in the plan"
    assert run.order.startswith("F0.0 F1.0 F2.0 B0.0")
    late = FirstStage(monkeypatch, IN_TIME | {0: (8.0, 16.0)}, fixed=True)
    assert late.order.startswith("F0.0 F1.0 B0.0 W0.0")


@pytest.mark.parametrize("fixed", [False, True])
def test_an_input_may_land_between_decision_and_launch(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    run = FirstStage(monkeypatch, IN_TIME, fixed=fixed, kind=LandingTransport)
    assert "early B0.0" in run.transport.events
    assert len(run.passes.begun) == 9


def test_a_device_that_waits_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatronapp_trainer.errors import TransferTimeoutError

    with pytest.raises(
        TransferTimeoutError, match=r"the device has finished no task for 0.1 s, with [12] in its queue"
    ):
        FirstStage(monkeypatch, IN_TIME, fixed=False, kind=LostTransport)


def test_a_task_is_numbered_before_its_output_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FirstStage(monkeypatch, IN_TIME, fixed=False)
    marks = [event for event in run.transport.events if event.startswith("mark")]
    assert marks == [f"mark {number}" for number in range(10, 19)]
    assert run.transport.events[:4] == ["mark 10", "send F0.0", "mark 11", "send F1.0"]


def test_times_of_a_step_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FirstStage(monkeypatch, IN_TIME, fixed=False)
    times = run.clock.times()
    assert times is not None
    assert run.clock.times() is None
    assert [time.seconds for time in times.tasks] == pytest.approx(
        [FirstStage.SECONDS[time.task.kind.value] for time in times.tasks]
    )
    assert collections.Counter(time.task.kind.value for time in times.tasks) == {"F": 3, "B": 3, "W": 3}
    assert times.ended == pytest.approx(run.timeline.free)
    assert times.begun == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(("boot_ids", "ahead"), [("aa", 0.0), ("ab", 86400.0), ("ab", -1e6)])
def test_transfers_are_measured_from_the_end_of_the_task_that_sends(boot_ids: str, ahead: float) -> None:
    """Also between machines whose clocks differ, if the shortest transfers of both directions are equally long."""
    from megatronapp_trainer.pipeline.plan_tuner import measured_times
    from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind
    from megatronapp_trainer.pipeline.task_clocks import StepTimes, TaskTime

    forward, backward, late = Task.forward(0, 0), Task.backward(0, 0), Task.forward(1, 0)
    first = StepTimes(
        tasks=[TaskTime(forward, 1.0, 11.0), TaskTime(late, 1.0, 12.0), TaskTime(backward, 2.0, 19.0)],
        received={backward: 15.25},
        begun=10.0,
    )
    last = StepTimes(
        tasks=[TaskTime(forward, 1.5, 13.0 + ahead), TaskTime(backward, 2.0, 15.0 + ahead)],
        received={forward: 11.25 + ahead, late: 12.5 + ahead},
    )
    times = measured_times(Placement(2), [[first], [last]], list(boot_ids))
    assert sorted(times.transfer_seconds) == pytest.approx([0.25, 0.25, 0.5])
    assert times.task_seconds[1, TaskKind.FORWARD, 0] == [1.5]
