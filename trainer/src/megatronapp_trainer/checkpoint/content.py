"""Content of a checkpoint as megatron-core's sharded state: saved from, and restored to, the state of training."""

from dataclasses import dataclass
from typing import Any

from megatronapp_trainer.checkpoint import random_states, resume_rates
from megatronapp_trainer.checkpoint.optimizer_state import (
    add_missing_steps,
    finish_loading,
    prepare_to_load,
    prepare_to_save,
)
from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.parallel.layout import Layout

_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # With the other value, reading would gather what it then overwrites.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateParts:
    """Parts of the state that are saved or read, besides the weights."""

    optimizer: bool
    random_states: bool
    progress: bool
    """Iteration, samples and schedules."""


def sharded_state(state: TrainState, layout: Layout, parts: StateParts, *, loading: bool) -> dict[str, Any]:
    """Return the state in the form of megatron-core's dist_checkpointing; nothing is exchanged."""
    if parts.optimizer:
        (prepare_to_load if loading else prepare_to_save)(state.optimizer)
    metadata = _metadata()
    models = {name: model.sharded_state_dict(metadata=metadata) for name, model in models_of(state).items()}
    content: dict[str, Any] = dict(models)
    if parts.optimizer:
        weights = models["model"] if len(models) == 1 else models
        content["optimizer"] = state.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    if parts.random_states:
        content["rng_state"] = _sharded_random_states(layout, loading=loading)
    if parts.progress and not loading:
        content["opt_param_scheduler"] = resume_rates.state_of(state)
        content["iteration"] = state.iteration
        content["validation_due"] = state.validation_due
        if state.stream_state is not None:
            content["stream_state"] = state.stream_state
    return content


def restore(state: TrainState, loaded: dict[str, Any], parts: StateParts) -> None:
    """Copy loaded content to the state of training."""
    for name, model in models_of(state).items():
        model.load_state_dict(loaded[name])
    if parts.optimizer:
        add_missing_steps(loaded["optimizer"])
        state.optimizer.load_state_dict(loaded["optimizer"])
        finish_loading(state.optimizer)
    else:
        state.optimizer.reload_model_params()
    if parts.progress:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        state.validation_due = loaded.get("validation_due", False)
        state.stream_state = loaded.get("stream_state")
    if parts.random_states:
        random_states.restore(loaded["rng_state"])


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**_OPTIMIZER_FORMAT, "dp_cp_group": group}


def models_of(state: TrainState) -> dict[str, Any]:
    """Return the chunks by their names in a checkpoint, without their wrappers."""
    bare = [_unwrapped(chunk) for chunk in state.chunks]
    return {"model": bare[0]} if len(bare) == 1 else {f"model{index}": model for index, model in enumerate(bare)}


def _unwrapped(module: Any) -> Any:  # noqa: ANN401  # DistributedDataParallel, perhaps Float16Module, around a GPTModel
    while hasattr(module, "module"):
        module = module.module
    return module


def _sharded_random_states(layout: Layout, *, loading: bool) -> Any:  # noqa: ANN401
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(
        "rng_state",
        None if loading else random_states.capture(),
        (layout.pipeline_size, layout.tensor_size),
        (layout.pipeline_rank, layout.tensor_rank),
        replica_id=layout.data_rank * layout.context_size + layout.context_rank,
    )
