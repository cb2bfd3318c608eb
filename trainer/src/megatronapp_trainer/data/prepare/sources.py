"""Input text: files given by name, directories and patterns, split into batches at which a run can resume."""

import enum
import glob
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from megatronapp_trainer.errors import DataError

DEFAULT_PATTERNS = ("*.txt", "*.text", "*.md", "*.rst", "*.jsonl", "*.ndjson", "*.json")
_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
BATCH_BYTES = 1 << 20
CHUNK_BYTES = 4 << 20
READ_BYTES = 256 << 10
_FILES_PER_BATCH = 64


class DocumentFormat(enum.StrEnum):
    """Layout of documents in a file."""

    JSONL = "jsonl"
    """One JSON object per line."""
    TEXT = "text"
    """The file is a document; a file above CHUNK_BYTES is several, which end at line ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input file with its state when the run began."""

    path: str
    format: DocumentFormat
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPosition:
    """Place between two documents: file number, byte in it, lines read of it."""

    file: int = 0
    offset_bytes: int = 0
    line: int = 0


START = InputPosition()


@dataclass(frozen=True, kw_only=True, slots=True)
class InputChunk:
    """Bytes of one file with whole documents. Lines are counted from `first_line`, which is counted from 1."""

    path: str
    format: DocumentFormat
    first_line: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentBatch:
    """Work for one call of a tokenizer, and the position at which reading continues after it."""

    chunks: tuple[InputChunk, ...]
    end: InputPosition

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of text."""
        return sum(len(chunk.payload) for chunk in self.chunks)


def _made_nothing(_path: pathlib.Path) -> bool:
    """Return False: no file is one that the preparation makes."""
    return False


def find_sources(
    inputs: Sequence[str],
    patterns: Sequence[str],
    forced: DocumentFormat | None,
    *,
    made: Callable[[pathlib.Path], bool] = _made_nothing,
) -> list[InputFile]:
    """Return input files in a fixed order, each once.

    A directory is searched recursively for `patterns`; a name with `*`, `?` or `[` is a glob, in which `**` crosses
    directories. Empty files are skipped if they were found by search and refused if they were named; files that the
    preparation has `made` itself are skipped if they were found by search.

    Raises:
        DataError: a named file does not exist or is empty, or no file was found.
    """
    found: dict[str, InputFile] = {}
    for name in inputs:
        for path in _expand(name, patterns, made):
            source = _describe(path, forced)
            if source.size_bytes == 0 and str(path) == name:
                raise DataError(f"{path} is empty; remove it from --input")
            if source.size_bytes > 0:
                found.setdefault(source.path, source)
    if not found:
        raise DataError(f"no text in {', '.join(inputs)}: every file found is empty; give files with text")
    return list(found.values())


def _expand(name: str, patterns: Sequence[str], made: Callable[[pathlib.Path], bool]) -> list[pathlib.Path]:
    path = pathlib.Path(name)
    if path.is_dir():
        matches = sorted({match for pattern in patterns for match in path.rglob(pattern) if match.is_file()})
        advice = (
            f"holds no file that matches {' '.join(patterns)}; choose others with --pattern, such as --pattern '*.py'"
        )
    elif path.is_file():
        return [path]
    elif glob.has_magic(name):
        matches = sorted(
            pathlib.Path(match) for match in glob.glob(name, recursive=True) if pathlib.Path(match).is_file()
        )
        advice = "matches no file; check the pattern"
    else:
        raise DataError(f"input {name} does not exist; give a file, a directory or a quoted pattern")
    matches = [match for match in matches if not made(match)]
    if not matches:
        raise DataError(f"input {name} {advice}")
    return matches


def _describe(path: pathlib.Path, forced: DocumentFormat | None) -> InputFile:
    try:
        stat = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; fix its permissions or remove it from --input"
        ) from error
    guessed = DocumentFormat.JSONL if path.suffix.lower() in _JSON_SUFFIXES else DocumentFormat.TEXT
    return InputFile(path=str(path), format=forced or guessed, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _untold(_size_bytes: int) -> None:
    """Ignore the number of bytes read."""


def batches(
    sources: Sequence[InputFile], start: InputPosition, on_read: Callable[[int], None] = _untold
) -> Iterator[DocumentBatch]:
    """Yield batches of about BATCH_BYTES from `start` on; small files share one.

    `on_read` is called for every READ_BYTES, since one line, and with it one batch, may be as long as the file.
    """
    chunks: list[InputChunk] = []
    size_bytes = 0
    end = start
    for chunk, end in _chunks(sources, start, on_read):
        chunks.append(chunk)
        size_bytes += len(chunk.payload)
        if size_bytes >= BATCH_BYTES or len(chunks) >= _FILES_PER_BATCH:
            yield DocumentBatch(chunks=tuple(chunks), end=end)
            chunks, size_bytes = [], 0
    if chunks:
        yield DocumentBatch(chunks=tuple(chunks), end=end)


def _chunks(
    sources: Sequence[InputFile], start: InputPosition, on_read: Callable[[int], None]
) -> Iterator[tuple[InputChunk, InputPosition]]:
    for number in range(start.file, len(sources)):
        place = start if number == start.file else InputPosition(file=number)
        yield from _chunks_of(sources[number], place, on_read)


def _chunks_of(
    source: InputFile, start: InputPosition, on_read: Callable[[int], None]
) -> Iterator[tuple[InputChunk, InputPosition]]:
    limit = BATCH_BYTES if source.format is DocumentFormat.JSONL else CHUNK_BYTES
    offset_bytes, line = start.offset_bytes, start.line
    with open(source.path, "rb") as stream:
        stream.seek(offset_bytes)
        while offset_bytes < source.size_bytes:
            rest_bytes = source.size_bytes - offset_bytes
            payload = b"".join(_whole_lines(stream, min(limit, rest_bytes), rest_bytes, on_read))
            if not payload:
                raise DataError(
                    f"{source.path} became shorter while it was read; start again when it no longer changes"
                )
            offset_bytes += len(payload)
            closes = offset_bytes >= source.size_bytes
            chunk = InputChunk(path=source.path, format=source.format, first_line=line + 1, payload=payload)
            line += payload.count(b"\n")
            going_on = InputPosition(file=start.file, offset_bytes=offset_bytes, line=line)
            yield chunk, InputPosition(file=start.file + 1) if closes else going_on


def _whole_lines(
    stream: IO[bytes], limit_bytes: int, rest_bytes: int, on_read: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield about `limit_bytes`, on to the next line end, but not beyond the size the file had when the run began."""
    read_bytes, ended = 0, False
    while read_bytes < rest_bytes and not ended:
        if read_bytes < limit_bytes:
            block = stream.read(min(READ_BYTES, limit_bytes - read_bytes))
        else:
            block = stream.readline(min(READ_BYTES, rest_bytes - read_bytes))
        read_bytes += len(block)
        ended = not block or (read_bytes >= limit_bytes and block.endswith(b"\n"))
        on_read(len(block))
        yield block
