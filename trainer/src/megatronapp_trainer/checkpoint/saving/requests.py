"""Messages between a rank and the process that writes its part of checkpoints.

A request is a pickle in shared memory; the connection carries its length alone, so that sending never waits for a
writer that is busy or still starts. A reply is sent through the connection.
"""

import os
import pathlib
import pickle
from dataclasses import dataclass
from typing import Any

from megatronapp_trainer.checkpoint.saving.files import Publication, RankDataFile


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginRequest:
    """Create the folder of a checkpoint."""

    publication: Publication


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """Write the data file of this rank from the shared memory."""

    folder: pathlib.Path
    rank: int
    layout: bytes
    """Pickle of the items and of the places of their tensors in the memory; the same for all checkpoints of a run."""
    memory_bytes: int
    objects: list[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishRequest:
    """Publish a checkpoint whose data files are all on the disk."""

    publication: Publication
    common: bytes
    plan: bytes
    """Pickle of the items of all ranks."""
    files: list[RankDataFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscardRequest:
    """Delete what was written of a checkpoint that has failed."""

    folder: pathlib.Path


Request = BeginRequest | DiscardRequest | WriteRequest | PublishRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Result of a request."""

    value: Any = None
    error: str | None = None
    is_superseded: bool = False
    """True if another claim owns the directory."""
    seconds: float = 0.0


def store(descriptor: int, request: Request) -> int:
    """Write a request to shared memory in place of the former one; return its length in bytes."""
    content = memoryview(pickle.dumps(request))
    os.ftruncate(descriptor, 0)
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], written)
    return written


def fetch(descriptor: int, length: int) -> Request:
    """Read the request of this length."""
    parts, place = [], 0
    while place < length:
        parts.append(os.pread(descriptor, length - place, place))
        place += len(parts[-1])
    request: Request = pickle.loads(b"".join(parts))
    return request
