"""Judgements by several threads: the same bits as by one, and how many threads there are."""

import argparse
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.detect.features import extract_matched
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.part_threads import PartThreads
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge import judging
from megatronapp_analyzer.hub.judge.judging import Judgement, StepJudging
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_analyzer.process import MOST_THREADS, available_threads, thread_count
from megatronapp_native import set_threads

LAYOUT = JobLayout.grid(tp=2, dp=2, pp=2, ranks_per_worker=2, ranks_per_node=2)


def views(sim: ModuleType, *, device: bool) -> Iterator[StepRecords]:
    """Simulate a job whose rank 2 becomes slow, on nodes with clocks of their own."""
    fault = sim.Fault(rank=2, kind="compute", factor=2.5, from_step=8)
    noise = sim.GPU if device else sim.SHARED_CPU
    job = sim.Job(layout=LAYOUT, microbatches=4, faults=(fault,), boot_per_node=True, clock_offset_s=0.5, noise=noise)
    yield from sim.Simulator(job, 7).steps(1, 16)


def stored(view: StepRecords) -> StoredStep:
    values = np.zeros((len(METRICS), LAYOUT.world), np.float32)
    digest = StepDigest(attempt=0, step=view.step, start_real_ns=0, duration_ns=1, complete=True, values=values)
    return StoredStep(view=view, digest=digest, offsets_ns=np.zeros(LAYOUT.world, np.int64))


def judged(steps: list[StoredStep], threads: int) -> list[Judgement]:
    """Judge steps with a fresh detector and `threads`, however small the steps are."""
    set_threads(threads, least_items=1)
    try:
        parts = PartThreads(threads, least_records=0)
        judge = StepJudging(functools.partial(Detector, threads=parts), parts)
        return [judge.judge(LAYOUT, step) for step in steps]
    finally:
        set_threads(1)


def bits_of(judgement: Judgement) -> tuple[object, ...]:
    assert judgement.clocks is not None
    assert judgement.clocks.offset_ns is not None
    clocks = judgement.clocks.offset_ns.tobytes(), judgement.clocks.uncertainty_s.tobytes()
    return judgement.verdicts, dict(judgement.imposed_s), clocks, judgement.failures, judgement.afresh


@pytest.mark.parametrize("device", [False, True])
def test_judgements_are_the_same_with_any_number_of_threads(sim: ModuleType, device: bool) -> None:
    steps = [stored(view) for view in views(sim, device=device)]
    plain = [bits_of(judgement) for judgement in judged(steps, 1)]
    assert any(verdicts for verdicts, *_ in plain)
    assert plain[-1][1]
    assert [bits_of(judgement) for judgement in judged(steps, 3)] == plain


def test_features_are_the_same_with_any_number_of_threads(sim: ModuleType) -> None:
    (view,) = (view for view in views(sim, device=True) if view.step == 12)
    found = []
    for threads in (1, 4):
        set_threads(threads, least_items=1)
        parts = PartThreads(threads, least_records=0)
        found.append(extract_matched(MatchedStep(view), LAYOUT, None, parts))
        set_threads(1)
    for field in dataclasses.fields(found[0]):
        mine, other = (getattr(features, field.name) for features in found)
        assert np.array_equal(mine, other) or np.asarray(mine).tobytes() == np.asarray(other).tobytes(), field.name


def test_a_failure_in_the_second_thread_is_counted_and_leaves_the_verdicts(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("broken")

    steps = [stored(view) for view in views(sim, device=False)]
    verdicts = [judgement.verdicts for judgement in judged(steps, 2)]
    monkeypatch.setattr(judging, "_imposed_s", fail)
    failed = judged(steps, 2)
    assert [judgement.verdicts for judgement in failed] == verdicts
    assert all(judgement.failures == 1 and not judgement.imposed_s for judgement in failed)
    assert all(judgement.clocks is not None for judgement in failed)


def test_a_part_is_computed_by_the_caller_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    parts = PartThreads(2, least_records=0)
    assert parts.begin(1, threading.get_ident)() == threading.get_ident()


@pytest.mark.parametrize(("limit", "most"), [("max 100000", 99), ("350000 100000", 3), ("50000 100000", 1)])
def test_threads_are_bounded_by_the_limit_of_the_container(tmp_path: pathlib.Path, limit: str, most: int) -> None:
    file = tmp_path / "cpu.max"
    unlimited = available_threads(file)
    assert 1 <= unlimited <= MOST_THREADS
    file.write_text(limit + "\n")
    assert available_threads(file) == min(unlimited, most)


def test_numbers_of_threads_that_are_none_are_refused() -> None:
    assert thread_count("3") == 3
    for text in ("0", "-1", "two", "1025", str(2**64)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no number of threads; write 1 to 1024"):
            thread_count(text)
    with pytest.raises(ValueError, match="one thread and one item at least"):
        set_threads(0)
