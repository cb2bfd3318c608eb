"""Preparation of megatron-core's optimizers for saving and loading without Transformer Engine or Apex.

megatron-core 0.16 with torch's own Adam cannot load what it saved. These defects are repaired here, on the one
optimizer of a run and not on its class:

1. The distributed optimizer asks for the step of a state that does not exist before the first update, which with fp16
   may be many steps after the start.
2. It copies loaded tensors over a state that has a `step` among its keys, which none of them is.
3. It gives every parameter the same `step` tensor; Adam then counts it up once per parameter, so that the bias
   correction is silently wrong from the first step after a resume.
4. It gathers the replicas' shards on one rank, without the padding between buckets, and then searches for parameters at
   their places with the padding: with more than one bucket (always so for a tied embedding on the first of several
   stages) it saves other numbers than it holds. Here each rank writes what it holds.
"""

import types
from typing import Any

import torch

from megatronapp_trainer.checkpoint.saving.optimizer_shards import STATES, shard_states


def inner_optimizers(optimizer: Any) -> list[Any]:  # noqa: ANN401  # MegatronOptimizer, plain or chained
    """Return the optimizers that have state, one per kind of parameter."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def prepare_to_save(optimizer: Any) -> None:  # noqa: ANN401
    """Let every rank save its own shards, also before the first update."""
    for part in inner_optimizers(optimizer):
        if _is_torch_adam(part):
            _create_states(part.optimizer)
        if hasattr(part, "get_parameter_state_dp_zero"):
            part.get_parameter_state_dp_zero = types.MethodType(_empty_states, part)
            part.sharded_state_dict = types.MethodType(_sharded_states, part)


def prepare_to_load(optimizer: Any) -> None:  # noqa: ANN401
    """Give every parameter an empty Adam state, and let loaded state be copied over it."""
    prepare_to_save(optimizer)
    for part in inner_optimizers(optimizer):
        if _has_copied_state(part):
            part._set_main_param_and_optimizer_states = types.MethodType(_copy_states, part)


def add_missing_steps(loaded: dict[Any, Any]) -> None:
    """Set the step of a loaded state dict that was saved before the first update, and has none, to 0.

    `loaded` is that of an optimizer, or one for each number of a chained one. That of the distributed optimizer has
    its steps elsewhere.
    """
    chained = all(isinstance(key, int) for key in loaded)
    for part in loaded.values() if chained else [loaded]:
        states = part.get("optimizer", part).get("state")
        if states and "common_step" not in states and not any("step" in values for values in states.values()):
            states["common_step"] = torch.tensor(0.0)


def finish_loading(optimizer: Any) -> None:  # noqa: ANN401
    """Give every parameter a separate `step`, and drop state of parameters that this rank does not have."""
    for part in inner_optimizers(optimizer):
        if not _is_torch_adam(part):
            continue
        for key in [key for key in part.optimizer.state if not isinstance(key, torch.Tensor)]:
            del part.optimizer.state[key]
        for parameter, state in part.optimizer.state.items():
            state["step"] = _step_of(part.optimizer, parameter, float(state.get("step", 0.0)))


def _is_torch_adam(part: Any) -> bool:  # noqa: ANN401
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _has_copied_state(part: Any) -> bool:  # noqa: ANN401
    return hasattr(part, "_set_main_param_and_optimizer_states") and _is_torch_adam(part)


def _step_of(adam: torch.optim.Optimizer, parameter: torch.Tensor, count: float) -> torch.Tensor:
    """Return a number of updates where Adam itself has it."""
    device = parameter.device if adam.defaults.get("fused") else torch.device("cpu")
    return torch.tensor(count, dtype=torch.float32, device=device)


def _create_states(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": _step_of(adam, parameter, 0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


@torch.no_grad()
def _copy_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:  # noqa: ANN401
    """Replace DistributedOptimizer._set_main_param_and_optimizer_states on one object."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for name, target in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _empty_states(
    self: Any,  # noqa: ANN401
    use_gloo_comm: bool = True,
    empty_data: bool = False,
    return_on_all_ranks: bool = False,
) -> dict[int, Any]:
    """Replace DistributedOptimizer.get_parameter_state_dp_zero on one object, for loading.

    Per buffer and type of numbers, each state as one fp32 tensor [padded elements of the buffer] on the CPU, without
    values.
    """
    if not (use_gloo_comm and empty_data and return_on_all_ranks):
        raise NotImplementedError("states are not gathered: each rank writes its own; see content.sharded_state")
    return {
        index: {dtype: {name: torch.empty(buffer.numel) for name in STATES} for dtype in ranges}
        for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True))
    }


def _sharded_states(
    self: Any,  # noqa: ANN401
    model_sharded_state_dict: dict[str, Any],
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Replace DistributedOptimizer.sharded_state_dict on one object: saving exchanges nothing, and collects no garbage,
    which takes longer than the rest.
    """
    if is_loading:
        whole: dict[str, Any] = type(self).sharded_state_dict(
            self, model_sharded_state_dict, is_loading, sharding_type, metadata
        )
        return whole
    return {
        **self.state_dict(),
        "param_state": shard_states(self, model_sharded_state_dict),
        "param_state_sharding_type": "fully_reshardable",
    }
