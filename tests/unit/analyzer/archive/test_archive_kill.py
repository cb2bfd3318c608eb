"""Hubs that are killed at any moment of the move to the archive lose no stored record, and store none twice."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import killed_writer
import numpy as np
import pytest
from spooled_job import SpooledJob, all_rows, identities, sent_rows

from megatronapp_analyzer.hub.archive.rows import rank_records

SENT_AGAIN = 3
"""Steps before the last one that agents send again to the next hub."""


@contextlib.contextmanager
def writers() -> Iterator[tuple[IO[str], IO[str]]]:
    """Start the process that forks hubs; yield its standard input and output."""
    command = [sys.executable, killed_writer.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout


def store_until_killed(pipes: tuple[IO[str], IO[str]], folder: Path, first: int, call: int) -> int:
    """Let a hub store steps from `first` on; return the last one that it acknowledged."""
    last = first - 1
    pipes[0].write(f"{folder} {first} {call}\n")
    for line in pipes[1]:
        if line == "end\n":
            return last
        last = int(line)
    pytest.fail("the process of the hubs has ended")


def assert_complete(folder: Path, last: int) -> None:
    """Compare what is stored with what was acknowledged; steps after it may be stored, too."""
    job = SpooledJob(folder, killed_writer.step_rows, killed_writer.ring_header)
    job.settle()
    rows = all_rows(job.stored)
    found = list(identities(rows))
    assert len(set(found)) == len(found)
    for rank in (0, 1):
        mine = rows[rows["rank"] == rank]
        assert mine["index"].tolist() == list(range(len(mine)))
        sent = sent_rows(killed_writer.step_rows, rank, range(last + 1))
        records = rank_records(mine)[: len(sent)]
        assert all(np.array_equal(records[name], sent[name]) for name in sent.dtype.names)
    job.spooled.close()


def run_lives(folder: Path, calls: list[int]) -> None:
    last = -1
    with writers() as pipes:
        for call in calls:
            last = store_until_killed(pipes, folder, max(0, last + 1 - SENT_AGAIN), call)
    assert_complete(folder, last)


def test_killed_hubs_lose_nothing(tmp_path: Path) -> None:
    """Kill before and after each of the calls that move the first segments."""
    run_lives(tmp_path, [*range(2, 24, 2), 3, 9, 15])


@pytest.mark.full("50 lives of a hub")
def test_hubs_that_are_killed_often_lose_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    run_lives(tmp_path, random.integers(2, 80, 50).tolist())
