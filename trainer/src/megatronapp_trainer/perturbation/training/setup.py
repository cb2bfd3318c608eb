"""Construction of the perturbation of a training on each of its ranks."""

from collections.abc import Callable

from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.perturbation.model_shard import model_shard_of
from megatronapp_trainer.perturbation.training.trained_activations import SamplePlan
from megatronapp_trainer.perturbation.training.trained_perturbation import TrainedPerturbation, model_of
from megatronapp_trainer.perturbation.training.training_limits import TrainingLimits


def open_perturbation(
    config: TrainerConfig,
    layout: Layout,
    state: TrainState,
    *,
    vocabulary: int,
    weights_changed: Callable[[], None] = lambda: None,
) -> TrainedPerturbation:
    """Prepare a rank to obey orders to perturb.

    `vocabulary`: number of tokens without padding. `weights_changed`: called when the parameters of the model have
    changed without a step of the optimizer, on all replicas.
    """
    plan = SamplePlan(
        micro_batch_size=config.training.micro_batch_size,
        seq_length=config.model.seq_length,
        data_rank=layout.data_rank,
        data_size=layout.data_size,
    )
    return TrainedPerturbation(
        state,
        model_shard_of(model_of(state.chunks[0]), layout, vocabulary=vocabulary),
        plan,
        limits=TrainingLimits(
            replicas=layout.data_size,
            runs_in_order=not config.dpp.use_dpp,
            ships_passes=config.fbd.enabled,
            serves_several_replicas=config.fbd.enabled and config.fbd.fbd_backward_per_forward > 1,
        ),
        overlaps_gathers=config.parallel.overlap_param_gather,
        weights_changed=weights_changed,
    )
