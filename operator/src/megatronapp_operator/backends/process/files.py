"""The job's files: written whole or not at all."""

import json
import os
import pathlib
from typing import Any


def write_text(path: pathlib.Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file in one step, so that a reader sees the old or the new text."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    beside.replace(path)


def write_json(path: pathlib.Path, document: dict[str, Any]) -> None:
    """Replace a file by a JSON object."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """A JSON object in a file, or None where there is none or it is only half written."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def append_json(path: pathlib.Path, document: dict[str, Any]) -> None:
    """Add one line to a file of JSON objects."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of such a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
