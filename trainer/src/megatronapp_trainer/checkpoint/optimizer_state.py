"""Preparation of megatron-core's optimizers for saving and loading without Transformer Engine or Apex.

megatron-core 0.16 with torch's own Adam cannot load what it saved. These defects are repaired here, on the one
optimizer of a run and not on its class:

1. The distributed optimizer asks for the step of a state that does not exist before the first update, which with fp16
   may be many steps after the start.
2. It copies loaded tensors over a state that has a `step` among its keys, which none of them is.
3. It gives every parameter the same `step` tensor; Adam then counts it up once per parameter, so that the bias
   correction is silently wrong from the first step after a resume.
4. It gathers the replicas' shards without the padding between buckets, and then searches for parameters at their places
   with the padding: with more than one bucket (always so for a tied embedding on the first of several stages) it saves
   other numbers than it holds, with a warning about "data corruption".
"""

import types
from typing import Any

import torch
import torch.distributed as dist


def inner_optimizers(optimizer: Any) -> list[Any]:  # noqa: ANN401  # MegatronOptimizer, plain or chained
    """Return the optimizers that have state, one per kind of parameter."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def prepare_to_save(optimizer: Any) -> None:  # noqa: ANN401
    """Let the replicas' shards be gathered with every parameter at its place, also before the first update."""
    for part in inner_optimizers(optimizer):
        if _is_torch_adam(part):
            _create_states(part.optimizer)
        if hasattr(part, "get_parameter_state_dp_zero"):
            part.get_parameter_state_dp_zero = types.MethodType(_gather_states, part)


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


_STATES = ("param", "exp_avg", "exp_avg_sq")


@torch.no_grad()
def _gather_states(
    self: Any,  # noqa: ANN401
    use_gloo_comm: bool = True,
    empty_data: bool = False,
    return_on_all_ranks: bool = False,
) -> dict[int, Any] | None:
    """Replace DistributedOptimizer.get_parameter_state_dp_zero on one object.

    Per buffer and type of numbers, each state as one fp32 tensor [padded elements of the buffer] on the CPU: with
    values on the first replica and None on the others, or without values (`empty_data`) everywhere.
    """
    if not use_gloo_comm or return_on_all_ranks != empty_data:
        raise NotImplementedError("only the memory-efficient exchange is used; see content._OPTIMIZER_FORMAT")
    first = self.data_parallel_group_gloo.rank() == 0
    gathered: dict[int, Any] = {}
    for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = ranges.items()
        world = {name: torch.empty(buffer.numel if first or empty_data else 0) for name in _STATES}
        for bucket, bucket_ranges in zip(buffer.buckets, buckets, strict=True):
            if not empty_data:
                _gather_bucket(self, bucket, bucket_ranges["param_map"], world)
        gathered[index] = {dtype: world}
    return gathered if first or empty_data else None


def _gather_bucket(optimizer: Any, bucket: Any, ranges: dict[Any, Any], world: dict[str, torch.Tensor]) -> None:  # noqa: ANN401
    """Gather one bucket's shards of all replicas on the first one."""
    group = optimizer.data_parallel_group_gloo
    size = bucket.grad_data.numel()
    shards = {name: torch.zeros(size // group.size()) for name in _STATES}
    for parameter, places in ranges.items():
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        local = places["gbuf_local"]
        for name, shard in shards.items():
            shard[local.start : local.end].copy_(tensors[name])
    for name, shard in shards.items():
        target = world[name][bucket.offset : bucket.offset + size]
        parts = list(target.chunk(group.size())) if group.rank() == 0 else None
        dist.gather(shard, parts, group=group, group_dst=0)
