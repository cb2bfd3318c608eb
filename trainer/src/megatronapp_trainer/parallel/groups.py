"""Process groups of torch.distributed and megatron-core."""

import dataclasses
import datetime
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.worlds import leave_role_world, start_role_world


def initialize_groups(config: TrainerConfig, layout: Layout, device: Device) -> None:
    """Start torch.distributed and megatron-core's groups. A lone process needs no address and no port.

    With MegaFBD the ranks of each role are a world of their own.
    """
    if config.dpp.replaces_transfers and device.is_cuda:
        raise UsageError("--transport native carries tensors of the CPU only so far; leave it out on GPUs")
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    backend = config.parallel.distributed_backend or ("nccl" if device.is_cuda else "gloo")
    if layout.gpu_place(config.fbd) is None:
        backend = "gloo"  # the flag is for the ranks with GPUs
    if backend == "nccl" and not device.is_cuda:
        raise UsageError("--distributed-backend nccl needs GPUs, and this rank has none; leave it out or take gloo")
    if config.dpp.transport == "nccl" and backend != "nccl":
        raise UsageError("--transport nccl: this rank has no GPU, and its transfers go through gloo; leave it out")
    if layout.fbd is not None:
        start_role_world(layout, backend, timeout)
    else:
        _start_world(layout, backend, timeout)
    initialize_model_groups(config, layout)


def _start_world(layout: Layout, backend: str, timeout: datetime.timedelta) -> None:
    """Start torch.distributed among all ranks."""
    store = HashStore() if layout.world_size == 1 and "MASTER_ADDR" not in os.environ else None
    dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)


def initialize_model_groups(config: TrainerConfig, layout: Layout) -> None:
    """Build megatron-core's groups within a started torch.distributed, whose ranks all have this rank's role."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        layout.tensor_size,
        layout.pipeline_size,
        layout.virtual_size if layout.virtual_size > 1 else None,
        context_parallel_size=layout.context_size,
        expert_model_parallel_size=layout.expert_size,
        distributed_timeout_minutes=config.parallel.distributed_timeout_minutes,
        # In a vee the first rank has both copies of tied weights, and no other rank has one.
        get_embedding_ranks=(lambda stages: stages[:1]) if layout.is_vee else None,
    )


def schedule_groups() -> Any:  # noqa: ANN401 - ProcessGroupCollection
    """Return the groups that megatron-core's schedules require with a communicator of ours."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceInPipeline:
    """Takes the place of a pipeline's process group where only a rank and a size are needed."""

    place: int
    places: int

    def rank(self) -> int:
        """Return the pipeline rank."""
        return self.place

    def size(self) -> int:
        """Return the number of pipeline ranks."""
        return self.places


def chunk_groups(layout: Layout, chunk: int) -> Any:  # noqa: ANN401 - ProcessGroupCollection
    """Return the groups with which megatron-core builds a model chunk.

    It derives the chunk's layers, and whether it has an end of the model, from the place in the pipeline's group; for a
    second chunk in a vee that is the place at which the chunk would be in a loop.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    if layout.is_vee:
        groups.pp = PlaceInPipeline(layout.place_in_loop(chunk), layout.pipeline_size)
    return groups


def destroy_groups() -> None:
    """Destroy megatron-core's groups and torch.distributed."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    leave_role_world()
