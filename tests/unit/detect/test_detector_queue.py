"""Queue in front of a detector that answers as a test says: its sums, its limits and its losses."""

import asyncio
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_steps import LAYOUT, stored_step

from megatronapp_analyzer.errors import JudgeLostError
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.judging import Judgement, LivenessReport
from megatronapp_analyzer.hub.state import detector_task
from megatronapp_analyzer.hub.state.detector_task import DetectorTask
from megatronapp_analyzer.hub.state.totals import WasteSums
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import (
    RANK_RECORD,
    Cause,
    JobLayout,
    JobMoment,
    RankLiveness,
    SubjectType,
    Verdict,
    VerdictState,
    VerdictSubject,
)

DEADLINE_S = 120.0


def verdict(*, lost_s: float, state: VerdictState = VerdictState.CONFIRMED, since_step: int = 1) -> Verdict:
    return Verdict(
        id=f"v{since_step}",
        subject=VerdictSubject(type=SubjectType.RANK, ranks=(0,)),
        cause=Cause.COMPUTE,
        state=state,
        seconds_per_step=0.25,
        seconds_lost=lost_s,
        slowdown=2.0,
        confidence=0.9,
        evidence_steps=(since_step,),
        evidence_text=(),
        since=JobMoment(attempt=0, step=since_step, time=float(since_step)),
    )


def no_verdicts(step: StoredStep) -> list[Verdict]:
    return []


@dataclasses.dataclass
class ScriptedJudge:
    """Detector whose verdicts on a step are those that a function returns; it is lost if that raises JudgeLostError."""

    answer: Callable[[StoredStep], Sequence[Verdict]] = no_verdicts
    judged: list[int] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        self.judged.append(step.view.step)
        return Judgement(afresh=False, verdicts=list(self.answer(step)))

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        return Judgement(afresh=False, verdicts=[])

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@given(st.lists(st.integers(0, 8).map(lambda quarters: quarters / 4), min_size=1, max_size=6))
@pytest.mark.asyncio
async def test_waste_never_counts_a_second_twice_though_its_estimate_falls(lost_s: list[float]) -> None:
    judge = ScriptedJudge(lambda step: [verdict(lost_s=lost_s[step.view.step])])
    queue = DetectorTask(judge, VerdictStore(None), liveness=lambda: None)
    queue.add(LAYOUT, [stored_step(number) for number in range(len(lost_s))])
    await queue.drain_batch()
    assert queue.wasted_s == {"compute": max(lost_s) * LAYOUT.world}


@pytest.mark.asyncio
async def test_waste_is_that_of_gpus_where_they_are_known() -> None:
    queue = DetectorTask(ScriptedJudge(lambda _: [verdict(lost_s=2.0)]), VerdictStore(None), liveness=lambda: None)
    queue.add(dataclasses.replace(LAYOUT, devices=7), [stored_step(0)])
    await queue.drain_batch()
    assert queue.wasted_s == {"compute": 2.0 * 7}


@pytest.mark.asyncio
async def test_a_new_hub_continues_the_sums_and_counts_no_restored_step_again(tmp_path: pathlib.Path) -> None:
    judge = ScriptedJudge(lambda step: [verdict(lost_s=0.5 * (step.view.step + 1))])
    path = tmp_path / "waste.json"
    first = DetectorTask(judge, VerdictStore(None), liveness=lambda: None, waste=WasteSums(path))
    first.add(LAYOUT, [stored_step(number) for number in range(4)])
    await first.drain_batch()
    assert first.wasted_s == {"compute": 2.0 * LAYOUT.world}
    second = DetectorTask(judge, VerdictStore(None), liveness=lambda: None, waste=WasteSums(path))
    second.add_again(LAYOUT, [stored_step(number) for number in range(2, 4)])
    await second.drain_batch()
    assert second.wasted_s == first.wasted_s
    second.add(LAYOUT, [stored_step(4)])
    await second.drain_batch()
    assert second.wasted_s == WasteSums(path).by_cause == {"compute": 2.5 * LAYOUT.world}
    assert second.skipped == 0


@pytest.mark.parametrize("text", ["[1]", '{"compute": "much"}', '{"compute": [1]}', "{"])
def test_damaged_sums_begin_at_zero(tmp_path: pathlib.Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "waste.json"
    path.write_text(text)
    assert WasteSums(path).by_cause == {}
    assert str(path) in caplog.text


@contextlib.asynccontextmanager
async def running(
    queue: DetectorTask, tick_s: float = 3600
) -> AsyncIterator[Callable[[Callable[[], bool]], Awaitable[None]]]:
    """Run the queue; yields a function that awaits a condition."""

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    task = asyncio.create_task(queue.run(tick_s))
    try:
        yield until
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_after_a_loss_new_steps_that_are_no_longer_stored_are_counted_once() -> None:
    steps = [stored_step(number) for number in range(8)]
    lost: list[int] = []

    def lose_at_the_third(step: StoredStep) -> list[Verdict]:
        if step.view.step == 2 and not lost:
            lost.append(step.view.step)
            raise JudgeLostError("lost")
        return []

    judge = ScriptedJudge(lose_at_the_third)
    stored = [steps[1], *steps[5:]]
    queue = DetectorTask(
        judge,
        VerdictStore(None),
        liveness=lambda: None,
        stored=lambda: [(LAYOUT, step) for step in stored],
        first_pause_s=0.001,
    )
    queue.add(LAYOUT, steps)
    async with running(queue) as until:
        await until(lambda: queue.restarts == 1 and queue.caught_up)
    assert judge.judged == [0, 1, 2, 1, 5, 6, 7]
    assert queue.skipped == 3, "steps 2 to 4; 0 and 1 were judged"


def test_steps_that_wait_to_be_judged_again_are_not_counted_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector_task, "MAX_WAITING", 2)
    queue = DetectorTask(ScriptedJudge(), VerdictStore(None), liveness=lambda: None)
    queue.add(LAYOUT, [stored_step(number) for number in range(2)])
    asyncio.run(queue.drain_batch())
    queue.add(LAYOUT, [stored_step(number) for number in range(6)])
    assert queue.skipped == 2, "steps 2 and 3; 0 and 1 were judged"


@pytest.mark.asyncio
async def test_steps_are_judged_while_requests_fill_the_executor_of_the_loop() -> None:
    loop, answered = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    request = loop.run_in_executor(None, answered.wait)
    judge = ScriptedJudge()
    queue = DetectorTask(judge, VerdictStore(None), liveness=lambda: None)
    queue.add(LAYOUT, [stored_step(0)])
    async with running(queue) as until:
        try:
            await until(lambda: judge.judged == [0])
        finally:
            answered.set()
    await request


@pytest.mark.asyncio
async def test_the_records_that_wait_are_bounded_but_for_a_single_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector_task, "MAX_WAITING_BYTES", 30 * RANK_RECORD.itemsize)
    judge = ScriptedJudge()
    queue = DetectorTask(judge, VerdictStore(None), liveness=lambda: None)
    queue.add(LAYOUT, [stored_step(number, records=10) for number in range(5)])
    assert queue.skipped == 2
    await queue.drain_batch()
    assert judge.judged == [2, 3, 4]
    queue.add(LAYOUT, [stored_step(5, records=10), stored_step(6, records=31)])
    assert queue.skipped == 3
    await queue.drain_batch()
    assert judge.judged[3:] == [6], "a step above the limit waits alone"


@dataclasses.dataclass
class FailingStarts(ScriptedJudge):
    """Detector that cannot be started a few times; notes what a function returns at each start."""

    failing: int = 0
    note: Callable[[], bool] = bool
    noted: list[bool] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        self.noted.append(self.note())
        if len(self.noted) <= self.failing:
            raise JudgeLostError("no process")


@pytest.mark.asyncio
async def test_a_detector_is_out_after_losses_in_a_row_until_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector_task, "OUT_LOSSES", 3)
    judge = FailingStarts(failing=4)
    queue = DetectorTask(judge, VerdictStore(None), liveness=lambda: None, first_pause_s=0.001)
    judge.note = lambda: queue.is_out
    queue.add(LAYOUT, [stored_step(0)])
    async with running(queue) as until:
        await until(lambda: queue.caught_up)
        assert judge.noted == [False, False, False, True, True]
        assert not queue.is_out


@dataclasses.dataclass
class JudgeOfHangs(ScriptedJudge):
    """Detector that reports these hangs once, at its first report of liveness."""

    hangs: list[Verdict] = dataclasses.field(default_factory=list)
    reports: int = 0

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        self.reports += 1
        return Judgement(afresh=False, verdicts=self.hangs if self.reports == 1 else [])


def hang(time: float) -> Verdict:
    since = JobMoment(attempt=0, step=7, time=time)
    return dataclasses.replace(verdict(lost_s=0.0), id="a0-s7-hang-1", cause=Cause.HANG, since=since)


def queue_after_a_loss(judge: JudgeOfHangs, clock: list[float], reporting: int) -> tuple[DetectorTask, VerdictStore]:
    """Return a queue whose store has a hang of a lost detector, and its store; `reporting` ranks report."""
    store = VerdictStore(None)
    store.update([hang(time=70.0)])
    store.suspend()
    ranks = [
        RankLiveness(rank=rank, alive=True, closed=False, heartbeat_ns=0, now_ns=0, open_span=None)
        for rank in range(reporting)
    ]
    report = LivenessReport(layout=LAYOUT, now_ns=0, ranks=ranks)
    return DetectorTask(judge, store, liveness=lambda: report, real_time_s=lambda: clock[0]), store


@pytest.mark.asyncio
async def test_a_hang_that_lasts_over_a_loss_stays_the_same_verdict() -> None:
    judge, clock = JudgeOfHangs(hangs=[hang(time=95.0)]), [100.0]
    queue, store = queue_after_a_loss(judge, clock, LAYOUT.world)
    async with running(queue, 0.001) as until:
        await until(lambda: judge.reports > 1)
        clock[0] += 2 * detector_task.HANG_PATIENCE_S
        await until(lambda: judge.reports > 4)
    (document,) = store.all()
    assert (document["state"], document["stale"]) == ("confirmed", False)
    assert document["since"]["time"] == 70.0


@pytest.mark.parametrize(
    ("reporting", "after_s"),
    [(LAYOUT.world, detector_task.HANG_SETTLE_S), (LAYOUT.world - 1, detector_task.HANG_PATIENCE_S)],
)
@pytest.mark.asyncio
async def test_a_hang_that_no_detector_reports_again_is_over_after_a_while(reporting: int, after_s: float) -> None:
    judge, clock = JudgeOfHangs(), [100.0]
    queue, store = queue_after_a_loss(judge, clock, reporting)
    async with running(queue, 0.001) as until:
        await until(lambda: judge.reports > 2)
        clock[0] += after_s - 1
        seen = judge.reports
        await until(lambda: judge.reports > seen + 2)
        assert store.all()[0]["stale"], "it may still be reported"
        clock[0] += 2
        await until(lambda: store.all()[0]["state"] == "cleared")
    assert not store.all()[0]["stale"]


@dataclasses.dataclass
class SlowToClose(ScriptedJudge):
    """Detector whose process takes until `released` to end."""

    closing: threading.Event = dataclasses.field(default_factory=threading.Event)
    released: threading.Event = dataclasses.field(default_factory=threading.Event)
    was_released: bool = False

    def close(self) -> None:
        self.closing.set()
        self.was_released = self.released.wait(DEADLINE_S)


@pytest.mark.asyncio
async def test_the_event_loop_runs_while_the_process_of_the_detector_ends() -> None:
    judge = SlowToClose()
    queue = DetectorTask(judge, VerdictStore(None), liveness=lambda: None)
    async with running(queue) as until:
        await until(lambda: queue.caught_up)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await until(judge.closing.is_set)
        judge.released.set()
        await until(lambda: judge.was_released)  # to leave cancels the queue again, which then waits no longer
