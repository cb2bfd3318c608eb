"""Files of the archive that cannot be read now, or are those of another release: they are neither moved nor lost."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from spooled_job import JOB, SpooledJob, all_rows

from megatronapp_analyzer.errors import SettingsError
from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog, DroppedHours
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
