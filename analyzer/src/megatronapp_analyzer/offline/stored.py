"""Recorded jobs as a hub holds and stores them."""

import pathlib
import threading
from collections.abc import Iterator

from megatronapp_analyzer.errors import ArchiveError, ImportTraceError, ProtocolError
from megatronapp_analyzer.hub.archive import names
from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.archive.restore import restore
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.ingest.counter_history import CounterHistory
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolWriter
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.settings import load_job_file
from megatronapp_analyzer.offline.job import RecordedJob
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

STORED_BYTES = 2 << 30
COUNTER_BYTES = 256 << 20
"""Memory of samples of counters, which give reasons for verdicts."""
MOST_COUNTER_ROWS = 1 << 20
"""Seconds of a worker whose counters are read at most, 12 days."""
_LIMITS = StoreLimits(full_steps=1_000_000, full_bytes=STORED_BYTES)


def ingest_of(job: RecordedJob) -> TraceIngest:
    """Return all steps of a recorded job, as a hub would have them."""
    ingest = TraceIngest(_LIMITS)
    for rank in job.ranks:
        ingest.add_ring(0, job.ring_header(rank))
    for header, records in job.parts():
        ingest.add_records(0, header, records.tobytes())
    ingest.end_attempt(0)
    return ingest


def write_traces(job: RecordedJob, folder: pathlib.Path) -> None:
    """Write a recorded job as a hub stores traces. Raises ImportTraceError for a folder that has files already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ImportTraceError(f"{folder} is not empty; choose another -o FOLDER, or empty it")
    except OSError as error:
        raise ImportTraceError(f"{folder}: cannot write the traces: {error.strerror}; choose another -o") from error
    writer = SpoolWriter(folder, SpoolLimits(total_bytes=STORED_BYTES))
    for rank in job.ranks:
        writer.append_ring(0, frames.encode(Frame(FrameType.RING, job.ring_header(rank))))
    for header, records in job.parts():
        writer.append_records(0, frames.encode(Frame(FrameType.RECORDS, header, records.tobytes())))
    writer.close()
    if writer.failed_writes:
        raise ImportTraceError(f"{folder}: cannot write all traces; free some space")


def stored_traces(
    stored: StoredTraces, *, steps: tuple[int, int] | None = None, newest_segments: int | None = None
) -> TraceIngest:
    """Read the records that a hub has stored: all, those of files with some steps, or of the newest segments.

    Memory is bounded by STORED_BYTES: of more records, the newest steps are in it. Raises ImportTraceError.
    """
    ingest = TraceIngest(_LIMITS, counter_history=CounterHistory(COUNTER_BYTES, most_rows=MOST_COUNTER_ROWS))
    try:
        restore(stored, ingest, newest_segments=newest_segments, steps=steps)
    except (ArchiveError, ProtocolError) as error:
        raise ImportTraceError(f"the rings of the records cannot be read: {error}") from error
    for attempt in sorted(ingest.attempts):
        ingest.end_attempt(attempt)
    return ingest


def hub_traces(state: pathlib.Path) -> StoredTraces:
    """Return the reader of what a hub has stored under its state folder."""
    jobs = list(_job_folders(state / "store"))
    return StoredTraces(state / "traces", Catalog(jobs[0]) if jobs else None)


def archive_traces(job: pathlib.Path) -> Catalog:
    """Move what the ended hub of a job has left in its spool to its archive; return what is there then.

    Raises ImportTraceError if the disk does not take all of it.
    """
    manifest = job / "job.yaml"
    limits = load_job_file(manifest, name=None, uid=None).spool if manifest.exists() else SpoolLimits()
    catalog = Catalog(job / "hub" / "store" / job.name, limit_bytes=limits.archive_bytes, writable=True)
    archiver = Archiver(job / "hub" / "traces", catalog)
    archiver.start()
    archiver.close(threading.TIMEOUT_MAX)
    if archiver.failed_writes:
        raise ImportTraceError(f"{catalog.folder}: cannot write all traces; free some space and run the command again")
    return catalog


def find_stored(path: pathlib.Path) -> StoredTraces | None:
    """Return the reader of stored traces at a path; None if it has none.

    A path is the folder of a job or its hub, of its spool or archive, or of an hour of the archive, or a file of it.
    Raises ImportTraceError for a file of the archive without the file of its rings, or with another name, and for the
    archives of several jobs.
    """
    if path.suffix == ".parquet":
        return _of_file(path)
    for state in (path, path / "hub", path.parent):
        spool = state / "traces"
        if path in (state, state.parent, spool) and (spool.is_dir() or any(_job_folders(state / "store"))):
            return hub_traces(state)
    if any(path.glob("attempt-*/rings.frames")):
        return StoredTraces(path, None)
    if names.HOUR.fullmatch(path.name) and any(names.records_files(path)):
        return StoredTraces(None, Catalog(path.parent, chosen=lambda file: file.parent == path))
    jobs = [path] if any(names.hour_folders(path)) else list(_job_folders(path))
    if len(jobs) > 1:
        raise ImportTraceError(f"{path} has traces of {len(jobs)} jobs; give the folder of one, such as {jobs[0]}")
    return StoredTraces(None, Catalog(jobs[0])) if jobs else None


def _of_file(path: pathlib.Path) -> StoredTraces:
    named = names.RECORDS.fullmatch(path.name)
    rings = path.with_name(names.rings_name(int(named[1]))) if named else path
    if named is None or not names.HOUR.fullmatch(path.absolute().parent.name):
        raise ImportTraceError(
            f"{path}: no file with records of the trace store, HOUR/records-aATTEMPT-NUMBER.parquet; "
            "megatronapp whatif reads operations of the public straggler traces"
        )
    if not rings.exists():
        raise ImportTraceError(f"{path}: {rings.name} is missing next to it, without which records cannot be read")
    path = path.absolute()
    return StoredTraces(None, Catalog(path.parent.parent, chosen=lambda file: file == path))


def _job_folders(store: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the folders of jobs in a store."""
    if store.is_dir():
        yield from (folder for folder in sorted(store.iterdir()) if any(names.hour_folders(folder)))
