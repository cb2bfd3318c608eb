"""Atomic writing of files, and reads that outlast a short fault of a network file system."""

import errno
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_TRANSIENT = frozenset({errno.ESTALE, errno.EIO})
PAUSES_S = (0.1, 0.4, 1.5, 4.0)
"""Seconds between the tries of `retry_transient_errors`."""


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old content or the new, whole, even after a crash.

    Raises:
        OSError: it could not be written; the old content stays and no temporary file is left.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(path: pathlib.Path) -> None:
    """Sync the names in a directory to the disk, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: pathlib.Path) -> None:
    """Sync the content of a file to the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def retry_transient_errors(work: Callable[[], T], *, pauses_s: Sequence[float] = PAUSES_S) -> T:
    """Run `work`, again after a pause where a file system fails for a moment (ESTALE and EIO of NFS).

    Raises:
        OSError: any other error at once; one of these two after the last try.
    """
    for pause_s in pauses_s:
        try:
            return work()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
        time.sleep(pause_s)
    return work()
