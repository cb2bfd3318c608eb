"""Updates of weights in a step, computed from the state of Adam after it: no copy of the weights before is needed."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from megatronapp_trainer.checkpoint.optimizer_state import inner_optimizers
from megatronapp_trainer.scope.statistics.accumulator import SLICE


@torch.no_grad()
def adam_updates(
    optimizer: Any,  # noqa: ANN401 - MegatronOptimizer, plain or chained
    parameters: Collection[torch.nn.Parameter],
    *,
    is_first_replica: bool,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield parameters with parts of their last update in fp32, that of the weights that the optimizer has.

    With a distributed optimizer each rank yields what it updates itself, otherwise the first replica all of it. To be
    called before the learning rate changes.

    AdamW (Loshchilov and Hutter, 2019) sets p' = (1 - lr wd) p - u with u = lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) +
    eps), so that p = (p' + u) / (1 - lr wd).
    """
    for part in inner_optimizers(optimizer):
        places = getattr(part, "model_param_group_index_map", None)
        if places is None and not is_first_replica:
            continue
        groups = {id(main): group for group in part.optimizer.param_groups for main in group["params"]}
        for parameter in parameters:
            if places is None:
                main = getattr(parameter, "main_param", parameter)
            elif parameter in places:
                group, order = places[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
            else:
                continue
            if id(main) in groups and main in part.optimizer.state:
                for update in _updates_of(main, groups[id(main)], part.optimizer.state[main]):
                    yield parameter, update


def _updates_of(main: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the update of a parameter in slices, so that its memory does not grow with the parameter."""
    rate, (beta1, beta2), epsilon = group["lr"], group["betas"], group["eps"]
    count = torch.as_tensor(state.get("step", group.get("step"))).double()
    first, second = 1 - beta1**count, 1 - beta2**count
    decay = rate * group["weight_decay"]
    tensors = (tensor.detach().reshape(-1).split(SLICE) for tensor in (main, state["exp_avg"], state["exp_avg_sq"]))
    for weights, means, squares in zip(*tensors, strict=True):
        change = (means / first).mul_(rate).div_((squares / second).sqrt_().add_(epsilon))
        yield (weights + change).mul_(-decay / (1 - decay)).sub_(change)
