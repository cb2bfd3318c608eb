"""Relay of the rank logs to this process's stdout, each line with the prefix `[rank N] `.

Ranks write to files, so that a slow stdout blocks none of them, and the last lines of a killed rank can still be read.
"""

import os
import pathlib
import threading
from collections.abc import Iterator, Mapping

POLL_S = 0.1
LONGEST_LINE = 16384
"""Bytes after which a line is split, as container runtimes do."""
READ_BYTES = 1 << 20
FINISH_S = 10.0


class LogFollower:
    """Reads one log as it grows."""

    def __init__(self, rank: int, path: pathlib.Path) -> None:
        self._prefix = f"[rank {rank}] ".encode()
        self._path = path
        self._offset = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> Iterator[bytes]:
        """Yield whole new lines with their prefix; with `last` also an unfinished one."""
        data = self._rest + self._read()
        *whole, self._rest = data.split(b"\n")
        if self._rest and (last or len(self._rest) >= LONGEST_LINE):
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            for start in range(0, len(line) or 1, LONGEST_LINE):
                yield self._prefix + line[start : start + LONGEST_LINE] + b"\n"

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:  # the disk failed; the rank will log it
            return b""
        self._offset += len(data)
        return data


class LogRelay:
    """Follows logs in a separate thread; context manager. On exit it has relayed all of their content.

    Writes to the file descriptor itself: at the end of an interpreter a buffered stdout locked by a stuck thread would
    abort the process.
    """

    def __init__(self, descriptor: int, logs: Mapping[int, pathlib.Path]) -> None:
        self._descriptor = descriptor
        self._followers = [LogFollower(rank, path) for rank, path in logs.items()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)

    def __enter__(self) -> "LogRelay":
        """Start the relay thread."""
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Wait until all lines are relayed, for a limited time if stdout is blocked."""
        self._stop.set()
        self._thread.join(FINISH_S)

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._repeat()
            while self._repeat():
                pass
            for follower in self._followers:
                self._write(follower.lines(last=True))
        except OSError:  # the reader of stdout has closed it
            return

    def _repeat(self) -> bool:
        """Relay new lines; returns True if there were any."""
        return any([self._write(follower.lines()) for follower in self._followers])

    def _write(self, lines: Iterator[bytes]) -> bool:
        anything = False
        for line in lines:
            anything = True
            rest = line
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return anything
