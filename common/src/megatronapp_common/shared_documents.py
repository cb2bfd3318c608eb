"""Small JSON documents in shared memory: one writer, many readers, no process blocks.

The writer counts a sequence number up to odd, writes, and counts it to even; a reader takes the document only if the
number was even and unchanged and the checksum agrees, so a torn document is never returned.
"""

import contextlib
import json
import mmap
import os
import pathlib
import struct
import zlib
from typing import Any

from megatronapp_common.errors import DocumentError

DOCUMENT_BYTES = 16384
_HEAD = struct.Struct("<QII")  # sequence number, length, crc32
_SEQUENCE = struct.Struct("<Q")
MAX_JSON_BYTES = DOCUMENT_BYTES - _HEAD.size
"""Bytes of JSON that fit."""


class DocumentWriter:
    """Writer that creates the file (mode 0640), or replaces a dead writer. Raises DocumentError if it does not fit.

    An existing file is never truncated: a reader that has mapped it would die of SIGBUS. Its document stays until the
    first write, and its sequence number continues, so that readers notice that write.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.posix_fallocate(fd, 0, DOCUMENT_BYTES)
                self._map = mmap.mmap(fd, DOCUMENT_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise DocumentError(f"{path}: cannot create a document of {DOCUMENT_BYTES} bytes: {error}") from error
        left: int = _SEQUENCE.unpack_from(self._map, 0)[0]
        self._sequence = left + left % 2  # odd: its writer died within a write

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document. Raises DocumentError if its JSON does not fit."""
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) > MAX_JSON_BYTES:
            raise DocumentError(f"{self._path}: document of {len(data)} bytes does not fit into {MAX_JSON_BYTES}")
        _SEQUENCE.pack_into(self._map, 0, self._sequence + 1)
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, self._sequence + 1, len(data), zlib.crc32(data))
        self._sequence += 2
        _SEQUENCE.pack_into(self._map, 0, self._sequence)

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the file, and remove it if `unlink` is true."""
        self._map.close()
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


class DocumentReader:
    """Reader of a document that may appear later, be replaced, or vanish."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._file = (0, 0)
        """Device and number of the mapped file."""
        self._seen = 0

    def map(self) -> bool:
        """Map the file that is there now: its document can then be read also once the file is removed.

        Returns whether a file is mapped. Raises DocumentError if it cannot be mapped.
        """
        try:
            found = self._path.stat()
        except OSError:
            return self._map is not None
        if self._map is not None and (found.st_dev, found.st_ino) != self._file:
            self.close()
            self._seen = 0
        return self._map is not None or self._open()

    def read(self) -> dict[str, Any] | None:
        """Return the document; None before the first write and during a write."""
        if self._map is None and not self._open():
            return None
        assert self._map is not None
        sequence, length, crc = _HEAD.unpack_from(self._map, 0)
        if sequence == 0 or sequence % 2 or length > DOCUMENT_BYTES - _HEAD.size:
            return None
        data = self._map[_HEAD.size : _HEAD.size + length]
        if _SEQUENCE.unpack_from(self._map, 0)[0] != sequence or zlib.crc32(data) != crc:
            return None
        self._seen = sequence
        document: dict[str, Any] = json.loads(data)
        return document

    def read_new(self) -> dict[str, Any] | None:
        """Return the document if it changed since the last successful read; an unchanged one costs an 8-byte load."""
        if self._map is not None and _SEQUENCE.unpack_from(self._map, 0)[0] == self._seen:
            return None
        return self.read()

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _open(self) -> bool:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size < DOCUMENT_BYTES:
                    return False
                self._file = (found.st_dev, found.st_ino)
                self._map = mmap.mmap(file.fileno(), DOCUMENT_BYTES, prot=mmap.PROT_READ)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DocumentError(f"{self._path}: cannot map the page: {error}") from error
        return True
