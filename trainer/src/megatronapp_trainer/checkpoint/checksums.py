"""Checksums of a checkpoint's files: computed while a file is written, and compared by all ranks before it is read.

A checksum is a text in the manifest. `crc32/67108864:1c291ca3 ffffffff` lists the CRC-32 of each block of 64 MiB in
order, the last one shorter, so that ranks and threads can verify parts of one large file and damage has a place in it.
Earlier releases wrote `crc32:1c291ca3`, of a whole file, which is read, too. The files themselves have no other format.
"""

import functools
import io
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatronapp_trainer.utils.atomic_files import retry_transient_errors

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 64 << 20
THREADS = 4
"""Number of reading threads of one rank. zlib and the system calls run without Python's lock."""
_READ_BYTES = 8 << 20
_CHECKSUM = re.compile(r"crc32(?:/([1-9]\d*))?:([0-9a-f]{8}(?: [0-9a-f]{8})*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """Size and checksum of a file that has been synced."""

    size: int
    checksum: str


class BlockChecksums:
    """The checksum of a stream of bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._current = 0
        self._bytes_left = block_bytes

    def update(self, data: "ReadableBuffer") -> None:
        """Continue the checksum with these bytes."""
        rest = memoryview(data).cast("B")
        while len(rest) > 0:
            if self._bytes_left == 0:
                self._done.append(self._current)
                self._current, self._bytes_left = 0, self._block_bytes
            part, rest = rest[: self._bytes_left], rest[self._bytes_left :]
            self._current = zlib.crc32(part, self._current)
            self._bytes_left -= len(part)

    def text(self) -> str:
        """Return the checksum of all bytes so far; no bytes are one empty block."""
        return f"crc32/{self._block_bytes}:" + " ".join(f"{value:08x}" for value in [*self._done, self._current])


class ChecksummedFile(io.BufferedWriter):
    """A new file that is written sequentially, and synced to disk when it is closed."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sums = BlockChecksums(BLOCK_BYTES)
        self._size = 0

    def write(self, data: "ReadableBuffer") -> int:
        written = super().write(data)
        self._sums.update(data)
        self._size += written
        return written

    def seek(self, target: int, whence: int = io.SEEK_SET) -> int:
        """Refuse: the checksum requires bytes in order."""
        raise io.UnsupportedOperation("seek")

    def close(self) -> None:
        """Flush the buffer, sync the content to disk, and close."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    def written(self) -> WrittenFile:
        """Return size and checksum of the written content."""
        return WrittenFile(size=self._size, checksum=self._sums.text())


def checksum_of(path: pathlib.Path) -> str:
    """Compute the checksum of an existing file."""
    sums = BlockChecksums(BLOCK_BYTES)
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_READ_BYTES):
            sums.update(chunk)
    return sums.text()


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileBlock:
    """A block of a file and the checksum that it must have."""

    file: str
    offset: int
    end: int | None
    """First byte after the block; None: the last block, which ends with the file."""
    expected: int


Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""Byte ranges by file name, each from its first byte to the one after its last."""


def first_damage(
    folder: pathlib.Path,
    checksums: Mapping[str, str],
    *,
    within: Ranges | None = None,
    part: int = 0,
    parts: int = 1,
    threads: int = THREADS,
) -> str | None:
    """Describe the first damaged block of one part of all blocks; None if all are whole.

    The blocks of all files are one sequence, which is divided into `parts` parts, for each rank to read another one.
    With `within` only blocks that overlap these ranges are read.
    """
    try:
        blocks = [block for name in sorted(checksums) for block in _blocks(name, checksums[name])]
    except ValueError as error:
        return str(error)
    if within is not None:
        blocks = [block for block in blocks if _touches(block, within.get(block.file, ()))]
    blocks_of_part = blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]
    with ThreadPoolExecutor(threads, thread_name_prefix="checksums") as pool:
        flaws = (flaw for flaw in pool.map(functools.partial(_flaw, folder), blocks_of_part) if flaw is not None)
        flaw = next(flaws, None)
        pool.shutdown(wait=True, cancel_futures=True)
    return flaw


def has_blocks(checksum: str) -> bool:
    """Return True if a file with this checksum can be verified in part."""
    return checksum.startswith("crc32/")


def _touches(block: _FileBlock, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(end > block.offset and (block.end is None or start < block.end) for start, end in ranges)


def _blocks(name: str, checksum: str) -> Iterator[_FileBlock]:
    match = _CHECKSUM.fullmatch(checksum)
    if match is None:
        raise ValueError(
            f"the checksum of its file {name} is of a kind that this version does not know: {checksum:.40}"
        )
    values = match[2].split()
    if match[1] is None and len(values) > 1:
        raise ValueError(f"the checksum of its file {name} has {len(values)} values instead of one")
    block_bytes = int(match[1] or 0)
    for index, value in enumerate(values):
        last = index == len(values) - 1
        yield _FileBlock(
            file=name,
            offset=index * block_bytes,
            end=None if last else (index + 1) * block_bytes,
            expected=int(value, 16),
        )


def _flaw(folder: pathlib.Path, block: _FileBlock) -> str | None:
    try:
        found = retry_transient_errors(lambda: _crc32(folder / block.file, block))
    except OSError as error:
        return f"its file {block.file} cannot be read ({error.strerror})"
    if found == block.expected:
        return None
    until = "its end" if block.end is None else f"byte {block.end}"
    return (
        f"its file {block.file} is damaged from byte {block.offset} to {until}: the checksum there is {found:08x}, not "
        f"{block.expected:08x}"
    )


def _crc32(path: pathlib.Path, block: _FileBlock) -> int:
    value, place = 0, block.offset
    with path.open("rb", buffering=0) as stream:
        stream.seek(place)
        while block.end is None or place < block.end:
            chunk = stream.read(_READ_BYTES if block.end is None else min(_READ_BYTES, block.end - place))
            if not chunk:
                break
            value = zlib.crc32(chunk, value)
            place += len(chunk)
    return value
