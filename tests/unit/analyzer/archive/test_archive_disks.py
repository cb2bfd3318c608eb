"""Files of the archive that cannot be read now, or are those of another release: they are neither moved nor lost."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import full_disk
import pytest
from spooled_job import JOB, SpooledJob, all_rows

from megatronapp_analyzer.errors import SettingsError
from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog, DroppedHours
from megatronapp_analyzer.hub.archive.quarantine import Quarantine
from megatronapp_analyzer.hub.archive.schema import VERSION
from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_analyzer.hub.settings import load_job_file
from megatronapp_common.job.api.quantity import quantity_value


@pytest.fixture
def job(tmp_path: Path, step_rows: Any, ring_header: Any) -> SpooledJob:
    job = SpooledJob(tmp_path, lambda rank, step: step_rows(rank, step)[:5], ring_header)
    job.announce()
    job.write(range(60))
    job.settle()  # the library is loaded, which the end of a hub has no time for where processors are busy
    job.spooled.close()
    return job


def files_of(job: SpooledJob) -> list[Path]:
    return sorted((job.folder / "store").glob(f"{JOB}/*/records-*.parquet"))


def catalog_of(job: SpooledJob, *, writable: bool = True) -> Catalog:
    return Catalog(job.folder / "store" / JOB, writable=writable)


def test_a_file_that_the_system_does_not_open_now_stays(job: SpooledJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are in their place once the hub may open files again, and no number is used twice."""
    files = files_of(job)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        "megatronapp_analyzer.hub.archive.catalog.open_file", lambda path: _open_without_descriptors(path, limits)
    )
    catalog = catalog_of(job)
    monkeypatch.undo()
    assert files_of(job) == files
    assert catalog.damaged == len(files)
    assert catalog.next_segment(0) == len(files)
    assert catalog_of(job).damaged == 0


def _open_without_descriptors(path: Path, limits: tuple[int, int]) -> Any:
    from megatronapp_analyzer.hub.archive.parquet_files import open_file

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        return open_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_of_a_newer_release_stays(job: SpooledJob, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(job)
    monkeypatch.setattr("megatronapp_analyzer.hub.archive.schema.VERSION", VERSION + 1)
    catalog = catalog_of(job)
    assert files_of(job) == files
    assert catalog.damaged == len(files)
    assert catalog.next_segment(0) == len(files)


def test_a_reader_counts_a_damaged_file_once(job: SpooledJob) -> None:
    torn, *_ = files_of(job)
    torn.write_bytes(torn.read_bytes()[:-20])
    catalog = catalog_of(job, writable=False)
    for _ in range(3):
        catalog.refresh()
    assert catalog.damaged == 1


def test_a_segment_is_tried_again_where_memory_is_short(job: SpooledJob, monkeypatch: pytest.MonkeyPatch) -> None:
    second = SpooledJob(job.folder, job._step_rows, job._ring_header)
    second.write(range(60, 62))
    catalog = second.spooled.catalog
    assert catalog is not None
    assert second.spooled.archiver is not None
    failing = [MemoryError()]
    write = Archiver._write

    def fail_once(archiver: Archiver, *arguments: Any) -> None:
        if failing:
            raise failing.pop()
        write(archiver, *arguments)

    monkeypatch.setattr(Archiver, "_write", fail_once)
    second.spooled.close()
    assert second.spooled.archiver.damaged == 0
    third = SpooledJob(job.folder, job._step_rows, job._ring_header)
    third.settle()
    assert len(all_rows(third.stored)) == 62 * 5 * 2
    third.spooled.close()


@pytest.mark.parametrize("text", ["", '{"files": ', '{"unknown": 1}', "[]", "7"])
def test_a_hub_starts_with_a_damaged_count_of_what_was_dropped(
    job: SpooledJob, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power failure before the content was on the disk."""
    path = job.folder / "store" / JOB / "dropped.json"
    path.write_text(text)
    assert catalog_of(job).dropped == DroppedHours()
    assert str(path) in caplog.text


def test_a_damaged_json_file_is_taken_for_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b"\xff{")
    assert JsonFile(path).read() is None
    assert str(path) in caplog.text


def test_a_hub_starts_without_the_rings_of_an_attempt(job: SpooledJob, caplog: pytest.LogCaptureFixture) -> None:
    """Neither source has them whole; later records are stored."""
    shutil.rmtree(job.folder / "traces")
    for path in (job.folder / "store").glob(f"{JOB}/*/rings-*.parquet"):
        path.write_bytes(b"")
    again = SpooledJob(job.folder, job._step_rows, job._ring_header)
    assert again.restored == []
    assert "rings-a0000.parquet" in caplog.text
    again.announce(attempt=1)
    again.write(range(5), attempt=1)
    again.spooled.close()
    assert len(all_rows(again.stored, attempt=1)) == 5 * 5 * 2


def test_rings_in_the_archive_stay_where_the_spool_has_lost_them(job: SpooledJob) -> None:
    shutil.rmtree(job.folder / "traces")
    second = SpooledJob(job.folder, job._step_rows, job._ring_header)
    second.write(range(60, 62))
    second.spooled.close()
    third = SpooledJob(job.folder, job._step_rows, job._ring_header)
    assert set(third.stored.newest_rings(0)) == {(0, 0), (1, 1)}
    third.spooled.close()


@pytest.mark.parametrize("size", ["128Mi", "200Mi", "256Mi", "1Gi", "10Gi", "1Ti"])
def test_what_a_hub_stores_fits_into_its_volume(tmp_path: Path, size: str) -> None:
    """An eighth is left for small files, and for captures that are being replaced."""
    manifest = {"metadata": {"name": "job"}, "spec": {"analyzer": {"volume": {"sizeLimit": size}}}}
    (tmp_path / "job.yaml").write_text(json.dumps(manifest))
    limits = load_job_file(tmp_path / "job.yaml", name=None, uid=None).spool
    volume = quantity_value(size)
    assert limits.total_bytes + limits.sums_bytes + limits.archive_bytes <= 3 / 4 * volume
    assert limits.captures_bytes <= volume / 16
    assert 2 * limits.segment_bytes <= limits.total_bytes


def test_a_volume_without_space_for_an_archive_is_refused(tmp_path: Path) -> None:
    manifest = {"metadata": {"name": "job"}, "spec": {"analyzer": {"volume": {"sizeLimit": "100Mi"}}}}
    (tmp_path / "job.yaml").write_text(json.dumps(manifest))
    with pytest.raises(SettingsError, match="sizeLimit: 100Mi is less than 128Mi; write more, such as 10Gi"):
        load_job_file(tmp_path / "job.yaml", name=None, uid=None)


def test_a_disk_smaller_than_the_limit_has_the_newest_hours(tmp_path: Path) -> None:
    """The disk is a real one that is full. Without space for them, no later hours would be stored."""
    script = f'mount -t tmpfs -o size=300k none {tmp_path} || exit 77; exec "$@"'
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    command = [*mounted, sys.executable, full_disk.__file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["last step"] == full_disk.HOURS * full_disk.STEPS - 1
    assert found["hours"] == full_disk.hours()[-len(found["hours"]) :]
    assert 1 < len(found["hours"]) < full_disk.HOURS
    assert found["dropped files"] == found["dropped on disk"] > 0
    assert (found["failed"], found["left in the spool"]) == (0, 0)
    assert done.stderr.count("old hours are deleted") == 1


def test_a_full_disk_costs_old_hours_once_for_a_segment(
    job: SpooledJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may take the space each time: what is archived already is not deleted for nothing."""
    before = files_of(job)
    second = SpooledJob(job.folder, job._step_rows, job._ring_header)
    second.write(range(60, 62))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Archiver, "_write", refuse)
    second.spooled._writer.wait_until_written()  # type: ignore[union-attr]
    second.spooled._writer.close()  # type: ignore[union-attr]
    archiver = second.spooled.archiver
    assert archiver is not None
    [segment] = (job.folder / "traces").glob("*/records-*.frames")
    archiver.close(120)
    after = files_of(job)
    assert after == before[-len(after) :]
    assert 0 < len(after) < len(before)
    assert not archiver._try(0, segment)
    assert files_of(job) == after
    assert "old hours are deleted" in caplog.text


def test_a_command_deletes_no_old_hours_on_a_full_disk(job: SpooledJob, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(job)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Archiver, "_move", refuse)
    assert not Archiver(job.folder / "traces", catalog_of(job))._try(0, files_of(job)[0])
    assert files_of(job) == before


def test_the_quarantine_has_a_part_of_the_archive_and_drops_the_oldest(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine", limit_bytes=8000)
    for number in range(4):
        path = tmp_path / "hour" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(400))
        os.utime(path, ns=(number, number))
        quarantine.take(path)
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == ["hour-2", "hour-3"]
    assert quarantine.bytes == 800
    large = tmp_path / "hour" / "large"
    large.write_bytes(bytes(5000))
    quarantine.take(large)
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["hour-large"], "the newest file stays"
    assert quarantine.clear() == 5000
    assert quarantine.bytes == 0


def test_the_quarantine_counts_as_bytes_of_the_archive(job: SpooledJob) -> None:
    """Old hours are deleted for it; a hub whose limit has become smaller bounds it when it starts."""
    files = files_of(job)
    size = sum(path.stat().st_size for path in files)
    quarantine = job.folder / "store" / JOB / "quarantine"
    quarantine.mkdir()
    (quarantine / "old").write_bytes(bytes(size))
    (quarantine / "new").write_bytes(bytes(size // 2))
    os.utime(quarantine / "old", ns=(0, 0))
    catalog = Catalog(job.folder / "store" / JOB, limit_bytes=size, writable=True)
    assert [path.name for path in quarantine.iterdir()] == ["new"]
    dropped = catalog.add(catalog.files()[-1])
    assert [file.path for file in dropped] == files[: len(dropped)]
    assert 0 < len(dropped) < len(files)
    assert catalog.bytes + size // 2 <= size
