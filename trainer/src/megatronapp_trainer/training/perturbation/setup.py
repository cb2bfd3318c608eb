"""Construction of the perturbation of a training on each of its ranks."""

from collections.abc import Callable, Sequence

from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.device.free_memory import free_bytes
from megatronapp_trainer.hooks.perturbation.model_shard import model_shard_of
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.training.perturbation.trained_activations import SamplePlan
from megatronapp_trainer.training.perturbation.trained_perturbation import TrainedPerturbation, model_of
from megatronapp_trainer.training.perturbation.training_limits import TrainingLimits
from megatronapp_trainer.training.perturbation.training_memory import TrainingMemory


def open_perturbation(
    config: TrainerConfig,
    layout: Layout,
    state: TrainState,
    *,
    vocabulary: int,
    device: Device,
    peak: Callable[[Sequence[int]], int],
    weights_changed: Callable[[], None] = lambda: None,
) -> TrainedPerturbation:
    """Prepare a rank to obey orders to perturb.

    Args:
        config: of the run.
        layout: place of the rank.
        state: of the training.
        vocabulary: number of tokens without padding.
        device: of the model.
        peak: returns the most bytes that passes hold, from the bytes that a pass of each chunk holds.
        weights_changed: called when the parameters of the model have changed without a step of the optimizer, on all
            replicas.
    """
    recompute = config.precision.recompute_granularity == "full" and config.precision.recompute_method == "uniform"
    shard = model_shard_of(model_of(state.chunks[0]), layout, vocabulary=vocabulary)
    plan = SamplePlan(
        micro_batch_size=config.training.micro_batch_size,
        seq_length=config.model.seq_length,
        data_rank=layout.data_rank,
        data_size=layout.data_size,
    )
    return TrainedPerturbation(
        state,
        shard,
        plan,
        limits=TrainingLimits(
            replicas=layout.data_size,
            runs_in_order=not config.dpp.use_dpp,
            ships_passes=config.fbd.enabled,
            serves_several_replicas=config.fbd.enabled and config.fbd.fbd_backward_per_forward > 1,
        ),
        memory=TrainingMemory(
            shard=shard,
            tokens=config.training.micro_batch_size * config.model.seq_length,
            sequence_parallel=config.parallel.sequence_parallel,
            recomputed_layers=config.precision.recompute_num_layers if recompute else None,
            master_parts=layout.data_size if config.parallel.use_distributed_optimizer else 1,
            peak=peak,
            free_bytes=lambda: free_bytes(device),
        ),
        overlaps_gathers=config.parallel.overlap_param_gather,
        weights_changed=weights_changed,
    )
