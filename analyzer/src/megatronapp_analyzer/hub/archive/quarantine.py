"""Files that the archive could not read, out of the way of all readers: a small number, of bounded size."""

import contextlib
import logging
import os
import pathlib

LOG = logging.getLogger(__name__)
MAX_FILES = 4
"""Number of files in quarantine; the newest are retained."""
PART = 8
"""Part of the archive's bytes that they may have: an eighth. The newest file stays even if it is larger."""


class Quarantine:
    """Folder of unreadable files. Its bytes are part of the archive's."""

    def __init__(self, folder: pathlib.Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes // PART

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(size for _, size in self._files())

    def take(self, path: pathlib.Path) -> None:
        """Move a file here. What cannot be moved stays, and is logged."""
        target = self._folder / f"{path.parent.name}-{path.name}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
        except OSError as error:
            LOG.error("%s cannot be moved to %s: %s", path, self._folder, error)
        else:
            LOG.error("%s was moved to %s", path, target)
            self.bound()

    def bound(self) -> None:
        """Delete the oldest files beyond the limits."""
        found = self._files()
        while len(found) > MAX_FILES or (len(found) > 1 and sum(size for _, size in found) > self._limit_bytes):
            self._delete(found.pop(0)[0])

    def clear(self) -> int:
        """Delete all files; return their bytes."""
        found = self._files()
        for path, _ in found:
            self._delete(path)
        return sum(size for _, size in found)

    def _delete(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
            LOG.info("%s was deleted for space", path)

    def _files(self) -> list[tuple[pathlib.Path, int]]:
        """Return the files and their sizes, oldest first."""
        found: list[tuple[int, pathlib.Path, int]] = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, pathlib.Path(entry.path), status.st_size))
        return [(path, size) for _, path, size in sorted(found)]
