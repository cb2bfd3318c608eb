"""Verification and reading of one checkpoint's files by all ranks: megatron-core's `torch_dist` format.

The ranks agree on the outcome of work that one rank does alone, so that a failure reaches all ranks instead of leaving
them in a collective. `saving` writes the files.
"""

import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatronapp_trainer.checkpoint.checksums import Ranges, first_damage, has_blocks
from megatronapp_trainer.checkpoint.directory import DATA_SUFFIX, BrokenCheckpointError, Manifest
from megatronapp_trainer.checkpoint.tensor_files import StoredTensors
from megatronapp_trainer.errors import CheckpointError
from megatronapp_trainer.parallel.agreement import (
    broadcast_from_zero,
    gather_from_all,
    on_all_ranks,
    rank,
    world_size,
)


def verify(directory: pathlib.Path, manifest: Manifest, *, weights_alone: bool) -> None:
    """Read the needed blocks once, each rank a part of them, and compare the checksums; collective.

    A reader of weights alone skips the blocks that have nothing but the optimizer's state, which is several times as
    large. Where an earlier release wrote one checksum of each whole file, such a reader skips the data files.

    Raises:
        BrokenCheckpointError: on every rank, with the first damaged block.
    """
    complete, in_part = _to_verify(manifest, weights_alone=weights_alone)
    _verify(directory, complete)
    if not in_part:
        return
    within = broadcast_from_zero(lambda: _places_of_weights(directory))
    if isinstance(within, str):
        raise BrokenCheckpointError(within)
    _verify(directory, in_part, within)


def damaged_weights(directory: pathlib.Path, manifest: Manifest) -> str | None:
    """Verify the weights in this process alone; return a description of the first damaged block, or None."""
    complete, in_part = _to_verify(manifest, weights_alone=True)
    flaw = first_damage(directory, complete)
    if flaw is not None or not in_part:
        return flaw
    within = _places_of_weights(directory)
    return within if isinstance(within, str) else first_damage(directory, in_part, within=within)


def _to_verify(manifest: Manifest, *, weights_alone: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return checksums of the files to read in full, and of those to read where the weights are."""
    checksums = manifest.checksums
    if not weights_alone or manifest.optimizer is None:
        return checksums, {}
    data = {name: value for name, value in checksums.items() if name.endswith(DATA_SUFFIX)}
    others = {name: value for name, value in checksums.items() if name not in data}
    return others, {name: value for name, value in data.items() if has_blocks(value)}


def _places_of_weights(directory: pathlib.Path) -> Ranges | str:
    """Return the byte ranges of the weights in the data files, or why .metadata cannot be read."""
    try:
        return StoredTensors(directory).places_of_weights()
    except BrokenCheckpointError as error:
        return str(error)


def _verify(directory: pathlib.Path, checksums: Mapping[str, str], within: Ranges | None = None) -> None:
    _refuse_first(
        gather_from_all(
            on_all_ranks(lambda: first_damage(directory, checksums, within=within, part=rank(), parts=world_size()))
        )
    )


def _refuse_first(flaws: Iterable[str | None]) -> None:
    for flaw in flaws:
        if flaw is not None:
            raise BrokenCheckpointError(flaw)


def read(template: dict[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """Read this rank's part; `template` selects it; collective. Call `verify` first.

    Raises:
        BrokenCheckpointError: files are damaged.
        CheckpointError: the files are sound but of another model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    read_common(directory)  # one rank that failed in the load would stop all others
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*load_state_dict.*deprecated", category=FutureWarning)
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(template, str(directory))
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, KeyError | CheckpointingException) for cause in causes):
                raise CheckpointError(f"{directory} holds another model: {_first_failure(error)}") from error
            raise BrokenCheckpointError(f"its files cannot be read: {_first_failure(error)}") from error
    return loaded


def read_common(directory: pathlib.Path) -> dict[str, Any]:
    """Read the part of a checkpoint that all ranks share; collective. Call `verify` first.

    Raises:
        BrokenCheckpointError: on every rank, if one cannot read it, as after a deletion or without checksums.
    """
    from megatron.core import dist_checkpointing

    common: dict[str, Any] = {}
    flaw = None
    try:
        common = dist_checkpointing.load_common_state_dict(str(directory))
    except Exception as error:  # a damaged pickle raises anything
        flaw = f"its common.pt cannot be read ({error})"
    _refuse_first(gather_from_all(flaw))
    return common


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"{type(cause).__name__} on rank {rank}: {cause}"
