"""Construction of a rank that generates, from flags and a checkpoint. All ranks call these functions together."""

import dataclasses
import datetime
import logging
import pathlib
from typing import Any

import torch

from megatronapp_trainer.checkpoint import arguments, foreign
from megatronapp_trainer.checkpoint.directory import (
    BrokenCheckpointError,
    CheckpointDirectory,
    Manifest,
    read_manifest,
)
from megatronapp_trainer.checkpoint.storage import read, verify
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.device.free_memory import free_bytes
from megatronapp_trainer.errors import CheckpointError, UsageError
from megatronapp_trainer.inference.model.kv_cache import check_memory
from megatronapp_trainer.inference.model_runner import ModelRunner, RunnerOptions, cache_shape
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.agreement import broadcast_from_zero, on_all_ranks, rank
from megatronapp_trainer.parallel.layout import Layout, layout_from_environment
from megatronapp_trainer.parallel.seeds import seed_everything

logger = logging.getLogger(__name__)


def generation_config(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration without the settings of training alone: sequence parallelism, chunks, recomputation."""
    parallel = dataclasses.replace(
        config.parallel,
        sequence_parallel=False,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
    )
    precision = dataclasses.replace(
        config.precision,
        recompute_activations=False,
        recompute_granularity=None,
        recompute_modules=None,
        recompute_method=None,
        recompute_num_layers=None,
    )
    return dataclasses.replace(config, parallel=parallel, precision=precision)


def generation_layout(config: TrainerConfig) -> Layout:
    """Return this rank's layout. Raises UsageError unless the ranks are exactly one replica of the model."""
    tensor, pipeline = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    layout = layout_from_environment(tensor_size=tensor, pipeline_size=pipeline, virtual_size=1)
    if layout.data_size != 1:
        raise UsageError(
            f"{layout.world_size} ranks are {layout.data_size} replicas of a model of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline}; a gang is one of them: start {tensor * pipeline}"
        )
    return layout


def build_model(config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True) -> Any:  # noqa: ANN401 - GPTModel
    """Return this stage's GPTModel in evaluation mode, without gradients, with initial weights (`drawn`) or any."""
    config = generation_config(config)
    # On a GPU megatron-core draws weights from separate states, which have to exist though ours replace them.
    seed_everything(config, layout)
    model = model_family(config).build_stage(config, layout, device, vocab_size=vocab_size, drawn=drawn)
    return model.eval().requires_grad_(False)


def load_weights(model: Any, config: TrainerConfig, directory: pathlib.Path) -> pathlib.Path:  # noqa: ANN401
    """Fill the model from the newest whole checkpoint, written in any layout; return its path. Collective.

    Rank 0 logs why newer ones are skipped.

    Raises:
        CheckpointError: no checkpoint is whole, or it is of another model.
    """
    found = broadcast_from_zero(lambda: _inspected(directory))
    for index, checkpoint in enumerate(found):
        if checkpoint.manifest is None:
            continue
        if (reason := arguments.conflict(checkpoint.manifest.arguments, config, optimizer=False)) is not None:
            raise CheckpointError(f"{checkpoint.path}: {reason}")
        try:
            verify(checkpoint.path, checkpoint.manifest, weights_alone=True)
            _load(model, checkpoint.path)
        except BrokenCheckpointError as error:
            found[index] = dataclasses.replace(checkpoint, manifest=None, flaw=str(error))
        else:
            for skipped in found[:index] if rank() == 0 else ():
                logger.warning("checkpoint %s is skipped: %s", skipped.path, skipped.flaw)
            return checkpoint.path
    raise _nothing_whole(directory, found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _InspectedCheckpoint:
    """A checkpoint's manifest, or why it cannot be used."""

    path: pathlib.Path
    manifest: Manifest | None = None
    flaw: str = ""


def _inspected(directory: pathlib.Path) -> list[_InspectedCheckpoint]:
    """Return the directory's checkpoints, newest first."""
    found = []
    for path in CheckpointDirectory(directory).checkpoints():
        try:
            found.append(_InspectedCheckpoint(path=path, manifest=read_manifest(path)))
        except BrokenCheckpointError as error:
            found.append(_InspectedCheckpoint(path=path, flaw=str(error)))
    return found


def _nothing_whole(directory: pathlib.Path, found: list[_InspectedCheckpoint]) -> CheckpointError:
    if (other := foreign.answer(directory)) is not None:
        return CheckpointError(other)
    flaws = "; ".join(f"{checkpoint.path.name}: {checkpoint.flaw}" for checkpoint in found)
    return CheckpointError(f"{directory} holds no whole checkpoint ({flaws or 'nor any other'}); check the path")


def _load(model: Any, path: pathlib.Path) -> None:  # noqa: ANN401 - GPTModel
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with torch.no_grad():
        loaded = read({"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}, path)
        on_all_ranks(lambda: model.load_state_dict(loaded["model"]))


def open_worker_group(
    model: Any,  # noqa: ANN401 - GPTModel of `build_model`
    config: TrainerConfig,
    layout: Layout,
    device: Device,
    options: RunnerOptions,
    *,
    vocab_size: int,
) -> WorkerGroup:
    """Allocate the cache and join the other ranks. Collective.

    Raises:
        CacheTooLargeError: some rank has too little memory; all raise.
        UsageError: the options do not fit the model.
    """

    def prepare() -> ModelRunner:
        check_memory(cache_shape(model, options), free_bytes=free_bytes(device), place=device.name)
        return ModelRunner(model, layout, device, options, vocab_size=vocab_size)

    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return WorkerGroup(on_all_ranks(prepare), timeout=timeout)
