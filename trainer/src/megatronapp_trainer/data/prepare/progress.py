"""Progress of a preparation: a bar on a terminal, otherwise (in a pod, in a log file) a line on stderr at intervals."""

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
    """Yield a function that counts bytes of input read; lines are printed in its calls, so it must be called often."""
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
        self._clock, self._reported_s = clock, clock()

    def advance(self, size_bytes: int) -> None:
        """Print a line if the last one is old enough."""
        self._done_bytes += size_bytes
        if (now := self._clock()) - self._reported_s >= LINE_INTERVAL_S:
            self._reported_s = now
            fraction = self._done_bytes / max(self._total_bytes, 1)
            done, total = self._done_bytes / 2**20, self._total_bytes / 2**20
            print(f"{self._title}: {done:,.1f} of {total:,.1f} MiB ({fraction:.0%})", file=sys.stderr, flush=True)
