"""Files of a checkpoint in memory: the state of one rank at a step. Files and numbers only, no process group.

    PREFIX.rank3-own-a.tmp              being written, or free for the next save
    PREFIX.rank3-step20-9f86d081.part   whole, because it got this name last

A file has the bytes of the state first, as long as the slot's capacity, then its header as JSON, and a trailer of a
fixed length, so that its size never changes: the space of a save is reserved once, before training.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import re
import struct
import zlib
from dataclasses import dataclass

import torch

from megatronapp_trainer.checkpoint.checksums import BLOCK_BYTES, BlockChecksums

PART_SUFFIX = ".part"
DRAFT_SUFFIX = ".tmp"
_TRAILER = struct.Struct("<8sQQI")
"""Magic, capacity, length of the header, and its CRC-32."""
_MAGIC = b"mgappmem"
_HEADER_BYTES = 4096
_NAME = re.compile(r".*\.rank(\d+)-step(\d+)-([0-9a-f]+)\.part")


class BrokenPartError(Exception):
    """A file in memory is not whole; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """Description of a rank's state at a step."""

    step: int
    save: str
    """Token of the save: parts of different saves never belong together."""
    rank: int
    world: int
    flags: str
    """Digest of the flags that the state depends on."""
    payload_bytes: int
    objects: tuple[int, int]
    """First byte and length of the pickled objects; tensors are before them."""
    checksum: str
    """Checksum of the payload, as in the manifest of a checkpoint."""


def part_name(header: PartHeader) -> str:
    """Return the name of a whole file, without the prefix."""
    return f"rank{header.rank}-step{header.step}-{header.save}{PART_SUFFIX}"


def file_bytes(capacity: int) -> int:
    """Return the size of a file whose payload has this many bytes at most."""
    blocks = capacity // BLOCK_BYTES + 1
    return capacity + _HEADER_BYTES + 16 * blocks + _TRAILER.size


def read_header(path: pathlib.Path) -> PartHeader:
    """Read the header of a file, not its payload.

    Raises:
        BrokenPartError: it is not whole, or another program's.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - _TRAILER.size))
            magic, capacity, length, checksum = _TRAILER.unpack(stream.read(_TRAILER.size))
            if magic != _MAGIC or file_bytes(capacity) != size:
                raise BrokenPartError("it is shorter or longer than it was written")
            stream.seek(capacity)
            content = stream.read(min(length, size))
    except (OSError, struct.error) as error:
        raise BrokenPartError(f"it cannot be read ({error})") from error
    if zlib.crc32(content) != checksum:
        raise BrokenPartError("its header is damaged")
    with contextlib.suppress(ValueError, TypeError):
        stored = json.loads(content)
        return PartHeader(**{**stored, "objects": tuple(stored["objects"])})
    raise BrokenPartError("its header is that of another version")


def parts_of(directory: pathlib.Path, prefix: str) -> list[pathlib.Path]:
    """Return the whole files of a worker, sorted by name, without those of other users."""
    found = [path for path in directory.glob(f"{prefix}.rank*{PART_SUFFIX}") if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if _is_own(path))


def _is_own(path: pathlib.Path) -> bool:
    """Return True if this user owns the file: the payload holds pickles, which no other user may have written."""
    try:
        return path.lstat().st_uid == os.geteuid() and not path.is_symlink()
    except FileNotFoundError:
        return False


class MappedPart:
    """A file of this worker, mapped: a slot for saves, or what is read."""

    def __init__(self, path: pathlib.Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size)
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)
        """All bytes of the file."""

    @classmethod
    def open(cls, path: pathlib.Path) -> "MappedPart":
        """Map a file as it is. Raises OSError."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))

    @classmethod
    def create(cls, path: pathlib.Path, size: int) -> "MappedPart":
        """Create a file with all its space. Raises OSError, and leaves no file, if the memory is too small."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return cls(path, descriptor)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.content.numel()

    def rename(self, path: pathlib.Path) -> None:
        """Give the file another name, in place of a file that has it."""
        self.path.rename(path)
        self.path = path

    def write_header(self, header: PartHeader, capacity: int) -> None:
        """Complete a file whose payload is written."""
        content = json.dumps(dataclasses.asdict(header)).encode()
        os.pwrite(self._descriptor, content, capacity)
        trailer = _TRAILER.pack(_MAGIC, capacity, len(content), zlib.crc32(content))
        os.pwrite(self._descriptor, trailer, self.size - _TRAILER.size)

    def erase_header(self) -> None:
        """Let the file be no whole part under any name."""
        os.pwrite(self._descriptor, bytes(_TRAILER.size), self.size - _TRAILER.size)

    def checksum(self, payload_bytes: int) -> str:
        """Compute the checksum of the payload; the lock of Python is free most of the time."""
        sums = BlockChecksums(BLOCK_BYTES)
        with memoryview(self._map) as whole, whole[:payload_bytes] as payload:
            sums.update(payload)
        return sums.text()

    def close(self) -> None:
        """Close the file; its mapping stays as long as a tensor uses it."""
        os.close(self._descriptor)
