"""Clocks of the records of a segment: real time minus the clock of each rank, step by step."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.archive.rows import NO_RANK, Rows
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.hub.ingest.ring_metadata import real_offset_ns
from megatronapp_analyzer.hub.ingest.spool import SpoolFrame
from megatronapp_common import frames
from megatronapp_common.frames import Frame

Offsets = NDArray[np.int64]
StepOffsets = tuple[int, Offsets]
"""A step, and real time minus the clock of each rank at it."""


def clock_frame(step: int, offsets_ns: Offsets) -> bytes:
    """Return the clocks at a step as the spool stores them."""
    return frames.encode(Frame(SpoolFrame.CLOCK, {"step": step}, offsets_ns.astype("<i8").tobytes()))


def step_offsets(found: Iterable[Frame]) -> list[StepOffsets]:
    """Return the clocks in CLOCK frames, in the order of the steps; of a step the newest. Skips malformed frames."""
    known: dict[int, Offsets] = {}
    for frame in found:
        step = frame.header.get("step")
        if frame.type == SpoolFrame.CLOCK and isinstance(step, int) and not len(frame.body) % 8:
            known[step] = np.frombuffer(frame.body, "<i8")
    return sorted(known.items(), key=lambda reading: reading[0])


def ring_offsets(rings: Mapping[RingKey, Mapping[str, Any]]) -> dict[RingKey, int]:
    """Return real time minus the clock of each ring, by the real clock of its node."""
    offsets: dict[RingKey, int] = {}
    for key, header in rings.items():
        try:
            offsets[key] = real_offset_ns(header["clockPairs"])
        except (LookupError, TypeError, ValueError):
            offsets[key] = 0
    return offsets


def set_offsets(rows: Rows, readings: list[StepOffsets], own: Mapping[RingKey, int]) -> None:
    """Write the clock of every row: that of the newest reading up to its step, or of the first one.

    `own` is for rows of ranks and workers without readings.
    """
    world = len(readings[-1][1]) if readings else 0
    readings = [reading for reading in readings if len(reading[1]) == world]
    rank, worker = rows["rank"].astype(np.int64), rows["worker"].astype(np.int64)
    is_known = (rank >= 0) & (rank < world)
    if is_known.any():
        steps = np.array([step for step, _ in readings], np.int64)
        table = np.stack([offsets for _, offsets in readings])
        place = np.maximum(np.searchsorted(steps, rows["step"][is_known].astype(np.int64), side="right") - 1, 0)
        rows["offset_ns"][is_known] = table[place, rank[is_known]]
    left = np.flatnonzero(~is_known)
    ring = (rank[left] << 32) | worker[left]
    for number in np.unique(ring).tolist():
        key = (number & 0xFFFF_FFFF, None if number >> 32 == NO_RANK else number >> 32)
        # Counters of a worker have the clock of its ranks.
        ranks = [rank for worker, rank in own if worker == key[0] and rank is not None and rank < world]
        is_worker = key[1] is None and bool(ranks)
        rows["offset_ns"][left[ring == number]] = readings[-1][1][min(ranks)] if is_worker else own.get(key, 0)
