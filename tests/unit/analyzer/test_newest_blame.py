"""Blame of the newest step, which the hub computes unasked: it explains the time lost, as metrics show."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.blame import newest_blame
from megatronapp_analyzer.hub.blame.newest_blame import NewestBlame
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.metrics import build_registry
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state.answer_cache import AnswerCache
from megatronapp_common.trace import RecordKind

pytestmark = pytest.mark.asyncio

USUAL_MS, SLOW_MS = 2.0, 3.5
LOST, BLAMED = "megascan_step_lost_seconds", "megascan_step_blamed_seconds"


class FedHub:
    """A hub that has taken in some steps."""

    def __init__(self, ring_header: Any, step_rows: Any) -> None:
        self.hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
        self._rows, self._sent = step_rows, [0, 0]
        for rank in (0, 1):
            self.hub.ingest.add_ring(0, ring_header(rank))

    def add(self, step: int, compute_ms: float = USUAL_MS, *, lost: bool = False) -> None:
        """Take in a step of both ranks; `lost`: the records of the second rank but the last."""
        for rank in (0, 1):
            rows = self._rows(rank, step, compute_ms=compute_ms)
            rows = rows[rows["kind"] < RecordKind.METRIC]
            left = rows[-1:] if lost and rank == 1 else rows
            header = {"rank": rank, "worker": rank, "first": self._sent[rank] + len(rows) - len(left), "lost": 0}
            self.hub.ingest.add_records(0, header, left.tobytes())
            self._sent[rank] += len(rows)

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(build_registry(self.hub)).decode())
        return {s.name: s.value for family in families for s in family.samples if s.name in (LOST, BLAMED)}


@pytest.fixture
def fed(ring_header: Any, step_rows: Any) -> Iterator[FedHub]:
    found = FedHub(ring_header, step_rows)
    yield found
    found.hub.answers.close()


async def test_the_blame_of_a_slow_step_is_the_time_that_it_lost(fed: FedHub) -> None:
    for step in range(6):
        fed.add(step)
    fed.add(6, SLOW_MS)
    assert fed.metrics() == {}
    assert await fed.hub.blame.update()
    assert fed.hub.totals.lost_time is not None
    assert fed.hub.totals.lost_time.key == (0, 6)
    found = fed.metrics()
    assert found[LOST] > 0.001  # of a last pass that is 1.5 ms longer; without peers the mean, with it, is usual
    assert found[BLAMED] == pytest.approx(found[LOST], rel=0.01)


async def test_without_a_new_whole_step_nothing_is_computed(fed: FedHub) -> None:
    assert not await fed.hub.blame.update()
    fed.add(0)
    assert await fed.hub.blame.update()
    assert not await fed.hub.blame.update()
    fed.add(1, lost=True)
    assert not await fed.hub.blame.update()


async def test_a_step_that_is_too_large_is_left_out(fed: FedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fed.add(0)
    monkeypatch.setattr(newest_blame, "MOST_RECORDS", 9)
    assert not await fed.hub.blame.update()
    monkeypatch.setattr(newest_blame, "MOST_RECORDS", 10)
    assert await fed.hub.blame.update()


async def test_an_older_answer_is_none_for_a_new_step(fed: FedHub) -> None:
    """The thread rests after an answer that took long, and gives it again meanwhile."""
    spent = itertools.count(step=10)
    answers = AnswerCache(clock=lambda: 0.0, processor_clock=lambda: next(spent))
    blame = NewestBlame(fed.hub.ingest, fed.hub.graphs, answers, fed.hub.totals)
    fed.add(0)
    assert await blame.update()
    first = fed.hub.totals.lost_time
    fed.add(1, SLOW_MS)
    assert not await blame.update()
    assert fed.hub.totals.lost_time is first
    answers.close()


async def test_a_step_whose_blame_fails_is_logged_and_a_later_step_has_its_blame(
    fed: FedHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no blame")

    fed.add(0)
    with monkeypatch.context() as failing, caplog.at_level(logging.ERROR):
        failing.setattr(newest_blame, "blame_of", fail)
        assert await fed.hub.blame.update()
    assert "blame of attempt 0 step 0 is not known" in caplog.text
    assert fed.hub.totals.lost_time is None
    fed.add(1)
    assert await fed.hub.blame.update()
    assert fed.hub.totals.lost_time is not None
