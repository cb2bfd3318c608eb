"""The move of records from the spool to the archive: each is visible once, at any time, and survives restarts."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spooled_job import JOB, SpooledJob, all_rows, identities, records_frame, sent_rows

from megatronapp_analyzer.align.step_clocks import ClockReading
from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.archive.rows import rank_records
from megatronapp_analyzer.hub.archive.segments import read_segment
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolWriter
from megatronapp_analyzer.offline.stored import find_stored, stored_traces
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType


@pytest.fixture
def even_rows(step_rows: Any) -> Any:
    """Spans of one step of one of two ranks, five each."""
    return lambda rank, step: step_rows(rank, step)[:5]


@pytest.fixture
def job(tmp_path: Path, even_rows: Any, ring_header: Any) -> SpooledJob:
    job = SpooledJob(tmp_path, even_rows, ring_header)
    job.announce()
    return job


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "store").glob(f"{JOB}/*/records-*.parquet"))


def assert_stored(job: SpooledJob, even_rows: Any, steps: range) -> None:
    """Compare all that is stored with what was sent."""
    found = all_rows(job.stored)
    for rank in (0, 1):
        mine = found[found["rank"] == rank]
        sent = sent_rows(even_rows, rank, steps)
        assert mine["index"].tolist() == list(range(len(sent)))
        records = rank_records(mine)
        assert all((records[name] == sent[name]).all() for name in sent.dtype.names)


def test_closed_segments_are_moved_and_all_records_are_stored_once(job: SpooledJob, even_rows: Any) -> None:
    job.write(range(60))
    job.settle()
    assert len(files_of(job.folder)) > 2
    assert len(job.stored.parts(0)) == len(files_of(job.folder)) + 1, "one segment is open"
    assert len(list((job.folder / "traces").glob("*/records-*.frames"))) == 1
    assert_stored(job, even_rows, range(60))
    job.spooled.close()
    assert list((job.folder / "traces").glob("*/records-*.frames")) == []
    assert_stored(job, even_rows, range(60))


def test_a_reader_sees_each_record_once_while_records_are_moved(job: SpooledJob, even_rows: Any) -> None:
    ended = threading.Event()
    problems: list[str] = []
    counts: list[int] = []

    def read() -> None:
        other = Catalog(job.folder / "store" / JOB)  # as another process, which learns of files by reading the folder
        before: set[Any] = set()
        while not ended.is_set():
            other.refresh()
            for stored in (job.stored, StoredTraces(job.folder / "traces", other)):
                found = list(identities(all_rows(stored)))
                seen = set(found)
                if len(seen) != len(found):
                    problems.append(f"{len(found) - len(seen)} records twice")
                if not before <= seen:
                    problems.append(f"{len(before - seen)} records have vanished")
                before = seen
            counts.append(len(before))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(150):
            job.write(range(step, step + 1))
        job.settle()
        while len(counts) < 2 and reader.is_alive():  # where the reader was late
            time.sleep(0.01)
    finally:
        ended.set()
        reader.join()
    assert problems == []
    assert len(counts) > 1
    assert_stored(job, even_rows, range(150))
    job.spooled.close()


def open_files() -> Iterator[str]:
    """Yield the paths of what this process has open, also of removed files."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            yield os.readlink(descriptor)


def test_an_attempt_is_archived_when_the_next_begins(job: SpooledJob, even_rows: Any) -> None:
    """Its files are closed, too: a job that restarts often does not run out of descriptors."""
    job.write(range(60))
    job.announce(attempt=1)
    job.settle()
    assert list((job.folder / "traces").glob("attempt-0000/records-*.frames")) == []
    assert not [path for path in open_files() if path.startswith(str(job.folder / "traces" / "attempt-0000"))]
    assert_stored(job, even_rows, range(60))
    job.spooled.close()


def test_a_second_hub_continues(tmp_path: Path, even_rows: Any, ring_header: Any) -> None:
    for life in range(3):
        job = SpooledJob(tmp_path, even_rows, ring_header)
        steps = range(20 * life, 20 * (life + 1))
        assert [step.view.step for step in job.restored] == list(range(20 * life))[-len(job.restored) :]
        job.announce()
        # Agents send again what their rings hold.
        job.write(range(max(0, steps.start - 10), steps.stop))
        job.spooled.close()
        assert_stored(job, even_rows, range(steps.stop))
    numbers = [part.segment for part in job.stored.parts(0)]
    assert numbers == list(range(len(numbers)))


def test_a_segment_that_was_archived_but_not_deleted_is_deleted_by_the_next_hub(
    job: SpooledJob, even_rows: Any, ring_header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{self} may not be deleted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        job.write(range(30))
        job.spooled.close()
    assert {part.segment for part in job.stored.parts(0) if part.file} == {0}
    assert_stored(job, even_rows, range(30))
    second = SpooledJob(job.folder, even_rows, ring_header)
    second.settle()
    assert_stored(second, even_rows, range(30))
    second.spooled.close()


def test_a_file_that_was_not_finished_is_written_again(
    job: SpooledJob, even_rows: Any, ring_header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
        job.write(range(30))
        job.spooled._writer.wait_until_written()  # type: ignore[union-attr]
        job.spooled.close()
    assert job.spooled.failed_writes > 0
    assert files_of(job.folder) == []
    assert_stored(job, even_rows, range(30))
    (job.folder / "store" / JOB / "2023-11-14T22").mkdir(exist_ok=True)
    left = job.folder / "store" / JOB / "2023-11-14T22" / "records-a0000-000000.parquet.unfinished"
    left.write_bytes(b"PAR1")
    second = SpooledJob(job.folder, even_rows, ring_header)
    second.settle()
    assert not left.exists()
    assert len(files_of(job.folder)) > 1
    assert_stored(second, even_rows, range(30))
    second.spooled.close()


def test_a_torn_file_is_moved_to_quarantine_and_reported(
    job: SpooledJob, even_rows: Any, ring_header: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job.write(range(60))
    job.spooled.close()
    torn, *others = files_of(job.folder)
    torn.write_bytes(torn.read_bytes()[:-20])
    second = SpooledJob(job.folder, even_rows, ring_header)
    catalog = second.spooled.catalog
    assert catalog is not None
    assert catalog.damaged == 1
    assert files_of(job.folder) == others
    moved = job.folder / "store" / JOB / "quarantine" / f"{torn.parent.name}-{torn.name}"
    assert moved.exists()
    assert str(torn) in caplog.text
    assert 0 < len(all_rows(second.stored)) < 60 * 5 * 2
    second.spooled.close()


def test_bytes_that_are_no_frame_do_not_stop_the_archive(
    job: SpooledJob, even_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame is malformed, another one has a garbled prefix; what is around and after them is archived."""
    job.write(range(3))
    job.spooled._writer.wait_until_written()  # type: ignore[union-attr]
    [segment] = (job.folder / "traces").glob("*/records-*.frames")
    before = segment.stat().st_size
    malformed = frames.encode(Frame(FrameType.RECORDS, {"rank": "x", "worker": 0, "first": 0, "lost": 0}, bytes(32)))
    garbled = bytearray(records_frame(0, 10_000, bytes(64)))
    garbled[0] = 7
    not_msgpack = bytearray(records_frame(0, 10_000, bytes(64)))
    not_msgpack[16:20] = b"\xc1" * 4
    with segment.open("ab") as file:
        file.write(malformed + bytes(garbled) + bytes(not_msgpack))
    job.write(range(3, 60))
    job.settle()
    assert_stored(job, even_rows, range(60))
    archiver = job.spooled.archiver
    assert archiver is not None
    assert archiver.damaged == 1
    [quarantined] = (job.folder / "store" / JOB / "quarantine").iterdir()
    content = read_segment(quarantined)
    assert content.unreadable == len(garbled) + len(not_msgpack)
    assert before < content.size
    assert "cannot be read and are omitted" in caplog.text
    job.spooled.close()


def test_the_oldest_hours_are_dropped_and_this_is_reported(tmp_path: Path, even_rows: Any, ring_header: Any) -> None:
    def hourly(rank: int, step: int) -> Any:
        rows = even_rows(rank, step)
        rows["start_ns"] += step // 20 * 3_600_000_000_000
        return rows

    probe = SpooledJob(tmp_path / "probe", hourly, ring_header)
    probe.announce()
    probe.write(range(100))
    probe.spooled.close()
    sizes = [path.stat().st_size for path in files_of(probe.folder)]
    limits = SpoolLimits(segment_bytes=4000, archive_bytes=sum(sizes) // 2)
    job = SpooledJob(tmp_path / "job", hourly, ring_header, limits)
    job.announce()
    job.write(range(100))
    job.spooled.close()
    catalog = job.spooled.catalog
    assert catalog is not None
    left = files_of(job.folder)
    assert sum(path.stat().st_size for path in left) == catalog.bytes <= limits.archive_bytes
    hours = {path.parent.name for path in files_of(probe.folder)}
    left_hours = {path.parent.name for path in left}
    assert left_hours == set(sorted(hours)[-len(left_hours) :])
    assert {path.name for path in (job.folder / "store" / JOB).iterdir() if path.is_dir()} == left_hours
    dropped = catalog.dropped
    assert (dropped.files, dropped.until) == (len(sizes) - len(left), max(hours - left_hours))
    assert dropped.records == 1000 - len(all_rows(job.stored))
    again = Catalog(catalog.folder)
    assert again.dropped == dropped
    assert [hour.hour for hour in again.hours()] == sorted(left_hours)
    assert again.hours()[-1].last_step == 99


def test_a_segment_that_the_spool_deletes_before_it_is_archived_is_counted(
    tmp_path: Path, even_rows: Any, ring_header: Any
) -> None:
    writer = SpoolWriter(tmp_path, SpoolLimits(segment_bytes=1000, total_bytes=3000))
    for step in range(20):
        writer.append_records(0, records_frame(0, 5 * step, even_rows(0, step).tobytes()))
    writer.close()
    assert writer.dropped_segments > 0


def test_a_segment_of_each_hour(tmp_path: Path, even_rows: Any) -> None:
    now = [0.0]
    writer = SpoolWriter(tmp_path, SpoolLimits(), now_s=lambda: now[0])
    closed: list[Path] = []
    writer.on_closed = lambda _, path: closed.append(path)
    for step in range(4):
        now[0] = step * 1800.0
        writer.append_records(0, records_frame(0, 5 * step, even_rows(0, step).tobytes()))
    assert len(closed) == 1
    writer.close()
    assert [path.name for path in closed] == ["records-000000.frames", "records-000001.frames"]


def test_rings_move_with_the_records(job: SpooledJob, even_rows: Any) -> None:
    """The archive alone gives the steps that the hub had, with communicators and places of ranks."""
    job.write(range(40))
    job.spooled.close()
    shutil.rmtree(job.folder / "traces")
    for path in (job.folder / "store", job.folder / "store" / JOB, files_of(job.folder)[0].parent):
        stored = find_stored(path)
        assert stored is not None
        ingest = stored_traces(stored)
        assert ingest.attempts[0].layout == job.ingest.attempts[0].layout
        for step in range(40):
            found, sent = ingest.store.find(step, 0), job.ingest.store.find(step, 0)
            assert found is not None
            assert sent is not None
            assert found.view.records.tobytes() == sent.view.records.tobytes()
            assert found.view.comms == sent.view.comms
            assert found.digest.complete


def test_clocks_of_the_steps_are_in_the_archive(tmp_path: Path, even_rows: Any, ring_header: Any) -> None:
    """Times are on the nodes' clocks until a reading of aligned ones, and then on these in all later segments."""
    job = SpooledJob(tmp_path, even_rows, lambda rank: ring_header(rank, boot_id=f"node-{rank}"))
    job.announce()
    monotonic, real = ring_header(0)["clockPairs"][-1]
    job.write(range(6))
    reading = ClockReading(
        attempt=0, step=5, offset_ns=np.array([0, 1000]), tied=np.array([True, True]), uncertainty_s=np.zeros(2)
    )
    job.spooled.take_reading(reading)
    job.write(range(6, 60))
    # Before that, a reader may see the records of a step whose clocks are not written yet.
    job.spooled._writer.wait_until_written()  # type: ignore[union-attr]
    for _ in range(2):
        rows = all_rows(job.stored)
        assert set((real - monotonic - rows["offset_ns"][rows["rank"] == 0]).tolist()) == {0}
        other = rows[rows["rank"] == 1]
        assert (real - monotonic - other["offset_ns"] == np.where(other["step"] >= 5, 1000, 0)).all()
        job.settle()
        assert len(files_of(job.folder)) > 2
    job.spooled.close()


def test_the_archiver_ends_with_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(self: Archiver, attempt: int, path: Path) -> None:
        hangs.set()
        released.wait()

    monkeypatch.setattr(Archiver, "_move", hang)
    archiver = Archiver(tmp_path, Catalog(tmp_path / "store"))
    archiver.start()
    archiver.add(0, tmp_path / "records-000000.frames")
    try:
        assert hangs.wait(120)
        archiver.close(0.01)
    finally:
        released.set()
    archiver.close(120)
