"""The detector in a separate process: the same verdicts, and after a loss right ones or unknown, never wrong ones."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.align.step_clocks import ClockReading
from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.errors import JudgeLostError
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.channel import receive_message, send_message
from megatronapp_analyzer.hub.judge.judging import Judgement, LivenessReport
from megatronapp_analyzer.hub.judge.links import LocalJudge, ProcessJudge
from megatronapp_analyzer.hub.judge.liveness_rows import ranks_of, rows_of
from megatronapp_analyzer.hub.state.detector_task import DetectorTask
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import Cause, CurrentSpan, JobLayout, RankLiveness
from megatronapp_common.trace import RecordKind

LAYOUT = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2, ranks_per_node=2)
SLOW_RANK, FROM_STEP, STEPS = 2, 10, 36
DEADLINE_S = 120.0
OTHER_LAYOUT = JobLayout.grid(dp=4, ranks_per_worker=2, ranks_per_node=2)


def hang_report(layout: JobLayout, quiet_s: int) -> LivenessReport:
    """Return a report in which rank 1 has been inside its forward pass for some time, and the others wait for it."""
    now_ns = 10**12
    waiting = CurrentSpan(kind=RecordKind.RECV_WAIT, step=9, microbatch=0, start_ns=now_ns - quiet_s * 10**9)
    ranks = [
        RankLiveness(
            rank=rank,
            alive=True,
            closed=False,
            heartbeat_ns=now_ns - quiet_s * 10**9,
            now_ns=now_ns,
            open_span=dataclasses.replace(waiting, kind=RecordKind.FORWARD) if rank == 1 else waiting,
        )
        for rank in range(layout.world)
    ]
    return LivenessReport(layout=layout, now_ns=now_ns, ranks=ranks)


@pytest.fixture(scope="module")
def steps(sim: ModuleType) -> list[StoredStep]:
    fault = sim.Fault(rank=SLOW_RANK, kind="compute", factor=2.5, from_step=FROM_STEP)
    job = sim.Job(layout=LAYOUT, microbatches=4, faults=(fault,), boot_per_node=True, clock_offset_s=0.5)
    simulator = sim.Simulator(job, 7)
    return [
        StoredStep(
            view=view,
            digest=StepDigest(
                attempt=view.attempt,
                step=view.step,
                start_real_ns=0,
                duration_ns=view.end_ns - view.start_ns,
                complete=True,
                values=np.zeros((len(METRICS), LAYOUT.world), np.float32),
            ),
            offsets_ns=np.zeros(LAYOUT.world, np.int64),
        )
        for view in simulator.steps(1, STEPS)
    ]


class StartedJudge(ProcessJudge):
    """Process whose first starts fail, and whose condition tests can await."""

    def __init__(self, *, failing_starts: int = 0, patience_s: float = DEADLINE_S) -> None:
        super().__init__(patience_s=patience_s)
        self.starts = 0
        self._failing = failing_starts

    def command(self, descriptor: int) -> list[str]:
        self.starts += 1
        if self.starts <= self._failing:
            return ["/does/not/exist"] if self.starts == 1 else [sys.executable, "-c", "raise SystemExit(3)"]
        return super().command(descriptor)


@contextlib.contextmanager
def started(judge: ProcessJudge) -> Iterator[ProcessJudge]:
    judge.start()
    try:
        judge.wait_until_ready()
        yield judge
    finally:
        judge.close()


@dataclasses.dataclass
class Clocks:
    """Clocks as the hub knows them."""

    known: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    def take_reading(self, reading: ClockReading) -> None:
        self.known.add(reading.key)

    def forget_readings(self) -> None:
        self.known.clear()


@dataclasses.dataclass
class Running:
    """A running queue with what it judges."""

    queue: DetectorTask
    verdicts: VerdictStore
    judge: StartedJudge
    known: list[StoredStep]
    clocks: "Clocks"

    def add(self, steps: list[StoredStep]) -> None:
        self.known += steps
        self.queue.add(LAYOUT, steps)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def has_judged(self, step: StoredStep) -> bool:
        return self.queue.caught_up and self.queue._counted >= step.key

    def slow(self) -> list[dict[str, Any]]:
        """Return the current verdicts."""
        return [entry for entry in self.verdicts.all() if entry["state"] != "cleared" and not entry["stale"]]


@contextlib.asynccontextmanager
async def running(judge: StartedJudge) -> AsyncIterator[Running]:
    known: list[StoredStep] = []
    verdicts, clocks = VerdictStore(None), Clocks()
    queue = DetectorTask(
        judge,
        verdicts,
        liveness=lambda: None,
        stored=lambda: [(LAYOUT, step) for step in known],
        clocks=clocks,
        first_pause_s=0.01,
    )
    task = asyncio.create_task(queue.run(0.05))
    try:
        yield Running(queue, verdicts, judge, known, clocks)
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def offsets_of(judgement: Judgement) -> Any:
    assert judgement.clocks is not None
    assert judgement.clocks.offset_ns is not None
    return judgement.clocks.offset_ns


def test_a_process_judges_as_the_detector_does(steps: list[StoredStep]) -> None:
    here = LocalJudge(Detector)
    with started(ProcessJudge(patience_s=DEADLINE_S)) as there:
        for step in steps:
            mine, other = here.judge(LAYOUT, step), there.judge(LAYOUT, step)
            assert [v.to_json() for v in other.verdicts] == [v.to_json() for v in mine.verdicts]
            assert dict(other.imposed_s) == dict(mine.imposed_s)
            assert other.failures == 0
            offsets = offsets_of(mine)
            assert np.array_equal(offsets_of(other), offsets)
        assert mine.verdicts, "the simulated fault is found, else this compares nothing"
        assert offsets.any()
        for layout, quiet_s in ((LAYOUT, 0), (LAYOUT, 40), (OTHER_LAYOUT, 400)):
            report = hang_report(layout, quiet_s)
            mine, other = here.judge_liveness(report), there.judge_liveness(report)
            assert other.afresh == mine.afresh == (report.layout is OTHER_LAYOUT)
            assert [v.to_json() for v in other.verdicts] == [v.to_json() for v in mine.verdicts]
            assert any(verdict.cause is Cause.HANG for verdict in mine.verdicts) == (quiet_s > 0)
        mine, other = here.judge(LAYOUT, steps[-1]), there.judge(LAYOUT, steps[-1])
        assert other.afresh == mine.afresh is True


spans = st.none() | st.builds(
    CurrentSpan, kind=st.integers(0, 255), step=st.integers(0), microbatch=st.integers(), start_ns=st.integers()
)
liveness = st.builds(
    RankLiveness,
    rank=st.integers(0),
    alive=st.booleans(),
    closed=st.booleans(),
    heartbeat_ns=st.integers(),
    now_ns=st.integers(),
    open_span=spans,
    device_span=spans,
    process_state=st.none() | st.sampled_from("RSDT"),
    attempt=st.none() | st.integers(0),
)


@given(st.lists(liveness, max_size=4))
def test_liveness_survives_as_rows_of_plain_values(ranks: list[RankLiveness]) -> None:
    rows = rows_of(ranks)
    assert ranks_of(rows) == ranks
    plain = (int, bool, str, tuple, type(None))
    assert all(isinstance(value, plain) for row in rows for value in row)


@pytest.mark.asyncio
async def test_a_killed_process_leaves_nothing_current_and_learns_again(steps: list[StoredStep]) -> None:
    async with running(StartedJudge()) as hub:
        hub.add(steps[:28])
        await hub.until(lambda: hub.has_judged(steps[27]))
        (before,) = hub.slow()
        assert before["subject"]["ranks"] == [SLOW_RANK]
        wasted = dict(hub.queue.wasted_s)
        first = hub.judge.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        hub.add(steps[28:29])  # by which the loss is noticed
        await hub.until(lambda: hub.queue.restarts == 1 or not hub.queue.caught_up)
        assert hub.slow() == []
        assert hub.verdicts.active() == []
        assert not hub.clocks.known
        assert [(entry["id"], entry["state"], entry["stale"]) for entry in hub.verdicts.all()] == [
            (before["id"], before["state"], True)
        ]
        hub.add(steps[29:])
        await hub.until(lambda: hub.has_judged(steps[-1]))
        assert hub.judge.pid != first
        assert hub.clocks.known == {step.key for step in steps}
        assert [entry["id"] for entry in hub.slow()] == [before["id"]], "not a second one about the same fault"
        assert hub.queue.restarts == 1
        assert hub.queue.skipped == 0
        new_s = hub.queue.wasted_s["compute"] - wasted["compute"]
        assert 0 < new_s < wasted["compute"], "steps judged again are not added again"
    assert not is_running(first)


@pytest.mark.asyncio
async def test_what_the_stored_steps_no_longer_show_is_cleared_after_a_loss(steps: list[StoredStep]) -> None:
    async with running(StartedJudge()) as hub:
        hub.add(steps)
        await hub.until(lambda: hub.has_judged(steps[-1]))
        assert len(hub.slow()) == 1
        hub.known[:] = steps[: FROM_STEP - 2]
        assert hub.judge.pid is not None
        os.kill(hub.judge.pid, signal.SIGKILL)
        hub.queue.add(LAYOUT, steps[:1])
        await hub.until(lambda: hub.queue.restarts == 1 and hub.queue.caught_up)
        assert [(entry["state"], entry["stale"]) for entry in hub.verdicts.all()] == [("cleared", False)]


@pytest.mark.asyncio
async def test_of_a_new_job_nothing_is_unknown_before_the_first_start(steps: list[StoredStep]) -> None:
    started, ready = threading.Event(), threading.Event()

    class Slow(LocalJudge):
        def wait_until_ready(self) -> None:
            started.set()
            ready.wait()

    async def caught_up_while_starting(verdicts: VerdictStore, waiting: list[StoredStep]) -> bool:
        started.clear()
        ready.clear()
        queue = DetectorTask(Slow(Detector), verdicts, liveness=lambda: None)
        queue.add(LAYOUT, waiting)
        task = asyncio.create_task(queue.run(0.05))
        await asyncio.to_thread(started.wait)
        found = queue.caught_up
        ready.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    assert await caught_up_while_starting(VerdictStore(None), [])
    assert not await caught_up_while_starting(VerdictStore(None), steps[:1])
    named = VerdictStore(None)
    judge = LocalJudge(Detector)
    named.update([verdict for step in steps for verdict in judge.judge(LAYOUT, step).verdicts])
    assert await caught_up_while_starting(named, [])
    named.suspend()
    assert not await caught_up_while_starting(named, [])


@pytest.mark.asyncio
async def test_starts_that_fail_are_tried_again(steps: list[StoredStep]) -> None:
    async with running(StartedJudge(failing_starts=2)) as hub:
        hub.add(steps)
        await hub.until(lambda: hub.has_judged(steps[-1]))
        assert hub.judge.starts == 3
        assert hub.queue.restarts == 2
        assert [entry["subject"]["ranks"] for entry in hub.slow()] == [[SLOW_RANK]]


@pytest.mark.asyncio
async def test_the_end_of_the_hub_does_not_wait_for_a_process_that_is_stopped(steps: list[StoredStep]) -> None:
    async with running(StartedJudge()) as hub:
        hub.add(steps[:1])
        await hub.until(lambda: hub.has_judged(steps[0]))
        pid = hub.judge.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        hub.add(steps[1:])
        await hub.until(lambda: hub.queue._judged is not None)
    assert not is_running(pid)


@pytest.mark.asyncio
async def test_a_step_at_which_the_detector_is_lost_again_and_again_is_passed(steps: list[StoredStep]) -> None:
    class Poisoned(StartedJudge):
        def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
            if step.view.step == steps[5].view.step:
                assert self.pid is not None
                os.kill(self.pid, signal.SIGKILL)
            return super().judge(layout, step)

    async with running(Poisoned()) as hub:
        hub.add(steps)
        await hub.until(lambda: hub.has_judged(steps[-1]))
        assert hub.queue.restarts == 2
        assert hub.queue.failures == 1
        assert [entry["subject"]["ranks"] for entry in hub.slow()] == [[SLOW_RANK]]


def test_a_process_that_does_not_answer_is_lost() -> None:
    class Silent(ProcessJudge):
        def command(self, descriptor: int) -> list[str]:
            return [sys.executable, "-c", "import time; time.sleep(600)"]

    judge = Silent(patience_s=0.05)
    judge.start()
    try:
        with pytest.raises(JudgeLostError, match=r"has not answered for 0\.05 s"):
            judge.wait_until_ready()
    finally:
        judge.close()


def test_the_error_names_the_exit_code_of_the_process() -> None:
    judge = StartedJudge(failing_starts=2)
    judge.starts = 1
    judge.start()
    try:
        with pytest.raises(JudgeLostError, match="ended with code 3"):
            judge.wait_until_ready()
    finally:
        judge.close()


ARRAYS = st.lists(st.integers(0, 3000).map(lambda size: np.arange(size, dtype=np.int64)), max_size=4)


@settings(max_examples=30)
@given(arrays=ARRAYS, text=st.text())
def test_messages_arrive_as_they_were_sent(arrays: list[Any], text: str) -> None:
    near, far = socket.socketpair()
    with near, far:
        sender = threading.Thread(target=send_message, args=(near, (text, arrays)))
        sender.start()
        found = receive_message(far)
        sender.join()
        assert isinstance(found, tuple)
        assert found[0] == text
        assert len(found[1]) == len(arrays)
        for mine, other in zip(arrays, found[1], strict=True):
            assert np.array_equal(mine, other)
        near.close()
        with pytest.raises(EOFError):
            receive_message(far)


def test_freed_memory_is_used_again() -> None:
    """Pages that a process has written once are not faulted in again by further arrays of the same size."""
    script = """
import concurrent.futures
import resource
import numpy as np
from megatronapp_analyzer.process import reuse_freed_memory
assert reuse_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make = lambda number: np.ones(9 << 20).sum()  # more than the memory of a thread of its own can hold
with concurrent.futures.ThreadPoolExecutor(1) as other:
    make(0)
    assert other.submit(make, 1).result()
    before = faults()
    for number in range(2):
        make(number)
        assert other.submit(make, number).result()
print(faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64
