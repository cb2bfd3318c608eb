"""Free space of the folder of shared memory, which has the rings and documents."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

LEAST_BYTES = 4 << 20
"""Space for a ring of the usual length and the documents of a worker; with less, another one does not fit."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemorySpace:
    """Size and free space of a file system."""

    path: str
    total: int
    free: int

    @classmethod
    def measure(cls, folder: pathlib.Path) -> Self | None:
        """Measure a folder's file system; return None where that is impossible."""
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return cls(path=str(folder), total=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read the document of `to_json`. Raises KeyError, TypeError or ValueError for any other one."""
        return cls(path=str(document["path"]), total=int(document["bytes"]), free=int(document["freeBytes"]))

    def to_json(self) -> dict[str, Any]:
        """Return the document that agents and hubs exchange."""
        return {"path": self.path, "bytes": self.total, "freeBytes": self.free}

    @property
    def full(self) -> bool:
        """True if another ring may not fit."""
        return self.free < LEAST_BYTES

    def __str__(self) -> str:
        """Describe a full file system; the text is independent of the bytes left."""
        return f"{self.path} ({self.total // MIB} MiB) has less than {LEAST_BYTES // MIB} MiB free"
