import asyncio
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megatronapp_analyzer.align.clocks import AlignedStep
from megatronapp_analyzer.hub.http.broadcast import QUEUE_FRAMES, Broadcaster, metrics_frame, steps_frame
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest, StepDigester, against_others
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoredStep, StoreLimits
from megatronapp_analyzer.hub.judge.judging import LivenessReport
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.state.detector_task import MAX_WAITING, DetectorTask
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import (
    RANK_RECORD,
    Cause,
    JobLayout,
    JobMoment,
    RankLiveness,
    StepRecords,
    SubjectType,
    Verdict,
    VerdictState,
    VerdictSubject,
)
from megatronapp_common import frames
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind

LAYOUT = JobLayout.grid(pp=2)


def test_every_page_gets_every_frame() -> None:
    pages = Broadcaster()
    first, second = pages.subscribe(), pages.subscribe()
    pages.publish(b"a")
    pages.unsubscribe(second)
    pages.publish(b"b")
    assert [first.get_nowait(), first.get_nowait()] == [b"a", b"b"]
    assert second.qsize() == 1


def test_a_slow_page_is_let_go_and_others_are_not() -> None:
    pages = Broadcaster()
    slow, quick = pages.subscribe(), pages.subscribe()
    for number in range(QUEUE_FRAMES + 5):
        pages.publish(str(number).encode())
        quick.get_nowait()
    assert len(pages) == 1
    assert slow.get_nowait() is None
    assert slow.empty()


def test_steps_frame_is_metric_by_rank_by_step() -> None:
    digests = [
        StepDigest(
            attempt=1,
            step=step,
            start_real_ns=step * 10,
            duration_ns=7,
            complete=True,
            values=np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * step,
        )
        for step in (3, 4, 5)
    ]
    frame = frames.decode(steps_frame(1, digests))
    table = np.frombuffer(frame.body, "<f4").reshape(len(METRICS), 2, 3)
    assert frame.header["steps"] == [3, 4, 5]
    assert frame.header["startsNs"] == [30, 40, 50]
    assert table[1, 0].tolist() == [302, 402, 502]


def test_metrics_frame_groups_by_name() -> None:
    points = [
        CurvePoint("loss", 0, 1, 2.0, 0, 3),
        CurvePoint("gradNorm", 0, 1, 0.5, 0, 3),
        CurvePoint("loss", 0, 2, 1.5, 0, 3),
    ]
    series = frames.decode(metrics_frame(points)).header["series"]
    assert series == {
        "loss": {"attempts": [0, 0], "steps": [1, 2], "values": [2.0, 1.5]},
        "gradNorm": {"attempts": [0], "steps": [1], "values": [0.5]},
    }


def test_each_rank_is_measured_against_the_others() -> None:
    assert against_others(np.array([2.0, 1.0])).tolist() == [2.0, 0.5]
    assert against_others(np.array([1.0, 1.0, 3.0, 1.0])).tolist() == [1.0, 1.0, 3.0, 1.0]
    assert np.isnan(against_others(np.array([1.0]))).all()


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]), min_size=2, max_size=9))
def test_the_median_of_the_others_is_that_of_numpy(values: list[float]) -> None:
    expected = [value / np.median(values[:place] + values[place + 1 :]) for place, value in enumerate(values)]
    assert against_others(np.array(values)).tolist() == expected


def slowdowns(digester: StepDigester, *milliseconds: float) -> list[float]:
    """Return the slowdowns of a step in which each rank has one forward pass of this length."""
    records = np.zeros(2 * len(milliseconds), RANK_RECORD)
    for rank, length in enumerate(milliseconds):
        for row, kind in ((2 * rank, RecordKind.STEP), (2 * rank + 1, RecordKind.FORWARD)):
            records[row]["rank"], records[row]["kind"] = rank, int(kind)
            records[row]["duration"] = int(length * 1e6 / DURATION_UNIT_NS)
    return [round(float(slowdown), 2) for slowdown in digester.values(records)[METRICS.index("slowdown")]]


def test_a_healthy_rank_next_to_a_slow_peer_matches_its_own_history() -> None:
    digester = StepDigester(2, JobLayout.grid(dp=2))
    first = slowdowns(digester, 10, 30)
    assert (np.isnan(first[0]), first[1]) == (True, 3), "no history yet: nothing is said of the healthy one"
    for _ in range(8):
        slowdowns(digester, 10, 10)
    assert slowdowns(digester, 10, 30) == [1, 3]
    three = StepDigester(3, JobLayout.grid(dp=3))
    assert slowdowns(three, 10, 5, 10) == [1.33, 0.5, 1.33]


def verdict(state: VerdictState = VerdictState.CONFIRMED, seconds_lost: float = 0.25) -> Verdict:
    return Verdict(
        id="v",
        subject=VerdictSubject(type=SubjectType.RANK, ranks=(0,)),
        cause=Cause.COMPUTE,
        state=state,
        seconds_per_step=0.25,
        seconds_lost=seconds_lost,
        slowdown=2.0,
        confidence=0.9,
        evidence_steps=(1,),
        evidence_text=(),
        since=JobMoment(attempt=0, step=1, time=0.0),
    )


class Judge:
    """Confirms in step 1, finds it still active in step 2, fails in step 3, and counts."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.seen_ranks: list[list[int]] = []

    def observe(self, step: StepRecords, aligned: AlignedStep | None = None) -> list[Verdict]:
        self.steps.append(step.step)
        if step.step == 3:
            raise RuntimeError("broken")
        active = step.step == 1 or (step.step == 2 and 1 in self.steps)
        return [verdict(seconds_lost=0.25 * step.step)] if active else []

    def observe_liveness(self, now_ns: int, ranks: Sequence[RankLiveness]) -> list[Verdict]:
        self.seen_ranks.append([rank.rank for rank in ranks])
        return []


@pytest.fixture
def stored(step_rows: Any, ring_header: Any) -> list[StoredStep]:
    ingest = TraceIngest(StoreLimits())
    for rank in (0, 1):
        ingest.add_ring(0, ring_header(rank))
    found: list[StoredStep] = []
    first = [0, 0]
    for step in range(5):
        for rank in (0, 1):
            body = step_rows(rank, step)
            header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
            found += ingest.add_records(0, header, body.tobytes()).finished
            first[rank] += len(body)
    return found


def analysis(judges: list[Judge], store: VerdictStore, now_s: float = 1_700_000_002.0) -> DetectorTask:
    def make(layout: JobLayout) -> Judge:
        judges.append(Judge())
        return judges[-1]

    queue = DetectorTask(LocalJudge(make), store, liveness=lambda: None, real_time_s=lambda: now_s)
    queue.caught_up = True
    return queue


@pytest.mark.asyncio
async def test_steps_are_judged_in_order_and_waste_adds_up(stored: list[StoredStep]) -> None:
    judges: list[Judge] = []
    store = VerdictStore(None)
    queue = analysis(judges, store)
    queue.add(LAYOUT, stored[:3])
    await queue.drain_batch()
    assert judges[0].steps == [0, 1, 2]
    assert queue.wasted_s == {"compute": 0.5 * 2}
    assert queue.lag_s == pytest.approx(1_700_000_002.0 - 1_700_000_001.03)


@pytest.mark.asyncio
async def test_a_failing_detector_is_replaced_and_its_verdicts_end(stored: list[StoredStep]) -> None:
    judges: list[Judge] = []
    store = VerdictStore(None)
    queue = analysis(judges, store)
    queue.add(LAYOUT, stored)
    await queue.drain_batch()
    assert [judge.steps for judge in judges] == [[0, 1, 2, 3], [4]]
    assert queue.failures == 1
    assert store.active() == []
    assert [entry["state"] for entry in store.all()] == ["cleared"]


@pytest.mark.asyncio
async def test_another_layout_begins_afresh(stored: list[StoredStep]) -> None:
    judges: list[Judge] = []
    store = VerdictStore(None)
    queue = analysis(judges, store)
    queue.add(LAYOUT, stored[:2])
    await queue.drain_batch()
    assert [entry.id for entry in store.active()] == ["v"]
    queue.add(JobLayout.grid(pp=2, ranks_per_node=1), stored[2:3])
    await queue.drain_batch()
    assert len(judges) == 2
    assert store.active() == []
    assert [entry["state"] for entry in store.all()] == ["cleared"]


def test_a_detector_that_is_too_slow_skips_the_oldest(stored: list[StoredStep]) -> None:
    queue = analysis([], VerdictStore(None))
    for _ in range(MAX_WAITING + 10):
        queue.add(LAYOUT, stored[:1])
    assert queue.skipped == 10


@pytest.mark.asyncio
async def test_liveness_is_judged_at_every_tick() -> None:
    judges: list[Judge] = []
    done = asyncio.Event()
    polls = 0

    def report_liveness() -> LivenessReport | None:
        nonlocal polls
        polls += 1
        if polls == 3:
            done.set()
        return LivenessReport(layout=LAYOUT, now_ns=polls, ranks=[]) if polls > 1 else None

    def make(layout: JobLayout) -> Judge:
        judges.append(Judge())
        return judges[-1]

    queue = DetectorTask(LocalJudge(make), VerdictStore(None), liveness=report_liveness)
    task = asyncio.create_task(queue.run(0.001))
    async with asyncio.timeout(120):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(judges) == 1
    assert judges[0].seen_ranks[:1] == [[]]
