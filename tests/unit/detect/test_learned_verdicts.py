"""A fault that is older than the stored steps is one verdict over losses of the detector and restarts of the hub."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_steps import LAYOUT, stored_step

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.errors import JudgeLostError
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.judging import Judgement
from megatronapp_analyzer.hub.judge.learned import LearnedVerdicts
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.state.detector_task import DetectorTask
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import (
    Cause,
    JobLayout,
    JobMoment,
    SubjectType,
    Verdict,
    VerdictState,
    VerdictSubject,
)

DEADLINE_S = 120.0
SECONDS = st.integers(0, 100).map(lambda quarters: quarters / 4)


def verdict_of(costs: Sequence[float], first: int, last: int) -> Verdict:
    """Verdict on step `last` of a detector that has seen the fault from step `first` on."""
    return Verdict(
        id=f"a0-s{first}",
        subject=VerdictSubject(type=SubjectType.RANK, ranks=(0,)),
        cause=Cause.COMPUTE,
        state=VerdictState.CONFIRMED,
        seconds_per_step=0.25,
        seconds_lost=sum(costs[first : last + 1]),
        slowdown=2.0,
        confidence=0.9,
        evidence_steps=tuple(range(max(first, last - 3), last + 1)),
        evidence_text=(),
        since=JobMoment(attempt=0, step=first, time=float(first)),
        sentence=f"Rank 0 is slow since step {first}.",
    )


@given(st.data())
def test_the_seconds_of_each_step_are_counted_once(data: st.DataObject) -> None:
    costs = data.draw(st.lists(SECONDS, min_size=4, max_size=30))
    counted = data.draw(st.integers(1, len(costs) - 2), label="last step of the lost detector")
    first = data.draw(st.integers(1, len(costs) - 1), label="first step that is still stored")
    learned = LearnedVerdicts()
    for step in range(first, len(costs)):
        learned.add((0, step), [verdict_of(costs, first, step)])
    old = verdict_of(costs, 0, counted)
    (older,) = learned.match([old.to_json()]).values()
    found = older.continued_by(verdict_of(costs, first, len(costs) - 1))
    assert (found.id, found.since, found.sentence) == (old.id, old.since, old.sentence)
    assert found.seconds_lost == pytest.approx(sum(costs[: counted + 1]) + sum(costs[max(counted + 1, first) :]))


@pytest.mark.parametrize(
    "changes",
    [
        {"cause": Cause.HOST},
        {"subject": VerdictSubject(type=SubjectType.RANK, ranks=(1,))},
        {"since": JobMoment(attempt=1, step=0, time=0.0)},
        {"since": JobMoment(attempt=0, step=9, time=9.0)},
    ],
    ids=["cause", "ranks", "attempt", "began later"],
)
def test_another_fault_is_not_continued(changes: dict[str, object]) -> None:
    costs = [1.0] * 12
    learned = LearnedVerdicts()
    learned.add((0, 11), [verdict_of(costs, 6, 11)])
    old = verdict_of(costs, 0, 8)
    assert set(learned.match([old.to_json()])) == {"a0-s6"}
    assert not learned.match([dataclasses.replace(old, **changes).to_json()])  # type: ignore[arg-type]


def test_a_verdict_whose_cause_is_seen_differently_afterwards_is_continued() -> None:
    costs = [1.0] * 12
    new = dataclasses.replace(verdict_of(costs, 6, 11), cause=Cause.MEMORY)
    learned = LearnedVerdicts()
    learned.add((0, 11), [new])
    old = verdict_of(costs, 0, 8)
    (older,) = learned.match([old.to_json()]).values()
    found = older.continued_by(new)
    assert (found.id, found.since, found.cause) == (old.id, old.since, Cause.MEMORY)
    network = dataclasses.replace(old, cause=Cause.LINK)  # of a rank: its messages are late, its passes are not longer
    assert not learned.match([network.to_json()])
    group = dataclasses.replace(network, subject=dataclasses.replace(old.subject, type=SubjectType.GROUP))
    assert set(learned.match([group.to_json()])) == {new.id}


def test_the_same_cause_is_continued_before_another() -> None:
    costs = [1.0] * 12
    learned = LearnedVerdicts()
    same, other = verdict_of(costs, 7, 11), dataclasses.replace(verdict_of(costs, 6, 11), cause=Cause.MEMORY)
    learned.add((0, 11), [other, same])
    assert set(learned.match([verdict_of(costs, 0, 8).to_json()])) == {same.id}


def test_of_two_verdicts_about_a_subject_the_first_continues_the_older() -> None:
    costs = [1.0] * 12
    learned = LearnedVerdicts()
    learned.add((0, 11), [verdict_of(costs, 9, 11), verdict_of(costs, 6, 11)])
    assert set(learned.match([verdict_of(costs, 0, 8).to_json()])) == {"a0-s6"}


class FaultyJob(LocalJudge):
    """Detector that sees a fault of one second in each step, and is lost once at the step `lost_at`."""

    def __init__(self, lost_at: int | None) -> None:
        super().__init__(Detector)
        self._lost_at = lost_at
        self._first: int | None = None

    def start(self) -> None:
        self._first = None

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        number = step.view.step
        if number == self._lost_at:
            self._lost_at = None
            raise JudgeLostError("lost")
        self._first = number if self._first is None else self._first
        return Judgement(afresh=False, verdicts=[verdict_of([1.0] * 100, self._first, number)])


async def judge_all(
    verdicts: VerdictStore, *parts: Sequence[StoredStep], stored: Sequence[StoredStep] = (), lost_at: int | None = None
) -> None:
    queue = DetectorTask(
        FaultyJob(lost_at),
        verdicts,
        liveness=lambda: None,
        stored=lambda: [(LAYOUT, step) for step in stored],
        first_pause_s=0.001,
    )
    queue.add(LAYOUT, parts[0])
    task = asyncio.create_task(queue.run(3600))
    try:
        async with asyncio.timeout(DEADLINE_S):
            for part in parts:
                if part is not parts[0]:
                    queue.add(LAYOUT, part)
                while not (queue.caught_up and queue._counted == part[-1].key):
                    await asyncio.sleep(0.001)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("restarted", [False, True], ids=["loss of the detector", "restart of the hub"])
async def test_a_fault_older_than_the_stored_steps_stays_the_same_verdict(
    tmp_path: pathlib.Path, restarted: bool
) -> None:
    steps, new = [stored_step(number) for number in range(30)], []
    verdicts = VerdictStore(tmp_path / "verdicts.json")
    verdicts.on_new = lambda verdict: new.append(verdict.id)
    if restarted:
        await judge_all(verdicts, steps[:20])
        verdicts = VerdictStore(tmp_path / "verdicts.json")
        verdicts.on_new = lambda verdict: new.append(verdict.id)
        await judge_all(verdicts, steps[10:])
    else:
        await judge_all(verdicts, steps[:20], steps[20:], stored=steps[10:], lost_at=20)
    (entry,) = verdicts.all()
    assert new == ["a0-s0"]
    assert (entry["id"], entry["since"]["step"], entry["state"], entry["stale"]) == ("a0-s0", 0, "confirmed", False)
    assert entry["effect"]["secondsLost"] == 30
    assert [verdict.id for verdict in verdicts.active()] == ["a0-s0"]
