"""Files that are written whole or not at all."""

import os
import pathlib


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
    """Bring the names in a directory to the disk, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
