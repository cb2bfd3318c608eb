"""How far a preparation is: a bar on a terminal, else (in a pod, in a log file) now and then a line on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
Clock = Callable[[], float]


@contextlib.contextmanager
def progress(
    title: str, *, total_bytes: int, done_bytes: int, clock: Clock = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Gives a function to tell of bytes of input that are read; lines come with its calls, so they must come often."""
    if sys.stderr.isatty():
        with tqdm(total=total_bytes, initial=done_bytes, desc=title, unit="B", unit_scale=True) as bar:

            def advance(size_bytes: int) -> None:
                bar.update(size_bytes)

            yield advance
    else:
        yield _LineProgress(title, total_bytes, done_bytes, clock).advance


class _LineProgress:
    def __init__(self, title: str, total_bytes: int, done_bytes: int, clock: Clock) -> None:
        self._title, self._total_bytes, self._done_bytes = title, total_bytes, done_bytes
        self._clock, self._told_s = clock, clock()

    def advance(self, size_bytes: int) -> None:
        """A line where the last is long ago."""
        self._done_bytes += size_bytes
        if (now := self._clock()) - self._told_s >= LINE_INTERVAL_S:
            self._told_s = now
            share = self._done_bytes / max(self._total_bytes, 1)
            done, total = self._done_bytes / 2**20, self._total_bytes / 2**20
            print(f"{self._title}: {done:,.1f} of {total:,.1f} MiB ({share:.0%})", file=sys.stderr, flush=True)
