"""Outcomes of a long benchmark in a file, so that a run that was ended continues where it was."""

import gzip
import hashlib
import pathlib
import pickle
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from detect.runner import DetectionOutcome
from detect.suite import DetectionCase

Key = tuple[str, str, int, int]


GZIP = 16 + zlib.MAX_WBITS
"""Window bits with which zlib reads members of gzip."""
CHUNK = 1 << 16


class OutcomeFile:
    """Outcomes of cases that have been run, each appended to a gzip file as it ends.

    All are of one version of the code: rates over several versions would be those of none.
    """

    def __init__(self, path: pathlib.Path, version: str) -> None:
        """Read what is there. Raises ValueError where another version, or another program, has begun the file."""
        self._stream: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        try:
            self.outcomes, end = _stored(self._stream, path, version)
        except ValueError:
            self._stream.close()
            raise
        self._stream.truncate(end)  # an outcome that was being written when the run ended
        self._stream.seek(end)
        if not end:
            self._append(version.encode())

    def add(self, outcome: DetectionOutcome) -> None:
        """Append an outcome to the file."""
        self.outcomes[key_of(outcome.case)] = outcome
        self._append(pickle.dumps(outcome))

    def close(self) -> None:
        """Close the file; its outcomes stay readable."""
        self._stream.close()

    def _append(self, content: bytes) -> None:
        self._stream.write(gzip.compress(content))
        self._stream.flush()


def outcomes_in(path: pathlib.Path, version: str) -> dict[Key, DetectionOutcome]:
    """Return the complete outcomes of a file, such as another part of a run, which may be going on.

    Raises ValueError where another version, or another program, has begun the file, and OSError without it.
    """
    with path.open("rb") as stream:
        return _stored(stream, path, version)[0]


def _stored(stream: BinaryIO, path: pathlib.Path, version: str) -> tuple[dict[Key, DetectionOutcome], int]:
    """Return the complete outcomes of a stream, and the position at which they end; 0 in an empty one."""
    outcomes: dict[Key, DetectionOutcome] = {}
    end = 0
    for number, (content, end_of_member) in enumerate(_members(stream)):
        if number:
            outcome: DetectionOutcome = pickle.loads(content)
            outcomes[key_of(outcome.case)] = outcome
        elif (begun_by := content.decode()) != version:
            raise ValueError(
                f"{path} has outcomes of version {begun_by}, and the code is {version}; write another file"
            )
        end = end_of_member
    if not end and stream.seek(0, 2):
        raise ValueError(f"{path} is not a file of outcomes; write another file")
    return outcomes, end


def key_of(case: DetectionCase) -> Key:
    """Return what makes a case one of its row."""
    return case.row, case.layout, case.seed, case.steps


def version_of(folders: Iterable[pathlib.Path], options: str) -> str:
    """Return a digest of the Python and C++ files in folders, and of the options that outcomes depend on."""
    digest = hashlib.sha256(options.encode())
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".hpp"}):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _members(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the content of each complete member of a gzip file, and the position in the file at which it ends."""
    reader, parts, position = zlib.decompressobj(GZIP), list[bytes](), 0
    while chunk := stream.read(CHUNK):
        while chunk:
            try:
                parts.append(reader.decompress(chunk))
            except zlib.error:
                return
            position += len(chunk) - len(reader.unused_data)
            chunk = reader.unused_data
            if reader.eof:
                yield b"".join(parts), position
                reader, parts = zlib.decompressobj(GZIP), []
