"""Captured steps of a training in the hub: merged from any split over ranks in any order, bounded, and replaced."""

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.http.training.capture_views import captures_view
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state.capture_store import CaptureStore
from megatronapp_analyzer.hub.state.captures import TrainingCaptures
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.layer_statistics import SiteLayer, of_values, statistics_frame

ROWS = [SiteLayer("residual", 0), SiteLayer("mlp1", 0), SiteLayer("gradient", -1)]


DIGEST = "00c0ffee0000"


def frame(rank: int, ranks: int, step: int, values: dict[SiteLayer, list[float]], **header: Any) -> Frame:
    """Frame of a rank that has counted these values."""
    body = b"".join(of_values(np.array(own)).tobytes() for own in values.values())
    fields = {"rank": rank, "ranks": ranks, "step": step, "attempt": 0} | header
    return statistics_frame(FrameType.TRAINING_STATISTICS, fields, list(values), body)


HELLO = Frame(FrameType.TRAINING_RANK, {"rank": 0, "ranks": 1, "attempt": 0, "every": 5})


def take(captures: TrainingCaptures, sent: Frame, worker: int = 0) -> None:
    captures.take_frame(sent, attempt=int(HELLO.header["attempt"]), worker=worker)


@given(
    values=st.lists(st.tuples(st.sampled_from(ROWS), st.floats(-8, 8), st.integers(0, 3)), max_size=30),
    order=st.permutations(range(4)),
    repeated=st.integers(0, 3),
)
def test_any_split_over_ranks_in_any_order_is_the_whole(
    values: list[tuple[SiteLayer, float, int]], order: list[int], repeated: int
) -> None:
    store = CaptureStore()
    for place, rank in enumerate(order):
        own: dict[SiteLayer, list[float]] = {}
        for row, number, owner in values:
            if owner == rank:
                own.setdefault(row, []).append(number)
        assert store.shown() == []
        found = store.take(frame(rank, 4, 7, own))
        assert (found is not None) == (place == 3)
        if rank == repeated:  # sent again after a reconnect
            assert store.take(frame(rank, 4, 7, own)) is None
    (step,) = store.shown()
    assert step.missing == []
    whole: dict[SiteLayer, list[float]] = {}
    for row, number, _ in values:
        whole.setdefault(row, []).append(number)
    assert step.rows.keys() == whole.keys()
    for row, numbers in whole.items():
        expected = of_values(np.array(numbers))
        assert np.array_equal(step.rows[row]["histogram"], expected["histogram"])
        assert step.rows[row]["largest"] == expected["largest"] and step.rows[row]["count"] == len(numbers)
        np.testing.assert_allclose(step.rows[row]["sum"], expected["sum"], atol=1e-12)


def test_old_steps_are_thinned_and_the_whole_training_stays_visible() -> None:
    store = CaptureStore(max_steps=16)
    for step in range(1, 201):
        store.take(frame(0, 1, step, {ROWS[0]: [1.0]}))
    steps = [step.step for step in store.shown()]
    assert 12 <= len(steps) <= 16 and steps[0] == 1 and steps[-3:] == [198, 199, 200]
    assert max(np.diff(steps)) < 50


def test_a_rank_that_never_sends_holds_up_only_the_newest_steps() -> None:
    store = CaptureStore(max_steps=16)
    for step in range(1, 201):
        store.take(frame(0, 2, step, {ROWS[0]: [1.0]}))
    shown = store.shown()
    assert len(store.all_steps()) <= 16
    assert shown[0].step == 1 and shown[-1].step == 192 and all(step.missing == [1] for step in shown)


def test_incomplete_steps_name_their_ranks_and_a_restart_replaces_steps() -> None:
    store = CaptureStore()
    store.take(frame(1, 2, 5, {ROWS[0]: [1.0]}))
    assert store.shown() == [], "the other rank may be about to send"
    for rank in (0, 1):
        store.take(frame(rank, 2, 10, {ROWS[0]: [1.0]}, dropped=rank == 1))
    assert [(step.step, step.missing) for step in store.shown()] == [(5, [0]), (10, [1])]
    store.take(frame(0, 1, 10, {ROWS[0]: [3.0]}, attempt=1))
    store.take(frame(0, 2, 10, {ROWS[0]: [9.0]}))  # of ranks that have ended
    found = store.find(10)
    assert found is not None and (found.attempt, found.rows[ROWS[0]]["largest"][0]) == (1, 3.0)
    assert store.find(11) is None


def test_complete_steps_survive_the_hub_and_others_are_stored_once_the_ranks_have_ended(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "captures.frames"
    captures = TrainingCaptures(path)
    captures.store = CaptureStore(max_steps=8)
    take(captures, HELLO)
    for step in range(1, 11):
        perturbed = {"perturbation": DIGEST, "repeated": True} if step == 10 else {}
        take(captures, frame(0, 1, step, {ROWS[0]: [float(step)]}, **perturbed))
    take(captures, frame(0, 2, 12, {ROWS[0]: [1.0]}))
    take(captures, frame(0, 2, 12, {}, attempt="x"))
    assert (captures.store.every, captures.rejected) == (5, 1)
    shown = [step.step for step in captures.store.shown()]
    assert [step.step for step in TrainingCaptures(path).store.shown()][-2:] == shown[-2:]
    captures.end_worker(0, 0)
    again = TrainingCaptures(path, writable=False).store
    assert [(step.step, step.missing) for step in again.shown()][-2:] == [(10, []), (12, [1])]
    assert again.shown()[-2].rows[ROWS[0]]["largest"][0] == 10
    view = captures_view(again, "residual", "rms", first=9, last=None, every=5)
    found = [(step.step, step.perturbation, step.repeated) for step in view.steps]
    assert found == [(9, None, False), (10, DIGEST, True), (12, None, False)]


def test_the_ratio_of_an_update_is_that_of_norms() -> None:
    store = CaptureStore()
    update, weight = SiteLayer("update", 0), SiteLayer("weight", 0)
    store.take(frame(0, 1, 1, {update: [3e-3, 4e-3], weight: [3.0, -4.0]}))
    store.take(frame(0, 1, 2, {update: [1.0], weight: [0.0]}))
    view = captures_view(store, "update", "ratio", first=None, last=None, every=1)
    assert view.values == [[pytest.approx(1e-3), None]]


def test_what_ranks_left_incomplete_is_shown_once_all_workers_that_capture_have_ended() -> None:
    captures = TrainingCaptures(None)
    for worker in (0, 1):
        take(captures, HELLO, worker)
    take(captures, frame(1, 2, 5, {ROWS[0]: [1.0]}))
    for attempt, worker in ((0, 1), (0, 1), (0, 7), (1, 0)):
        captures.end_worker(attempt, worker)
        assert captures.store.shown() == []
    captures.end_worker(0, 0)
    assert [step.missing for step in captures.store.shown()] == [[0]]
    take(captures, HELLO, 2)
    assert captures.store.shown() == [], "another worker sends"


def test_a_torn_file_is_replaced_by_the_next_step(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "captures.frames"
    captures = TrainingCaptures(path)
    for step in (10, 20, 30):
        take(captures, frame(0, 1, step, {ROWS[0]: [1.0]}))
    path.write_bytes(path.read_bytes()[:-7])
    captures = TrainingCaptures(path)
    for step in (40, 50):
        take(captures, frame(0, 1, step, {ROWS[0]: [1.0]}))
    assert [step.step for step in TrainingCaptures(path).store.shown()] == [10, 20, 40, 50]


def shown_after_restart(path: pathlib.Path) -> list[int]:
    return [step.step for step in TrainingCaptures(path, writable=False).store.shown()]


def test_a_small_disk_has_the_newest_steps_and_the_live_view_more(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "captures.frames"
    whole = CaptureStore().take(frame(0, 1, 10, {ROWS[0]: [1.0]}))
    assert whole is not None
    size = len(frames.encode(whole.frame()))
    captures = TrainingCaptures(path, disk_bytes=3 * size + size // 2)
    for step in range(10, 100, 10):
        take(captures, frame(0, 1, step, {ROWS[0]: [float(step)]}))
        assert path.stat().st_size <= 3 * size + size // 2
    assert [step.step for step in captures.store.shown()][-4:] == [60, 70, 80, 90]
    assert shown_after_restart(path) == [70, 80, 90]
    assert caplog.text.count("larger spec.analyzer.volume.sizeLimit") == 1
    captures = TrainingCaptures(path, disk_bytes=size)
    take(captures, frame(0, 1, 95, {ROWS[0]: [1.0]}))
    assert shown_after_restart(path) == [95], "the disk was made smaller"


def test_a_step_larger_than_the_disk_is_shown_and_not_stored(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "captures.frames"
    captures = TrainingCaptures(path, disk_bytes=2000)
    take(captures, frame(0, 1, 10, {ROWS[0]: [1.0]}))
    take(captures, frame(0, 1, 20, {SiteLayer("mlp1", layer): [1.0] for layer in range(9)}))
    assert [step.step for step in captures.store.shown()] == [10, 20]
    assert shown_after_restart(path) == [10]
    take(captures, frame(0, 1, 30, {ROWS[0]: [1.0]}))
    assert shown_after_restart(path) == [10, 30]


def test_a_hub_limits_captures_by_its_volume(tmp_path: pathlib.Path) -> None:
    job = JobIdentity(name="demo", uid="uid-1", spool=SpoolLimits(captures_bytes=2000))
    hub = Hub(HubSettings(job=job, state_dir=tmp_path), LocalJudge(Detector))
    for step in range(10, 100, 10):
        take(hub.captures, frame(0, 1, step, {ROWS[0]: [1.0]}))
    assert 0 < (tmp_path / "captures.frames").stat().st_size <= 2000


def test_a_step_that_ranks_still_send_is_never_thinned() -> None:
    store = CaptureStore(max_steps=32)
    for step in range(10, 1000, 10):
        for rank in (0, 1):
            store.take(frame(rank, 2, step, {ROWS[0]: [1.0]}))
    for step in range(405, 800, 10):  # between those that are there, after a restart
        done = [store.take(frame(rank, 2, step, {ROWS[0]: [1.0]}, attempt=1)) for rank in (0, 1)]
        assert done[0] is None and done[1] is not None and done[1].is_complete


WRONG: list[dict[str, Any]] = [
    {"rank": 2},
    {"step": -1},
    {"step": 1.5},
    {"rows": [["x", 0]]},
    {"rows": 7},
    {"ranks": None},
    {"perturbation": "shift"},
]


@pytest.mark.parametrize("header", WRONG, ids=str)
def test_frames_that_no_rank_sends_are_refused(header: dict[str, Any]) -> None:
    right = frame(0, 2, 1, {ROWS[0]: [1.0]})
    wrong = Frame(right.type, {**right.header, **header}, right.body if "rows" not in header else b"")
    with pytest.raises((ProtocolError, FrameError)):
        CaptureStore().take(wrong)
