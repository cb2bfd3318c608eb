"""Repeats the lines of rank logs at this process's stdout, each behind `[rank N] `.

Ranks write to files, so that a slow stdout holds none of them up, and the last lines of one that was killed are still
there to be read.
"""

import os
import pathlib
import threading
from collections.abc import Iterator, Mapping

POLL_S = 0.1
LONGEST_LINE = 16384
"""Bytes after which a line is broken; container runtimes do it here, too."""
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
        """What came since the last call, in whole lines with their prefix; `last`: also an unfinished one."""
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
        except OSError:  # the disk is gone; the rank will say so by itself
            return b""
        self._offset += len(data)
        return data


class LogRelay:
    """Follows logs in a thread of its own; context manager. At its end it has repeated all that is in them.

    Writes to the file descriptor itself: at the end of an interpreter a buffered stdout that a stuck thread holds
    locked would abort the process.
    """

    def __init__(self, descriptor: int, logs: Mapping[int, pathlib.Path]) -> None:
        self._descriptor = descriptor
        self._followers = [LogFollower(rank, path) for rank, path in logs.items()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)

    def __enter__(self) -> "LogRelay":
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Wait until all is repeated, but not for ever for a stdout that takes nothing."""
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
        except OSError:  # nobody reads stdout any more
            return

    def _repeat(self) -> bool:
        """Whether there was anything."""
        return any([self._write(follower.lines()) for follower in self._followers])

    def _write(self, lines: Iterator[bytes]) -> bool:
        anything = False
        for line in lines:
            anything = True
            rest = line
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return anything
