"""Probe texts in the hub: shown by step, bounded, replaced by a newer attempt, and there after a restart."""

import pathlib
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.hub.http.training import probe_views as views
from megatronapp_analyzer.hub.state.probe_store import ProbeStore
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType

STRINGS = ["a", " whale", " dives"]


def frame(kind: str, *arrays: Any, step: int = 10, **header: Any) -> Frame:
    entries = [[array.dtype.str.replace("|", ""), list(array.shape)] for array in arrays]
    fields = {"rank": 0, "attempt": 0, "step": step, "kind": kind, "text": 0, "tokens": 3, "arrays": entries}
    return Frame(FrameType.TRAINING_PROBE, fields | header, b"".join(array.tobytes() for array in arrays))


def frames_of(step: int, **header: Any) -> list[Frame]:
    """All frames of one text, of two tensor ranks."""
    ids = np.array([[1, 2], [2, 1], [0, 2]], "<i4")
    scores = np.array([[-0.5, -1.0]] * 3, "<f4")
    head = np.tril(np.full((1, 3, 3), 85, "u1"))
    names = {str(number): string for number, string in enumerate(STRINGS)}
    return [
        frame("text", step=step, source="a whale dives", strings=STRINGS, **header),
        frame("norms", np.array([1.0, 2.0], "<f4"), step=step, layer=-1, first=0, **header),
        frame("norms", np.array([3.0], "<f4"), step=step, layer=-1, first=2, **header),
        frame("attention", head, step=step, layer=0, first=0, **header),
        frame("attention", head // 5, step=step, layer=0, first=1, **header),
        frame("predictions", np.array([-2.0, -4.0, 0.0], "<f4"), ids, scores, step=step, strings=names, **header),
    ]


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "disk"])
def test_results_of_all_ranks_are_shown_together(tmp_path: pathlib.Path, is_stored: bool) -> None:
    store = ProbeStore(tmp_path / "probes" if is_stored else None)
    for sent in frames_of(10, perturbation="0" * 12) + frames_of(20, attempt=1) + frames_of(20):
        store.take(sent)
    stores = [store, ProbeStore(tmp_path / "probes", writable=False)] if is_stored else [store]
    for shown in stores:
        probes = views.probes_view(shown)
        assert (probes.texts[0].tokens, probes.texts[0].block, probes.layers, probes.heads) == (STRINGS, 1, [0], 2)
        assert [(step.step, step.attempt, step.mean_logprobs, step.perturbation) for step in probes.steps] == [
            (10, 0, [-3], "0" * 12),
            (20, 1, [-3], None),
        ]
        result = views.result_view(shown, 10, 0)
        assert result is not None and (result.layers, result.norms) == ([-1], [[1, 2, 3]])
        assert result.logprobs == [-2, -4, None]
        assert [candidate.token for candidate in result.candidates[0]] == [" whale", " dives"]
        maps = [views.attention_view(shown, 20, 0, 0, head) for head in range(3)]
        assert maps[2] is None and maps[0] is not None and maps[1] is not None
        assert (maps[0].probabilities[1], maps[1].probabilities[0]) == ([0.3333, 0.3333, 0], [0.0667, 0, 0])
        assert views.result_view(shown, 11, 0) is None


def test_older_steps_become_sparser_and_the_newest_stay(tmp_path: pathlib.Path) -> None:
    size = sum(len(sent.body) for sent in frames_of(1))
    store = ProbeStore(tmp_path, max_bytes=60 * size)
    for step in range(1, 101):
        for sent in frames_of(step):
            store.take(sent)
    steps = [step.step for step in store.steps]
    assert steps[0] == 1 and steps[-2:] == [99, 100] and 4 <= len(steps) < 30
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == steps


def test_a_torn_file_is_truncated_and_written_again(tmp_path: pathlib.Path) -> None:
    sent = frames_of(10)
    store = ProbeStore(tmp_path)
    for part in sent[:-1]:
        store.take(part)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + frames.encode(sent[-1])[:-3])
    again = ProbeStore(tmp_path)
    assert path.read_bytes() == whole and again.steps[0].nbytes == store.steps[0].nbytes
    again.take(sent[-1])
    assert len(list(again.parts(10, 0))) == len(sent)


def test_the_number_of_steps_is_bounded(tmp_path: pathlib.Path) -> None:
    store = ProbeStore(tmp_path, max_steps=8)
    for step in range(1, 41):
        store.take(frames_of(step)[0])
    assert len(store.steps) == len(list(tmp_path.iterdir())) == 8


def stored_bytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_old_steps_become_sparser_on_a_small_disk_too(tmp_path: pathlib.Path) -> None:
    limit = 10 * sum(len(frames.encode(sent)) for sent in frames_of(100))
    store = ProbeStore(tmp_path, disk_bytes=limit)
    for step in range(1, 101):
        for sent in frames_of(step):
            store.take(sent)
            assert stored_bytes(tmp_path) <= limit
    steps = [step.step for step in store.steps]
    assert steps[0] == 1 and steps[-2:] == [99, 100] and len(steps) > 6
    assert all(len(list(store.parts(step, 0))) == len(frames_of(step)) for step in steps)


def test_a_disk_with_space_for_a_single_step_has_the_newest(tmp_path: pathlib.Path) -> None:
    limit = 3 * sum(len(frames.encode(sent)) for sent in frames_of(10)) // 2
    store = ProbeStore(tmp_path, disk_bytes=limit)
    for step in (10, 20, 30):
        for sent in frames_of(step):
            store.take(sent)
            assert stored_bytes(tmp_path) <= limit
    assert [step.step for step in store.steps] == [30] == [int(path.stem) for path in tmp_path.iterdir()]
    assert views.result_view(store, 30, 0) is not None
    assert [step.step for step in ProbeStore(tmp_path, disk_bytes=limit).steps] == [30]


def test_what_no_longer_fits_after_the_disk_was_made_smaller_is_removed(tmp_path: pathlib.Path) -> None:
    store = ProbeStore(tmp_path)
    for step in (10, 20, 30):
        for sent in frames_of(step):
            store.take(sent)
    limit = stored_bytes(tmp_path) // 2
    assert [step.step for step in ProbeStore(tmp_path, disk_bytes=limit, writable=False).steps] == [10, 20, 30]
    assert [step.step for step in ProbeStore(tmp_path, disk_bytes=limit).steps] == [30]
    assert stored_bytes(tmp_path) <= limit


def test_of_a_step_larger_than_the_disk_a_part_is_stored(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = frames_of(10)
    limit = sum(len(frames.encode(part)) for part in sent) - 1
    store = ProbeStore(tmp_path, disk_bytes=limit)
    for part in [*sent, *frames_of(20)]:
        store.take(part)
    assert stored_bytes(tmp_path) <= limit
    assert len(list(store.parts(20, 0))) == len(sent) - 1
    probes = views.probes_view(store)
    assert [(step.step, step.mean_logprobs) for step in probes.steps] == [(20, [-3])]
    result = views.result_view(store, 20, 0)
    assert result is None or result.norms == [[1, 2, 3]]
    assert caplog.text.count("larger spec.analyzer.volume.sizeLimit") == 1
    assert [step.step for step in ProbeStore(tmp_path, disk_bytes=limit).steps] == [20]


WRONG: list[dict[str, Any]] = [
    {"kind": "x"},
    {"tokens": 0},
    {"text": 8},
    {"first": 2},
    {"arrays": [["<f4", [3]]]},
    {"arrays": [["<f8", [2]]]},
    {"arrays": 7},
    {"arrays": [["<f4"]]},
    {"strings": 7},
]


@pytest.mark.parametrize("header", WRONG, ids=str)
def test_frames_that_no_rank_sends_are_refused(header: dict[str, Any]) -> None:
    right = frame("norms", np.array([1.0, 2.0], "<f4"), layer=0)
    store = ProbeStore(None)
    store.take(right)
    with pytest.raises(FrameError):
        store.take(Frame(right.type, {**right.header, **header}, right.body))
