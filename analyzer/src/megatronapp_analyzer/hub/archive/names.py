"""Names of the archive's files and folders.

<store>/<job>/<hour>/records-a<attempt>-<segment>.parquet   records of one segment of the spool
                     rings-a<attempt>.parquet               rings that they are from
<store>/<job>/quarantine/                                   files that cannot be read
"""

import datetime
import pathlib
import re
from collections.abc import Iterator

HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
RECORDS = re.compile(r"records-a(\d+)-(\d+)\.parquet")
RINGS = re.compile(r"rings-a(\d+)\.parquet")
QUARANTINE = "quarantine"
UNFINISHED = ".unfinished"
"""Suffix of files that are being written."""
HOUR_NS = 3_600_000_000_000
_LATEST_S = 253_402_300_799
"""Real time at the end of the year 9999."""


def hour_of(real_ns: int) -> str:
    """Return the name of an hour, in UTC, from nanoseconds since 1970; of garbled clocks the nearest that has one."""
    seconds = min(max(real_ns // 10**9, 0), _LATEST_S)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H")


def records_name(attempt: int, segment: int) -> str:
    """Return the name of the file with the records of a segment."""
    return f"records-a{attempt:04d}-{segment:06d}.parquet"


def rings_name(attempt: int) -> str:
    """Return the name of the file with the rings of an attempt."""
    return f"rings-a{attempt:04d}.parquet"


def hour_folders(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the folders of hours in the folder of a job, oldest first."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if HOUR.fullmatch(path.name) and path.is_dir())


def records_files(folder: pathlib.Path) -> Iterator[tuple[int, int, pathlib.Path]]:
    """Yield attempt, segment and path of the files with records in the folder of an hour, in order."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return
    found = [(match, path) for path in paths if (match := RECORDS.fullmatch(path.name))]
    yield from sorted((int(match[1]), int(match[2]), path) for match, path in found)
