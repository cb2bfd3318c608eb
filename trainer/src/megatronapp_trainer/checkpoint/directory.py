"""Directory of a job's checkpoints. Files only, no torch, one process at a time (rank 0).

    SAVE/
        latest_checkpointed_iteration.txt   the newest one, as Megatron's tools read it
        owner.json                          which life of the job may write here
        memory.json                         token of the training that also saves in memory
        iter_0000100/                       whole, because it got this name last
            megatronapp.json                its manifest, with size and checksum of every file
        iter_0000150.tmp-a2-5f0c.../        being written by attempt 2
        iter_0000050.old-a2/                being deleted or replaced by attempt 2

A checkpoint is written under a temporary name and renamed. A rank that was disconnected with its node and lives
on in an old attempt must not delete or replace what a new attempt writes: the newest claim in owner.json alone may
rename and delete. Between this check and a rename is a moment that no file system closes; every deletion is
checked again.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatronapp_common.names import CHECKPOINT_TRACKER
from megatronapp_trainer.checkpoint.checksums import WrittenFile, checksum_of
from megatronapp_trainer.errors import StorageError, SupersededError
from megatronapp_trainer.utils.atomic_files import retry_transient_errors, sync_directory, sync_file, write_atomically

OWNER = "owner.json"
MANIFEST = "megatronapp.json"
MEMORY_TRAINING = "memory.json"
FORMAT = 3
_FORMATS = (1, 2, FORMAT)
"""Formats that can be read; the first has no checksums, the second has one of each whole file."""
MIN_CHECKPOINTS = 2
"""Whole checkpoints that pruning keeps: after a power cut the newest may be unreadable."""
DATA_SUFFIX = ".distcp"
_FINAL = re.compile(r"iter_(\d+)")
_TEMPORARY = re.compile(r"iter_\d+\.(?:tmp|old)-a\d+(?:-[0-9a-f]+)?")
"""Names with a token per claim of an attempt; earlier releases wrote only the attempt's number."""
_OLD = re.compile(r"(iter_\d+)\.old-a(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnershipClaim:
    """A life of a job as owner of the directory. `token` distinguishes two claims of the same attempt."""

    uid: str
    attempt: int
    token: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a checkpoint. Its presence, with every file at its size, makes a checkpoint whole."""

    iteration: int
    consumed_samples: int
    skipped_iterations: int
    attempt: int
    layout: dict[str, int]
    optimizer: str | None
    random_states: bool
    arguments: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    """Checksum of every file; empty in checkpoints of format 1."""
    order_samples: int | None = None
    """Same as `TrainState.order_samples`."""
    perturbed: list[dict[str, Any]] = field(default_factory=list)
    """Perturbed steps, fields of `PerturbedSteps`."""
    format: int = FORMAT


class BrokenCheckpointError(Exception):
    """A directory that is not a whole checkpoint; the text says why. Never leaves this package."""


class CheckpointDirectory:
    """A directory with the checkpoints of one job."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def checkpoints(self) -> list[pathlib.Path]:
        """Return all folders that have the name of a checkpoint, newest first."""
        if not self.path.is_dir():
            return []
        found = [(int(match[1]), entry) for entry in self.path.iterdir() if (match := _FINAL.fullmatch(entry.name))]
        return [entry for _, entry in sorted(found, reverse=True)]

    def removed_iteration(self) -> int | None:
        """Return the iteration published last if neither its checkpoint nor a later one is there; None if one is.

        Raises OSError.
        """
        try:
            published = int(retry_transient_errors((self.path / CHECKPOINT_TRACKER).read_bytes))
        except (FileNotFoundError, ValueError):  # none yet, or of another program
            return None
        names = (entry.name.partition(".old-")[0] for entry in self.path.iterdir())  # one may be between two names
        is_there = any(int(match[1]) >= published for name in names if (match := _FINAL.fullmatch(name)))
        return None if is_there else published

    def forget_memory(self) -> None:
        """Let nothing that is in memory be resumed: a run without such checkpoints continues. Raises StorageError."""
        try:
            (self.path / MEMORY_TRAINING).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"--save {self.path} cannot be written: {error.strerror or error}") from error

    def has_whole(self) -> bool:
        """Return True if any of them has its manifest, and every file at its size."""
        return any(_is_whole(path) for path in self.checkpoints())

    def claim(self, claim: OwnershipClaim) -> None:
        """Become the owner, and remove what earlier claims left unfinished.

        Raises:
            SupersededError: a newer attempt of the same job owns the directory.
            StorageError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            owner = self._owner()
            if owner is not None and owner.uid == claim.uid and owner.attempt > claim.attempt:
                raise SupersededError(self._superseded(owner, claim))
            write_atomically(self.path / OWNER, json.dumps(asdict(claim)).encode())
            self._restore_replaced()
            for entry in self.path.iterdir():
                if _TEMPORARY.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)
        except OSError as error:
            raise StorageError(f"--save {self.path} cannot be written: {error.strerror or error}") from error

    def check_owner(self, claim: OwnershipClaim) -> None:
        """Raise SupersededError if another claim is the newest one, StorageError if the claim cannot be read.

        A restart would take a directory back from its new owner, but it claims one without an owner afresh.
        """
        owner = self._owner()
        if owner is None:
            raise StorageError(
                f"{self.path / OWNER}, which names the owner of the checkpoints there, is missing or cannot be read; "
                "nothing more is written by this attempt, the next one claims the directory again"
            )
        if owner != claim:
            raise SupersededError(self._superseded(owner, claim))

    def temporary(self, iteration: int, claim: OwnershipClaim) -> pathlib.Path:
        """Return the path at which a checkpoint is written before it gets its name."""
        return self.path / f"{checkpoint_name(iteration)}{_temporary_suffix(claim)}"

    def begin(self, iteration: int, claim: OwnershipClaim) -> pathlib.Path:
        """Create an empty directory for writing a checkpoint, and remove what this claim has left unfinished."""
        self.check_owner(claim)
        for left in self.path.glob(f"iter_*{_temporary_suffix(claim)}"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = self.temporary(iteration, claim)
        temporary.mkdir()
        return temporary

    def publish(
        self,
        temporary: pathlib.Path,
        manifest: Manifest,
        claim: OwnershipClaim,
        written: Mapping[str, WrittenFile] | None = None,
    ) -> pathlib.Path:
        """Give a fully written checkpoint its name and make it the newest one; `written` as in `seal`."""
        seal(temporary, manifest, written)
        final = self.path / checkpoint_name(manifest.iteration)
        self.check_owner(claim)
        doomed = self._rename_for_deletion(final, claim)
        temporary.rename(final)
        write_atomically(self.path / CHECKPOINT_TRACKER, str(manifest.iteration).encode())
        sync_directory(self.path)
        shutil.rmtree(doomed, ignore_errors=True)
        return final

    def prune(self, keep: int, claim: OwnershipClaim, *, published: int) -> None:
        """Delete checkpoints older than the `keep` newest up to iteration `published`, the one just written.

        The one before it always stays. Only whole ones are counted and deleted: others may be another program's, and
        cannot be resumed from. Those of later iterations stay, because this run could not resume from them, and does
        not know why they exist.
        """
        self.check_owner(claim)
        whole = [path for path in self.checkpoints() if _whole_up_to(path, published)]
        for old in whole[max(keep, MIN_CHECKPOINTS) :]:
            self.check_owner(claim)
            shutil.rmtree(self._rename_for_deletion(old, claim), ignore_errors=True)

    def discard(self, temporary: pathlib.Path) -> None:
        """Delete the files of a failed save."""
        shutil.rmtree(temporary, ignore_errors=True)

    def _rename_for_deletion(self, final: pathlib.Path, claim: OwnershipClaim) -> pathlib.Path:
        """Rename a checkpoint, if it exists, so that no reader ever finds half of it; returns the path to delete."""
        doomed = final.with_name(f"{final.name}.old-a{claim.attempt}")
        if final.exists():
            shutil.rmtree(doomed, ignore_errors=True)
            final.rename(doomed)
        return doomed

    def _restore_replaced(self) -> None:
        """Restore the name of a checkpoint whose writer was killed before the new one of this iteration had it."""
        replaced = [(int(match[2]), entry) for entry in self.path.iterdir() if (match := _OLD.fullmatch(entry.name))]
        for _, entry in sorted(replaced, reverse=True):
            final = entry.with_name(entry.name.partition(".")[0])
            if not final.exists() and _is_whole(entry):
                entry.rename(final)

    def _owner(self) -> OwnershipClaim | None:
        try:
            return OwnershipClaim(**json.loads(retry_transient_errors((self.path / OWNER).read_bytes)))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _superseded(self, owner: OwnershipClaim, claim: OwnershipClaim) -> str:
        return (
            f"{self.path} now belongs to attempt {owner.attempt} of job {owner.uid or '-'}; attempt {claim.attempt} of "
            f"job {claim.uid or '-'} has been replaced and writes no more checkpoints"
        )


def _temporary_suffix(claim: OwnershipClaim) -> str:
    return f".tmp-a{claim.attempt}-{claim.token}"


def checkpoint_name(iteration: int) -> str:
    """Return the folder name of this iteration's checkpoint."""
    return f"iter_{iteration:07d}"


def seal(folder: pathlib.Path, manifest: Manifest, written: Mapping[str, WrittenFile] | None = None) -> None:
    """Write the manifest of a folder that has all other files already: from now on it is whole.

    `written`: files that their writers have synced. They are not checked here: a network file system may not yet show
    what another node has written. All other files are synced now.
    """
    files = dict(written or {})
    for entry in folder.iterdir():
        if entry.name not in files:
            sync_file(entry)
            files[entry.name] = WrittenFile(size=entry.stat().st_size, checksum=checksum_of(entry))
    sizes = {name: files[name].size for name in sorted(files)}
    sums = {name: files[name].checksum for name in sorted(files)}
    content = asdict(manifest) | {"files": sizes, "checksums": sums}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode())
    sync_directory(folder)


def _is_whole(checkpoint: pathlib.Path) -> bool:
    with contextlib.suppress(BrokenCheckpointError):
        read_manifest(checkpoint)
        return True
    return False


def _whole_up_to(checkpoint: pathlib.Path, iteration: int) -> bool:
    with contextlib.suppress(BrokenCheckpointError):
        return read_manifest(checkpoint).iteration <= iteration
    return False


def read_manifest(checkpoint: pathlib.Path) -> Manifest:
    """Read the manifest of a whole checkpoint.

    Raises:
        BrokenCheckpointError: it is not whole; the text says why.
    """
    try:
        stored = json.loads(retry_transient_errors((checkpoint / MANIFEST).read_bytes))
    except FileNotFoundError:
        raise BrokenCheckpointError(
            f"it has no {MANIFEST}: it was not written to its end, or not by this product"
        ) from None
    except (OSError, ValueError) as error:
        raise BrokenCheckpointError(f"its {MANIFEST} cannot be read ({error})") from error
    if not isinstance(stored, dict):
        raise BrokenCheckpointError(f"its {MANIFEST} is no JSON object")
    if stored.get("format") not in _FORMATS:
        raise BrokenCheckpointError(
            f"its format {stored.get('format')} is not one of {', '.join(map(str, _FORMATS))}: another version wrote it"
        )
    with contextlib.suppress(TypeError):
        manifest = Manifest(**stored)
        _check_sizes(checkpoint, manifest)
        return manifest
    raise BrokenCheckpointError(f"its {MANIFEST} lacks entries or has unknown ones")


def _check_sizes(checkpoint: pathlib.Path, manifest: Manifest) -> None:
    for name, size_bytes in manifest.files.items():
        try:
            found = retry_transient_errors(functools.partial(os.stat, checkpoint / name)).st_size
        except OSError as error:
            raise BrokenCheckpointError(f"its file {name} is missing ({error.strerror})") from error
        if found != size_bytes:
            raise BrokenCheckpointError(f"its file {name} has {found} bytes instead of {size_bytes}")
