"""The folder with the state of this user's jobs (docs/contracts.md, section 8)."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

from megatronapp_common.errors import StateError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST})


def jobs_dir() -> pathlib.Path:
    """Return the folder of all jobs of this user."""
    home = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(home) / "megatronapp" / "jobs"


@contextlib.contextmanager
def raise_state_errors() -> Iterator[None]:
    """Raise StateError in place of an OSError about the state folder, its content, or a folder above it."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or not _concerns_state(pathlib.Path(error.filename)):
            raise
        raise StateError(_sentence(error)) from error


def _concerns_state(path: pathlib.Path) -> bool:
    folder = jobs_dir()
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _sentence(error: OSError) -> str:
    path, hint = pathlib.Path(error.filename), "make it readable and writable"
    if error.errno in FULL:
        hint = "free some space"
    elif error.errno in NOT_A_FOLDER:
        path, hint = _first_non_directory(path), "remove the file"
    reason = error.strerror or str(error)
    return f"{path}: cannot keep the state of jobs here: {reason}; {hint}, or set XDG_STATE_HOME to another folder"


def _first_non_directory(path: pathlib.Path) -> pathlib.Path:
    """Return the first part of a path that exists and is no folder."""
    return next((part for part in [*reversed(path.parents), path] if part.exists() and not part.is_dir()), path)
