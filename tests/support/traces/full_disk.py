"""Process of a hub that stores hours of traces on a disk smaller than its limit. Prints what happened as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import killed_writer
from spooled_job import JOB, SpooledJob

from megatronapp_analyzer.hub.archive import names
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits

HOURS = 40
STEPS = 20
"""Number of steps of an hour."""
HOUR_NS = 3_600_000_000_000


def hourly_rows(rank: int, step: int) -> Any:
    """Return the records of a rank in a step."""
    rows = killed_writer.step_rows(rank, step)
    rows["start_ns"] += step // STEPS * HOUR_NS
    return rows


def hours() -> list[str]:
    """Return the names of all hours."""
    start_ns = killed_writer.ring_header(0)["clockPairs"][0][1]
    return [names.hour_of(start_ns + hour * HOUR_NS) for hour in range(HOURS)]


def main(folder: Path) -> None:
    """Store all hours, each before the next begins."""
    job = SpooledJob(folder, hourly_rows, killed_writer.ring_header, SpoolLimits(segment_bytes=4000))
    assert job.spooled.catalog is not None
    assert job.spooled.archiver is not None
    job.announce()
    for hour in range(HOURS):
        job.write(range(hour * STEPS, (hour + 1) * STEPS))
        job.settle()
    job.spooled.close()
    stored = sorted(path.parent.name for path in folder.glob(f"store/{JOB}/*/records-*.parquet"))
    catalog, archiver = job.spooled.catalog, job.spooled.archiver
    print(
        json.dumps(
            {
                "last step": max(job.stored.archived_steps(), default=None),
                "hours": sorted(set(stored)),
                "dropped files": catalog.dropped.files,
                "dropped on disk": Catalog(catalog.folder).dropped.files,
                "failed": archiver.failed_writes,
                "left in the spool": len(list(folder.glob("traces/*/records-*.frames"))),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
