"""Limits of callers, and what they see during a run."""

import functools
import unittest.mock

import numpy as np
import pytest
import scope_session
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.delivery.page_queue import PageQueue
from megatronapp_analyzer.scope.parts import probe_tracker
from megatronapp_analyzer.scope.parts.merge import ShardTensor
from megatronapp_analyzer.scope.parts.part_tracker import PartHeader, PartTracker, part_of
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.frame_log import FrameLog, LogEntry
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor
from megatronapp_common.web.problems import HttpError


@given(st.permutations(list(range(6))), st.integers(0, 5))
def test_a_rank_has_finished_when_all_its_numbers_are_there(order: list[int], lost: int) -> None:
    numbering, seen = PartTracker(), set[int]()
    for number in order:
        if number == lost and lost != order[-1]:
            continue
        numbering.add(PartHeader(3, number, more=number < 5))
        seen.add(number)
        assert (numbering.finished == {3}) == (seen == set(range(6)))


def test_numbers_that_are_none_are_refused() -> None:
    for wrong in (-1, "1", True, 1.5, 1 << 40):
        with pytest.raises(ProtocolError, match="part is"):
            part_of(0, {"part": wrong})


def test_probes_fail_once_each_with_their_reason() -> None:
    tracker, got = probe_tracker.ProbeTracker(), list[int]()
    for why, at in (("dropped", 1.0), ("silent", probe_tracker.PATIENCE_S), ("lost", 1.0), ("whole", 1.0)):
        tracker.expect(why, "key", lambda shards: got.append(len(shards)), 0.0, caller="me")
        assert (tracker.find_pending("key"), tracker.count("me"), len(tracker)) == (why, 1, 1)
        if why == "lost":
            tracker.clear()
        elif why != "silent":
            tracker.add(why, [], at, PartHeader(0, dropped=why == "dropped"))
        tracker.settle([0], at)
        assert (tracker.find_pending("key"), tracker.count("me"), len(tracker)) == (None, 0, 0)
        failure = tracker.take_failure("key")
        assert (failure is None) == (why == "whole")
        assert failure is None or (isinstance(failure, HttpError) and failure.status == 503)
        assert tracker.take_failure("key") is None
    assert got == [0]


def shard_of_bytes(nbytes: int) -> ShardTensor:
    tensor = Tensor("residual", "f32", np.zeros((1, nbytes // 4), "<f4"))
    return ShardTensor(rows=((0, 0),), layers=None, span=None, tp=0, tensor=tensor)


def test_early_parts_are_stored_for_as_many_probes_as_may_wait() -> None:
    tracker, got = probe_tracker.ProbeTracker(), list[int]()
    names = [str(number) for number in range(probe_tracker.MAX_PROBES)]
    for name in names:
        tracker.add(name, [shard_of_bytes(1 << 10)], 0.0, PartHeader(0))
    for name in names:
        tracker.expect(name, name, lambda shards: got.append(len(shards)), 0.0)
        tracker.settle([0], 0.0)
    assert got == [1] * probe_tracker.MAX_PROBES


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.booleans()), max_size=120))
def test_unclaimed_parts_are_bounded_and_a_late_probe_learns_of_its_loss_at_once(
    parts: list[tuple[int, int, bool]],
) -> None:
    tracker, got = probe_tracker.ProbeTracker(), list[str]()
    with unittest.mock.patch.multiple(probe_tracker, MAX_PROBES=6, MAX_EARLY_BYTES=100):
        for probe, values, dropped in parts:
            tracker.add(str(probe), [shard_of_bytes(4 * values)], 0.0, PartHeader(0, dropped=dropped))
            assert len(tracker._probes) <= 6 and sum(probe.bytes for probe in tracker._probes.values()) <= 100
    for name in {str(probe) for probe, _, _ in parts}:
        tracker.expect(name, name, functools.partial(lambda name, _: got.append(name), name), 0.0)
        tracker.settle([0], 0.0)
        failure = tracker.take_failure(name)
        assert (name in got) == (failure is None) and len(tracker) == 0
        assert failure is None or failure.status == 503


def test_runs_are_resent_one_after_the_other() -> None:
    journals = {name: FrameLog(name, MemoryBudget(1 << 20)) for name in "abc"}
    for name, journal in journals.items():
        for step in range(3):
            header = {"run": name, "step": step, "rows": [[0, step]], "ids": [step]}
            journal.append(Frame(FrameType.SCOPE_STEP, header, bytes(1000)))
    outbox, resumed = PageQueue(credit=1000), list[str]()

    def replay(name: str) -> list[LogEntry]:
        resumed.append(name)
        return journals[name].after(0)

    for name in ("a", "b", "c", "b", "a"):
        outbox.resume(name, functools.partial(replay, name))
    assert resumed == ["a", "c"], "others are made when their turn comes"
    outbox.grant(1 << 20)
    got = []
    while len(outbox):
        got += [frames.decode(data).header["run"] for data in outbox.pop()]
    assert got == ["c"] * 3 + ["b"] * 3 + ["a"] * 3 and resumed == ["a", "c", "b", "a"]


def test_a_session_that_is_being_read_does_not_change() -> None:
    run = scope_session.record(tokens=3)
    sent = list(scope_session.rank_frames(run))
    core = ScopeCore(ScopeSettings(job="tiny"), clock=lambda: 0.0)
    for rank, frame in sent[: len(sent) // 2]:
        core.ingest.take_frame(0, rank, frame)
    scope_session.put_values(core, 0, run.sites[0])
    known = core.runs[scope_session.RUN]
    before = session_file.dump(core.feed, known.id)
    reading = session_file.RunSnapshot(core.feed, known).frames()
    got = [next(reading)]
    for rank, frame in sent[len(sent) // 2 :]:
        core.ingest.take_frame(0, rank, frame)
    scope_session.put_values(core, 1, run.sites[1])
    core.runs.budget.limit_bytes = 1
    known.values.put(("mlp2", 0, 0, None), [0], run.sites[0]["mlp2"][:1, 0])
    assert b"".join([*got, *reading]) == before
