"""Lock that shows whether a job's backend lives. The kernel releases it with the process, however that ends."""

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator

from megatronapp_common.processes import is_locked
from megatronapp_operator.errors import JobConflictError

PATIENCE_S = 1.0
"""Seconds that `hold` waits for another holder: a process that cleans up, or a backend, which will not release it."""
PROBE_PATIENCE_S = 30.0
"""Seconds that `hold` waits for callers of `is_locked`, which release at once but may have to wait for a processor."""
POLL_S = 0.01


@contextlib.contextmanager
def hold(path: pathlib.Path) -> Iterator[None]:
    """Hold the lock. Raises JobConflictError if another process does."""
    fd = _take(path)
    try:
        yield
    finally:
        os.close(fd)


def _take(path: pathlib.Path) -> int:
    """Return a locked descriptor of the file that has this name *now*.

    The file may be deleted between opening and locking.
    """
    began = time.monotonic()
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError as error:
            if time.monotonic() - began > (PATIENCE_S if is_locked(path) else PROBE_PATIENCE_S):
                os.close(fd)
                name = path.parent.name
                raise JobConflictError(f"{name}: another megatronapp process uses this job") from error
            time.sleep(POLL_S)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(fd)
