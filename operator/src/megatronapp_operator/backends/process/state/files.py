"""Atomic reads and writes of the job's files."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any


def write_text(path: pathlib.Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file in one step, so that a reader sees the old or the new text. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with _errors_of(temporary):
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)


def remove_tree(path: pathlib.Path) -> None:
    """Remove a folder with its contents. Raises OSError with an absolute path."""
    with _errors_of(path):
        shutil.rmtree(path)


@contextlib.contextmanager
def _errors_of(path: pathlib.Path) -> Iterator[None]:
    """Add the path to an OSError that has none, or only a name below an open folder."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not os.path.isabs(error.filename):
            error.filename = str(path)
        raise


def write_json(path: pathlib.Path, document: dict[str, Any]) -> None:
    """Replace a file by a JSON object. Raises OSError."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; return None if it does not exist or is half written."""
    try:
        return _object(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def append_json(path: pathlib.Path, documents: Sequence[dict[str, Any]]) -> None:
    """Add lines to a file of JSON objects, all or none. Raises OSError."""
    data = "".join(f"{json.dumps(document)}\n" for document in documents).encode()
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(data) < len(data):  # a disk that has become full takes what still fits
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of JSON objects; a truncated one is skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [document for line in lines if line.endswith("\n") and (document := _object(line)) is not None]


def _object(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
