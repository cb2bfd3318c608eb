"""The archive of a large job: records a second that are moved to it, their size, and the time to open an old step.

    python bench/bench_archive.py               # 1,024 ranks, 120 steps: an hour with steps of 30 s; 2 GB of disk
    python bench/bench_archive.py --steps 10

Durations of spans vary by 5 % and starts by 20 us, by a fixed seed. `moved` is the processor time of the whole process
while its thread moves segments: reading, decoding, sorting, encoding, writing. The step that is opened is the first
one, by a fresh reader: footers of all files, rows of the step, and the part of its timeline that a page shows first.
"""

import argparse
import asyncio
import pathlib
import resource
import sys
import tempfile
import time

import bench_hub
import numpy as np
from bench_ingest import PIPELINE, TENSOR, bodies, encoded_frame, ring_header

from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.archive.history import StepHistory
from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.http.timeline.schemas import TimelineQuery
from megatronapp_analyzer.hub.http.timeline.views import timeline_part
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolWriter
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.timeline.columns import columns_of
from megatronapp_common.frames import Frame, FrameType, encode
from megatronapp_common.trace import RECORD

LIMITS = SpoolLimits(total_bytes=1 << 40, archive_bytes=1 << 40)
VARIATION, JITTER_NS = 0.05, 20_000
PIXELS, TRACKS = 1600, 140
MIB = 1 << 20


def varied(body: bytes, random: np.random.Generator) -> bytes:
    """Return the records of a rank with other durations and starts than those of its stage."""
    records = np.frombuffer(body, RECORD).copy()
    factor = 1 + VARIATION * random.standard_normal(len(records))
    records["duration"] = (records["duration"] * np.maximum(factor, 0)).astype(np.uint32)
    records["start_ns"] += random.integers(0, JITTER_NS, len(records)).astype(np.uint64)
    return records.tobytes()


def spool(folder: pathlib.Path, data: int, steps: int, microbatches: int) -> tuple[int, int]:
    """Write steps into the spool; return the number of records and the bytes of their segments."""
    bench_hub.PIPELINE, bench_hub.MICROBATCHES = PIPELINE, microbatches
    world, stage_size = TENSOR * PIPELINE * data, TENSOR * data
    load = bench_hub.Load(agents=world, steps_per_s=0.2, seconds=0)
    templates = [bench_hub.template(stage * stage_size, load) for stage in range(PIPELINE)]
    random = np.random.default_rng(1)
    writer = SpoolWriter(folder, LIMITS)
    for rank in range(world):
        writer.append_ring(0, encode(Frame(FrameType.RING, ring_header(rank, data))))
    for step in range(steps):
        found = bodies(templates, step)
        for rank in range(world):
            writer.append_records(0, encoded_frame(rank, step, varied(found[rank // stage_size], random)))
    writer.close()
    size = sum(path.stat().st_size for path in folder.glob("*/records-*.frames"))
    return steps * stage_size * sum(map(len, templates)), size


def move(folder: pathlib.Path, records: int) -> int:
    """Move all segments to the archive; return its bytes."""
    catalog = Catalog(folder / "store" / "bench", limit_bytes=LIMITS.archive_bytes, writable=True)
    archiver = Archiver(folder / "traces", catalog)
    begun_s, cpu_s = time.monotonic(), time.process_time()
    archiver.start()
    archiver.wait_until_idle()
    wall_s, cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_s
    archiver.close(60)
    assert archiver.records == records, f"{archiver.records} of {records} records moved"
    print(f"moved: {records / cpu_s / 1e6:.2f} million records a second of processor time, {wall_s:.1f} s in all")
    print(f"files: {len(catalog.files())}, {catalog.bytes / MIB:.0f} MiB")
    return catalog.bytes


async def open_step(folder: pathlib.Path) -> None:
    """Open the first step as a hub does that has been started again, and print what each part takes."""
    ingest = TraceIngest(StoreLimits(full_steps=1), aligns=False)
    spooled = SpooledIngest(ingest, folder / "traces", LIMITS, archive=folder / "store" / "bench", writable=False)
    before = time.monotonic()
    spooled.restore(1)
    started = time.monotonic()
    history = StepHistory(ingest, spooled)
    found = await history.find(0, 0)
    read = time.monotonic()
    assert found is not None
    assert found.omitted is None
    [step], layout = found.steps, ingest.attempts[0].layout
    query = TimelineQuery(step=0, pixels=PIXELS, tracks=TRACKS)
    part = timeline_part(step, layout, columns_of(step, layout), query, PIXELS).model_dump_json(by_alias=True)
    drawn = time.monotonic()
    print(f"start of a reader, footers of all files and the newest segment: {started - before:.2f} s")
    print(f"rows of the first step, {len(step.view.records):,} records: {1000 * (read - started):.0f} ms")
    print(f"its timeline of {TRACKS} ranks, {len(part) / MIB:.1f} MiB of JSON: {1000 * (drawn - read):.0f} ms")
    history.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=8, help="data-parallel size, 128 ranks each (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=41, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps to store (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        records, raw = spool(folder / "traces", options.data, options.steps, options.microbatches)
        print(f"{TENSOR * PIPELINE * options.data} ranks, {options.steps} steps, {records / 1e6:.1f} million records")
        stored = move(folder, records)
        print(f"bytes of a record: {raw / records:.1f} in the spool, {stored / records:.1f} in the archive")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        asyncio.run(open_step(folder))
        print(f"largest memory: {before >> 10} MiB up to the move, {_largest_mib()} MiB at the end")
    return 0


def _largest_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    sys.exit(main())
