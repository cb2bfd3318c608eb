"""Reason of a finding by the spans of its ranks alone: these are exact where counters are samples."""

import numpy as np

from megatronapp_analyzer.detect.findings.lifecycle import FindingTrack
from megatronapp_analyzer.model import Cause, Reason

EXPLAINED_PART = 0.5
"""Part of what a rank takes longer that collections, or stops, must make up."""


def reason_of(track: FindingTrack) -> Reason | None:
    """Return the reason of a finding; None if the spans do not show it."""
    if track.cause is Cause.MEMORY:
        return Reason.MEMORY_BOUND
    if track.cause is not Cause.HOST or not track.occurrences:
        return None
    collecting_s, stopped_s = track.host_spans_s
    least_s = EXPLAINED_PART * float(np.mean(track.occurrences))
    if collecting_s >= least_s > 0:
        return Reason.GARBAGE_COLLECTION
    if stopped_s >= least_s > 0:
        return Reason.STOPPED
    return Reason.CPU_CONTENTION if track.not_running else None


def reason_lines(track: FindingTrack) -> list[str]:
    """Return the times from which the reason of a finding follows."""
    reason, (collecting_s, stopped_s) = reason_of(track), track.host_spans_s
    if reason is Reason.GARBAGE_COLLECTION:
        return [f"Python collected garbage for {collecting_s * 1e3:.1f} ms per microbatch, beyond that of other ranks"]
    if reason is Reason.STOPPED:
        return [f"its process was stopped for {stopped_s * 1e3:.1f} ms per microbatch"]
    return []
