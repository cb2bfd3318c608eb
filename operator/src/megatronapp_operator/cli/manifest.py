"""Manifests that users give to a subcommand."""

import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job, parse_manifest
from megatronapp_common.job.api.profile import Profile
from megatronapp_common.job.profiles.effective import LayeredJob, load_layered_job
from megatronapp_common.job.profiles.load import load_profile
from megatronapp_operator.errors import ManifestError

BAD_MANIFEST_EXIT_CODE = 2
WHOLE = "the document: "
NUMBER = re.compile(r"(?:multiple|divide|divisor).*; (?:write|make) .*\d")
"""Problem with a number to write instead, where that number depends on other fields."""
ONE_BY_ONE = "note: each number above fits the fields as they are now; change one, and validate again before the next"


def read_manifest(file: str, *, name: str | None = None) -> MegatronJob:
    """Read a job from a file (or '-'), with another name if one is given. Raises ManifestError, one problem a line.

    A job that names a profile is judged by its types only.
    """
    try:
        return load_job(_document(file, name))
    except JobError as error:
        raise ManifestError(with_source(str(error), source_name(file))) from error


def read_layered(file: str, profiles: Sequence[str], *, name: str | None = None) -> LayeredJob:
    """Read a job as above, and merge it over the profiles of these files, with all rules judged."""
    found = [read_profile(profile) for profile in profiles]
    try:
        return load_layered_job(_document(file, name), found)
    except JobError as error:
        raise ManifestError(with_source(str(error), source_name(file))) from error


def read_profile(file: str) -> Profile:
    """Read a profile from a file. Raises ManifestError, one problem a line, each with the name of the file."""
    try:
        return load_profile(_read(file))
    except JobError as error:
        named = (f"{file}: {problem.removeprefix(WHOLE)}" for problem in error.problems)
        raise ManifestError("\n".join(named)) from error


def read_document(file: str) -> Any:  # noqa: ANN401 - plain data
    """Read the one object of a file (or '-'). Raises ManifestError."""
    try:
        return _document(file, None)
    except JobError as error:
        raise ManifestError(with_source(str(error), source_name(file))) from error


def _document(file: str, name: str | None) -> Any:  # noqa: ANN401 - plain data
    document = parse_manifest(_read(file))
    if name is not None and isinstance(document, dict) and isinstance(document.get("metadata"), dict):
        document["metadata"]["name"] = name
    return document


def print_problems(error: ManifestError, *, file: str | None = None) -> None:
    """Print one line for each problem on standard error.

    A note follows if two of them have numbers, which may not fit together. With several files, `file` is added to each
    line.
    """
    shown = "" if file is None else f"{source_name(file)}: "
    lines = str(error).splitlines()
    for line in lines:
        print(f"error: {shown}{line.removeprefix(shown)}", file=sys.stderr)
    if sum(NUMBER.search(line) is not None for line in lines) > 1:
        print(ONE_BY_ONE, file=sys.stderr)


def source_name(file: str) -> str:
    """Return the name of the file for messages."""
    return "standard input" if file == "-" else file


def with_source(problems: str, file: str) -> str:
    """Put the name of the file before problems of the whole document; others begin with a field."""
    lines = (line.replace("the document: is not YAML: ", "the document: ", 1) for line in problems.splitlines())
    return "\n".join(f"{file}: {rest}" if (rest := line.removeprefix(WHOLE)) != line else line for line in lines)


def _read(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else pathlib.Path(file).read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"{source_name(file)}: cannot read the manifest: {reason}") from error
