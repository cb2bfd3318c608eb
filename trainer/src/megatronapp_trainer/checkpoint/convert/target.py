"""Atomic creation of a folder, and the rules for replacing an existing one."""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from megatronapp_trainer.errors import StorageError, UsageError
from megatronapp_trainer.utils.atomic_files import sync_directory, sync_file


@contextlib.contextmanager
def whole_folder(
    target: pathlib.Path, *, overwrite: bool, replaceable: Callable[[pathlib.Path], bool]
) -> Iterator[pathlib.Path]:
    """Create an empty folder that is renamed to `target` when the block has ended; after an error it is removed.

    With `overwrite`, a target is replaced if `replaceable` permits it; it keeps its name until the new folder is whole.
    Only between two renames the name does not exist; if a conversion is killed there, the next one restores the old
    folder.

    Raises:
        UsageError: the target exists and may not be replaced, is a mount point, or another conversion writes it now.
        StorageError: it cannot be written.
    """
    target = target.resolve()
    if target.is_mount():
        raise UsageError(f"--save-dir {target} is a mount point, which nothing can replace; name a folder in it")
    temporary = target.with_name(f"{target.name}.converting")
    doomed = target.with_name(f"{target.name}.replaced")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(temporary):
            if doomed.exists() and not target.exists():
                doomed.rename(target)
            _refuse_taken(target, overwrite=overwrite, replaceable=replaceable)
            _clear(temporary)
            try:
                yield temporary
                _exchange(temporary, target, doomed)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or has files of a killed conversion
                folder.rmdir()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another conversion writes {folder} now; wait for it, or take another --save-dir") from None


def _refuse_taken(target: pathlib.Path, *, overwrite: bool, replaceable: Callable[[pathlib.Path], bool]) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise UsageError(f"--save-dir {target} exists and is not empty; take another, or give --overwrite")
    if not target.is_dir() or not replaceable(target):
        raise UsageError(f"--save-dir {target} has files that no conversion has written; take another")


def _clear(folder: pathlib.Path) -> None:
    """Remove what a killed conversion has left."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _exchange(temporary: pathlib.Path, target: pathlib.Path, doomed: pathlib.Path) -> None:
    for path in temporary.rglob("*"):
        (sync_directory if path.is_dir() else sync_file)(path)
    sync_directory(temporary)
    if target.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        target.rename(doomed)
    temporary.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)
