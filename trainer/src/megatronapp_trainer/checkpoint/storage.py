"""Writing and reading of one checkpoint's files: megatron-core's `torch_dist` format with torch's plain file writer.

megatron-core's own writer passes the data to processes that it spawns, which costs seconds, needs a guarded main module
and hangs where one cannot start. Here the calling thread writes. The ranks then agree on the outcome of work that one
rank does alone, so that a failure reaches all ranks instead of leaving them in a collective.
"""

import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from megatronapp_trainer.checkpoint.checksums import Ranges, WrittenFile, first_damage, has_blocks
from megatronapp_trainer.checkpoint.directory import DATA_SUFFIX, BrokenCheckpointError, Manifest
from megatronapp_trainer.checkpoint.tensor_files import StoredTensors
from megatronapp_trainer.checkpoint.writer import ChecksummingWriter
from megatronapp_trainer.errors import CheckpointError
from megatronapp_trainer.parallel.agreement import (
    Agreement,
    broadcast_from_zero,
    gather_from_all,
    on_all_ranks,
    on_rank_zero,
    rank,
    world_size,
)
from megatronapp_trainer.utils.silence_megatron import silence_saving

_BACKEND = ("torch_dist", 1)


class WriteFailedError(Exception):
    """Files could not be written. Never leaves this package."""


def write(content: dict[str, Any], directory: pathlib.Path) -> dict[str, WrittenFile]:
    """Write this rank's part of `content`; returns sizes and checksums of the data files of all ranks; collective.

    Raises:
        WriteFailedError: on every rank, with the first cause.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    agreement = Agreement()
    with agreement.attempt(), silence_saving():  # gathers first, then only rank 0 judges, and may raise alone
        sharded, common = save_preprocess(content, validate_access_integrity=True)
    agreement.settle()
    on_rank_zero(lambda: TorchCommonSaveStrategy("torch", 1).save_common(common, directory))
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    tensors = mcore_to_pyt_state_dict(grouped)
    writer = ChecksummingWriter(directory)
    try:
        save_state(tensors, storage_writer=writer, planner=MCoreSavePlanner(flatten_state_dict=False))
    except CheckpointException as error:
        raise WriteFailedError(_first_failure(error)) from error
    on_rank_zero(lambda: save_config(CheckpointingConfig(*_BACKEND), str(directory)))
    return {name: file for part in gather_from_all(writer.written()) for name, file in part.items()}


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
    text = f"{type(cause).__name__} on rank {rank}: {cause}"
    if "unexpected pos" in text:  # torch's archive writer replaces the system's reason by this text
        return f"a file could not be written to its end, as on a full disk or quota ({text})"
    return text
