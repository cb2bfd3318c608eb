"""The golden vectors that the page's codec reads too."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import RECORD

WIRE = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "wire"
INDEX: dict[str, Any] = json.loads((WIRE / "vectors.json").read_text(encoding="utf-8"))


def named(entry: dict[str, Any]) -> str:
    return str(entry["name"])


@pytest.mark.parametrize("entry", INDEX["valid"], ids=named)
def test_a_vector_is_read_and_written(entry: dict[str, Any]) -> None:
    data = (WIRE / entry["file"]).read_bytes()
    frame = frames.decode(data)
    assert (frame.type, dict(frame.header)) == (entry["type"], entry["header"])
    assert bytes(frame.body).hex() == entry["bodyHex"]
    assert frames.encode(Frame(entry["type"], entry["header"], bytes.fromhex(entry["bodyHex"]))) == data


@pytest.mark.parametrize("entry", INDEX["invalid"], ids=named)
def test_a_bad_vector_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        frames.decode((WIRE / entry["file"]).read_bytes())


def test_there_is_a_vector_for_every_type() -> None:
    assert {int(kind) for kind in FrameType} <= {entry["type"] for entry in INDEX["valid"]}


def test_records_are_read_from_a_body() -> None:
    body = frames.decode((WIRE / "records.bin").read_bytes()).body
    records = np.frombuffer(body, dtype=RECORD)
    assert [dict(zip(RECORD.names or (), map(int, row), strict=True)) for row in records] == INDEX["records"]


def test_columns_of_steps_are_read_from_a_body() -> None:
    frame = frames.decode((WIRE / "steps.bin").read_bytes())
    shape = [len(frame.header[name]) for name in ("metrics", "ranks", "steps")]
    body = np.frombuffer(frame.body, dtype="<f4").reshape(shape)
    expected = np.array(INDEX["stepsBody"], dtype=float)
    np.testing.assert_array_equal(body, expected)


def test_every_file_is_listed() -> None:
    listed = {entry["file"] for entry in [*INDEX["valid"], *INDEX["invalid"]]}
    assert {path.name for path in WIRE.glob("*.bin")} == listed


def test_frames_are_readable_by_the_next_minor_release_but_not_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = {entry["name"]: (WIRE / entry["file"]).read_bytes() for entry in INDEX["valid"]}
    monkeypatch.setattr(frames, "VERSION", frames.VERSION + 1)
    for entry in INDEX["valid"]:
        assert frames.decode(recorded[entry["name"]]).type == entry["type"]
    monkeypatch.setattr(frames, "VERSION", frames.VERSION + 1)
    for data in recorded.values():
        with pytest.raises(FrameError, match="frame version 1 is not 3"):
            frames.decode(data)


@pytest.mark.parametrize(
    ("version", "newest", "read"),
    [(1, 1, True), (0, 1, False), (2, 1, False), (1, 2, True), (1, 3, False), (None, 2, False), ("1", 1, False)],
)
def test_a_version_is_read_by_its_own_release_and_the_next(version: object, newest: int, read: bool) -> None:
    assert frames.accepts(version, newest) is read
