"""Manifests as people give them to a subcommand."""

import pathlib
import sys

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job, parse_manifest
from megatronapp_operator.errors import ManifestError

BAD_MANIFEST_EXIT_CODE = 2
WHOLE = "the document: "


def read_manifest(file: str, *, name: str | None = None) -> MegatronJob:
    """The job in a file (or '-'), under another name if one is given. Raises ManifestError, one problem a line."""
    try:
        document = parse_manifest(_read(file))
        if name is not None and isinstance(document, dict) and isinstance(document.get("metadata"), dict):
            document["metadata"]["name"] = name
        return load_job(document)
    except JobError as error:
        raise ManifestError(_named(str(error), "standard input" if file == "-" else file)) from error


def print_problems(error: ManifestError, *, file: str = "") -> None:
    """One line for each on standard error; fields are told with `file`, where there are several."""
    for line in str(error).splitlines():
        place = f"{file}: " if file and not line.startswith((file, "standard input")) else ""
        print(f"error: {place}{line}", file=sys.stderr)


def _named(problems: str, file: str) -> str:
    """Problems of the document as a whole are told with the file's name; others begin with a field."""
    lines = (line.replace("the document: is not YAML: ", "the document: ", 1) for line in problems.splitlines())
    return "\n".join(f"{file}: {rest}" if (rest := line.removeprefix(WHOLE)) != line else line for line in lines)


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return pathlib.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"{file}: cannot read the manifest: {reason}") from error
