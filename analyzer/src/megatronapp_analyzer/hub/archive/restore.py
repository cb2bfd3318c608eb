"""Conversion between what the hub holds in memory and what its spool and archive store on disk."""

import numpy as np

from megatronapp_analyzer.errors import ArchiveError, ProtocolError
from megatronapp_analyzer.hub.archive.stored import Part, StoredTraces
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import LOG, SpoolFrame
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType


def digest_frame(digest: StepDigest) -> bytes:
    """Return a digest as the spool stores it."""
    header = {
        "step": digest.step,
        "startNs": digest.start_real_ns,
        "durationNs": digest.duration_ns,
        "complete": digest.complete,
    }
    return frames.encode(Frame(SpoolFrame.DIGEST, header, digest.values.astype("<f4").tobytes()))


def parse_digest(attempt: int, frame: Frame) -> StepDigest:
    """Parse a frame of `digest_frame`."""
    return StepDigest(
        attempt=attempt,
        step=frame.header["step"],
        start_real_ns=frame.header["startNs"],
        duration_ns=frame.header["durationNs"],
        complete=frame.header["complete"],
        values=np.frombuffer(frame.body, "<f4").reshape(len(METRICS), -1),
    )


def curve_frame(points: list[CurvePoint]) -> bytes:
    """Return the points of one frame of records as the spool stores them."""
    rows = [[point.name, point.step, point.value, point.start_ns, point.rank] for point in points]
    return frames.encode(Frame(SpoolFrame.CURVE, {"points": rows}))


def restore(
    reader: StoredTraces,
    ingest: TraceIngest,
    *,
    newest_segments: int | None,
    steps: tuple[int, int] | None = None,
    skip_unreadable: bool = False,
) -> list[StoredStep]:
    """Fill `ingest` from disk; returns the steps that are held in full, oldest first.

    Digests and curves are read whole, records only of the `newest_segments` of each attempt (all if None), and
    with `steps` only of files of the archive that may have one of them.
    Raises ArchiveError for rings that cannot be read, or with `skip_unreadable` logs it and omits their attempt.
    """
    finished = []
    for attempt in reader.attempts():
        try:
            rings = list(reader.rings(attempt))
        except ArchiveError as error:
            if not skip_unreadable:
                raise
            LOG.error("attempt %d is omitted, its rings cannot be read: %s", attempt, error)
            continue
        for frame in rings:
            ingest.add_ring(attempt, frame.header)
        known = _restore_sums(reader, ingest, attempt)
        parts = reader.parts(attempt, steps)[-newest_segments if newest_segments else None :]
        finished += _restore_records(reader, ingest, parts, known)
    return finished


def _restore_sums(reader: StoredTraces, ingest: TraceIngest, attempt: int) -> set[tuple[int, int]]:
    """Restore digests and curves; returns the keys of the digests."""
    known = set()
    for frame in reader.digests(attempt):
        digest = parse_digest(attempt, frame)
        known.add((attempt, digest.step))
        ingest.store.add_digest(digest)
    for frame in reader.curves(attempt):
        for name, step, value, start_ns, rank in frame.header["points"]:
            ingest.curves.add(CurvePoint(name, attempt, step, value, start_ns, rank))
    return known


def _restore_records(
    reader: StoredTraces, ingest: TraceIngest, parts: list[Part], known: set[tuple[int, int]]
) -> list[StoredStep]:
    finished = []
    ingest.begin_replay(known)
    for part in parts:
        for frame in reader.frames(part):
            if frame.type != FrameType.RECORDS:
                continue
            try:
                finished += ingest.add_records(part.attempt, frame.header, frame.body).finished
            except ProtocolError as error:
                LOG.warning("%s: a stored frame is skipped: %s", part.path, error)
    ingest.end_replay()
    return finished
