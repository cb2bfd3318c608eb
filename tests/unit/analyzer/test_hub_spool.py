import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.hub.archive.restore import curve_frame, digest_frame, restore
from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.ingest.frame_files import read_frames
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import (
    JsonFile,
    SpoolLimits,
    SpoolReader,
    SpoolThread,
    SpoolWriter,
)
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType


def records_frame(rank: int, first: int, body: bytes) -> bytes:
    header = {"rank": rank, "worker": rank, "first": first, "lost": 0}
    return frames.encode(Frame(FrameType.RECORDS, header, body))


def spool_steps(writer: SpoolWriter, step_rows: Any, ring_header: Any, steps: range, attempt: int = 0) -> None:
    """Write what a hub writes while it takes in `steps` of two ranks."""
    ingest = TraceIngest(StoreLimits())
    first = [0, 0]
    for rank in (0, 1):
        ingest.add_ring(attempt, ring_header(rank))
        writer.append_ring(attempt, frames.encode(Frame(FrameType.RING, ring_header(rank))))
    for step in steps:
        for rank in (0, 1):
            raw = records_frame(rank, first[rank], step_rows(rank, step).tobytes())
            first[rank] += len(step_rows(rank, step))
            frame = frames.decode(raw)
            taken = ingest.add_records(attempt, frame.header, frame.body)
            writer.append_records(attempt, raw)
            if taken.points:
                writer.append_curve(attempt, curve_frame(taken.points))
            for stored in taken.finished:
                writer.append_digest(attempt, digest_frame(stored.digest))


def test_all_steps_are_restored_from_the_spool(tmp_path: Path, step_rows: Any, ring_header: Any) -> None:
    writer = SpoolWriter(tmp_path, SpoolLimits())
    spool_steps(writer, step_rows, ring_header, range(6))
    writer.close()
    ingest = TraceIngest(StoreLimits())
    finished = restore(StoredTraces(tmp_path, None), ingest, newest_segments=None)
    assert [stored.view.step for stored in finished] == list(range(6))
    assert [digest.step for digest in ingest.store.digests(None, None)] == list(range(6))
    assert [point.value for point in ingest.curves.curve("loss")] == [4.0 + step for step in range(6)]
    assert all(stored.digest.complete for stored in finished)
    assert ingest.attempts[0].next_index == {(0, 0): 30, (1, 1): 36}


def test_old_segments_are_deleted_and_sums_stay(tmp_path: Path, step_rows: Any, ring_header: Any) -> None:
    limits = SpoolLimits(segment_bytes=1000, total_bytes=4000)
    writer = SpoolWriter(tmp_path, limits)
    spool_steps(writer, step_rows, ring_header, range(40))
    writer.close()
    segments = SpoolReader(tmp_path).segments(0)
    assert sum(path.stat().st_size for path in segments) <= limits.total_bytes
    assert all(path.stat().st_size <= limits.segment_bytes for path in segments)
    ingest = TraceIngest(StoreLimits())
    finished = restore(StoredTraces(tmp_path, None), ingest, newest_segments=2)
    assert 0 < len(finished) < 40
    assert [digest.step for digest in ingest.store.digests(None, None)] == list(range(40))
    assert len(list(ingest.curves.curve("loss"))) == 40


def test_digests_and_curves_are_bounded_over_steps_and_attempts(
    tmp_path: Path, step_rows: Any, ring_header: Any
) -> None:
    """The newest are retained, of the newest attempt as long as it has some."""
    limits = SpoolLimits(sums_bytes=40_000)
    for attempt in range(4):
        writer = SpoolWriter(tmp_path, limits)
        spool_steps(writer, step_rows, ring_header, range(100), attempt)
        writer.close()
        sums = [path for path in tmp_path.glob("*/*.frames") if path.name.startswith(("digests", "curves"))]
        assert sum(path.stat().st_size for path in sums) <= limits.sums_bytes
        ingest = TraceIngest(StoreLimits())
        restore(StoredTraces(tmp_path, None), ingest, newest_segments=1)
        steps = [digest.step for digest in ingest.store.digests(None, None) if digest.attempt == attempt]
        assert 20 < len(steps) < 100
        assert steps == list(range(100 - len(steps), 100))
        points = [point.step for point in ingest.curves.curve("loss") if point.attempt == attempt]
        assert points[-1] == 99


def test_each_life_leaves_a_ring_once(tmp_path: Path, step_rows: Any, ring_header: Any) -> None:
    for _ in range(5):
        writer = SpoolWriter(tmp_path, SpoolLimits())
        for rank in (0, 1):
            writer.append_ring(0, frames.encode(Frame(FrameType.RING, ring_header(rank))))
        writer.close()
    assert len(list(SpoolReader(tmp_path).rings(0))) == 4
    SpoolWriter(tmp_path, SpoolLimits())
    assert [frame.header["rank"] for frame in SpoolReader(tmp_path).rings(0)] == [0, 1]


def test_a_second_life_appends_after_the_first(tmp_path: Path, step_rows: Any, ring_header: Any) -> None:
    limits = SpoolLimits(segment_bytes=1000, total_bytes=4000)
    for steps in (range(20), range(20, 40)):
        writer = SpoolWriter(tmp_path, limits)
        spool_steps(writer, step_rows, ring_header, steps)
        writer.close()
    paths = SpoolReader(tmp_path).segments(0)
    assert sum(path.stat().st_size for path in paths) <= limits.total_bytes
    numbers = [int(path.stem.removeprefix("records-")) for path in paths]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_budget_holds_over_attempts(tmp_path: Path, step_rows: Any, ring_header: Any) -> None:
    limits = SpoolLimits(segment_bytes=1000, total_bytes=4000)
    writer = SpoolWriter(tmp_path, limits)
    for attempt in range(3):
        spool_steps(writer, step_rows, ring_header, range(20), attempt)
    writer.close()
    reader = SpoolReader(tmp_path)
    assert reader.attempts() == [0, 1, 2]
    sizes = [path.stat().st_size for attempt in reader.attempts() for path in reader.segments(attempt)]
    # Each attempt's open segment may be added.
    assert sum(sizes) <= limits.total_bytes + 2 * limits.segment_bytes


@given(truncated=st.integers(0, 150), garbage=st.binary(max_size=40))
def test_a_torn_tail_is_left_out(tmp_path_factory: pytest.TempPathFactory, truncated: int, garbage: bytes) -> None:
    path = tmp_path_factory.mktemp("spool") / "x.frames"
    whole = [frames.encode(Frame(200, {"n": n}, bytes(n))) for n in range(5)]
    data = b"".join(whole)
    path.write_bytes(data[: len(data) - truncated] if truncated else data)
    found = [frame.header["n"] for frame in read_frames(path)]
    complete, size = 0, len(data) - truncated
    while complete < 5 and sum(map(len, whole[: complete + 1])) <= size:
        complete += 1
    assert found == list(range(complete))
    path.write_bytes(data + garbage)
    assert [frame.header["n"] for frame in read_frames(path)][:5] == list(range(5))


def test_missing_files_are_empty(tmp_path: Path) -> None:
    assert list(read_frames(tmp_path / "none")) == []
    assert SpoolReader(tmp_path / "none").attempts() == []
    assert JsonFile(tmp_path / "none").read() is None
    JsonFile(tmp_path / "some.json").write({"a": [1]})
    assert JsonFile(tmp_path / "some.json").read() == {"a": [1]}


def test_a_json_file_on_a_full_disk_stays_old_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = JsonFile(tmp_path / "some.json")
    file.write(1)
    (tmp_path / "some.new").symlink_to("/dev/full")
    file.write(2)
    file.write(3)
    assert file.read() == 1
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    (tmp_path / "some.new").unlink()
    file.write(4)
    assert file.read() == 4


def test_a_frame_that_was_written_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, whole = SpoolWriter(tmp_path, SpoolLimits()), os.write
    frames_ = [frames.encode(Frame(FrameType.BYE, {"reason": str(number)})) for number in range(3)]
    writer.append_digest(0, frames_[0])
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[: len(data) // 2]))
    writer.append_digest(0, frames_[1])
    monkeypatch.setattr(os, "write", whole)
    writer.append_digest(0, frames_[2])
    writer.close()
    assert writer.failed_writes == 1
    assert [frame.header["reason"] for frame in SpoolReader(tmp_path).digests(0)] == ["0", "2"]


@pytest.mark.parametrize("torn", [1, 20, 90])
@pytest.mark.parametrize("name", ["digests", "curves", "rings"])
def test_the_next_hub_appends_after_whole_frames(
    tmp_path: Path, ring_header: Any, name: str, torn: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub was killed within a write. What is appended is read, and no frame is made of both."""

    def encoded(number: int) -> bytes:
        return frames.encode(Frame(FrameType.RING, ring_header(0) | {"rank": number, "number": number}, bytes(80)))

    def append(writer: SpoolWriter, numbers: range) -> None:
        write = getattr(writer, f"append_{name.removesuffix('s')}")
        for number in numbers:
            write(0, encoded(number))
        writer.close()

    append(SpoolWriter(tmp_path, SpoolLimits()), range(3))
    path = tmp_path / "attempt-0000" / f"{name}.frames"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - len(encoded(2)) + torn])
    found = getattr(SpoolReader(tmp_path), name)
    assert [frame.header["number"] for frame in found(0)] == [0, 1]
    append(SpoolWriter(tmp_path, SpoolLimits()), range(10, 14))
    numbers = [frame.header["number"] for frame in found(0)]
    assert numbers[-5:] == [1, 10, 11, 12, 13]
    assert "an incomplete frame after" in caplog.text
    assert all(len(frame.body) == 80 and not any(frame.body) for frame in found(0))


def test_a_file_is_read_once_before_it_is_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of an older attempt among those of the rings of a newer one open its file again and again."""
    frame = frames.encode(Frame(FrameType.BYE, {}))
    first = SpoolWriter(tmp_path, SpoolLimits())
    first.append_digest(0, frame)
    first.close()
    read: list[Path] = []
    monkeypatch.setattr("megatronapp_analyzer.hub.ingest.spool.truncate_to_frames", read.append)
    writer = SpoolWriter(tmp_path, SpoolLimits())
    for _ in range(3):
        writer.append_digest(0, frame)
        writer.append_ring(1, frame)
    writer.close()
    assert read == [tmp_path / "attempt-0000" / "digests.frames"]
    assert len(list(SpoolReader(tmp_path).digests(0))) == 4


def test_full_disk_is_counted_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "attempt-0000").mkdir()
    (tmp_path / "attempt-0000" / "digests.frames").symlink_to("/dev/full")
    writer = SpoolWriter(tmp_path, SpoolLimits())
    for _ in range(3):
        writer.append_digest(0, frames.encode(Frame(FrameType.BYE, {})))
    writer.close()
    assert writer.failed_writes == 3
    assert len([record for record in caplog.records if "cannot store traces" in record.message]) == 1


def test_a_deleted_folder_is_counted_and_made_again_with_the_rings(
    tmp_path: Path, step_rows: Any, ring_header: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    spooled = SpooledIngest(TraceIngest(StoreLimits()), folder, SpoolLimits())
    assert spooled.restore(None) == []
    for rank in (0, 1):
        header = ring_header(rank)
        spooled.add_ring(0, rank, header, frames.encode(Frame(FrameType.RING, header)))
    first = [0, 0]

    def write(steps: range) -> None:
        for step in steps:
            for rank in (0, 1):
                raw = records_frame(rank, first[rank], step_rows(rank, step).tobytes())
                first[rank] += len(step_rows(rank, step))
                spooled.add_records(0, frames.decode(raw), raw)

    write(range(3))
    spooled._writer.wait_until_written()  # type: ignore[union-attr]
    shutil.rmtree(folder)
    write(range(3, 9))
    spooled.close()
    # Files of records, curves and digests, once each.
    assert spooled.failed_writes == 3
    assert spooled.dropped_frames == 0
    assert "was deleted" in caplog.text
    ingest = TraceIngest(StoreLimits())
    finished = restore(StoredTraces(folder, None), ingest, newest_segments=None)
    assert [stored.view.step for stored in finished] == list(range(3, 9))


def test_a_segment_that_cannot_be_deleted_is_counted(
    tmp_path: Path, step_rows: Any, ring_header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{path} may not be deleted")

    monkeypatch.setattr(Path, "unlink", refuse)
    writer = SpoolWriter(tmp_path, SpoolLimits(segment_bytes=1000, total_bytes=2000))
    spool_steps(writer, step_rows, ring_header, range(20))
    writer.close()
    assert writer.failed_writes > 0


class BlockedWriter(SpoolWriter):
    """Writer on a disk that hangs until it is released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SpoolLimits())
        self.hangs = threading.Event()
        self.released = threading.Event()

    def append_records(self, attempt: int, frame: bytes) -> None:
        self.hangs.set()
        self.released.wait()
        super().append_records(attempt, frame)


def test_a_disk_that_hangs_costs_records_but_no_rings_and_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BlockedWriter(tmp_path)
    frame = frames.encode(Frame(FrameType.BYE, {"reason": "x" * 100}))
    thread = SpoolThread(writer, limit_bytes=3 * len(frame))
    try:
        for _ in range(5):
            thread.append_records(0, frame)
        assert writer.hangs.wait(120)
        for _ in range(5):
            thread.append_digest(0, frame)
            thread.append_ring(0, frame, 0)
        assert thread.dropped_frames == 2 + 3, "of records beyond 3 frames, of sums beyond 6"
        thread.close(patience_s=0.01)
        assert "the disk is too slow: 10 frames of traces are not stored after 0.01 s" in caplog.text
    finally:
        writer.released.set()
        thread.close(patience_s=120)
    reader = SpoolReader(tmp_path)
    assert [len(list(found)) for found in (reader.rings(0), reader.digests(0))] == [5, 2]
    assert sum(len(list(read_frames(path))) for path in reader.segments(0)) == 3


def test_an_error_of_the_writer_does_not_end_its_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SpoolWriter):
        def append_curve(self, attempt: int, frame: bytes) -> None:
            raise ValueError("defect")

    frame = frames.encode(Frame(FrameType.BYE, {}))
    thread = SpoolThread(Failing(tmp_path, SpoolLimits()))
    thread.append_curve(0, frame)
    thread.append_digest(0, frame)
    thread.close(patience_s=120)
    assert thread.failed_writes == 1
    assert len(list(SpoolReader(tmp_path).digests(0))) == 1
    assert "is not stored" in caplog.text
