"""Recorded jobs as a hub holds and stores them."""

import pathlib

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolWriter
from megatronapp_analyzer.hub.ingest.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.offline.job import RecordedJob
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

STORED_BYTES = 2 << 30
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


def stored_traces(folder: pathlib.Path) -> TraceIngest:
    """Read all records that a hub has stored in a folder."""
    ingest = TraceIngest(_LIMITS)
    spooled = SpooledIngest(ingest, folder, SpoolLimits(), writable=False)
    spooled.restore(newest_segments=None)
    for attempt in sorted(ingest.attempts):
        spooled.end_attempt(attempt)
    return ingest


def traces_folder(path: pathlib.Path) -> pathlib.Path | None:
    """Return the folder of stored traces at a path: this one, or that of a hub or job below it; None if none is."""
    for below in (path, path / "traces", path / "hub" / "traces"):
        if any(below.glob("attempt-*/rings.frames")):
            return below
    return None
