"""Room in the folder of shared memory, where rings and pages lie."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

LEAST_BYTES = 4 << 20
"""A ring of the usual length and the pages of a worker; with less left, the next one to be made does not fit."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemorySpace:
    """Size of a file system and what is left of it."""

    path: str
    total: int
    free: int

    @classmethod
    def measure(cls, folder: pathlib.Path) -> Self | None:
        """The room of a folder's file system; None where that cannot be known."""
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return cls(path=str(folder), total=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for what is no such document."""
        return cls(path=str(document["path"]), total=int(document["bytes"]), free=int(document["freeBytes"]))

    def to_json(self) -> dict[str, Any]:
        """As agents and hubs send it."""
        return {"path": self.path, "bytes": self.total, "freeBytes": self.free}

    @property
    def full(self) -> bool:
        """True if another ring may not fit."""
        return self.free < LEAST_BYTES

    def __str__(self) -> str:
        """For a sentence about one that is full; the same text however little is left."""
        return f"{self.path} ({self.total // MIB} MiB) has less than {LEAST_BYTES // MIB} MiB free"
