"""State of the distributed optimizer as each rank holds it, in the form of megatron-core's sharded tensors.

megatron-core gathers this state on one replica to save it in a form that any layout reads. Here every rank writes its
own range of each parameter as rectangles of the whole tensor: the names and the form in the files are the same, no data
is exchanged, and all replicas write at once.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from megatronapp_trainer.checkpoint.saving.rectangles import Rectangle, rectangles_of

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Names of what the optimizer has for each element: the weight in fp32, and Adam's two moments."""


def shard_states(optimizer: Any, model_state: dict[str, Any]) -> dict[str, list[Any]]:  # noqa: ANN401
    """Return the ShardedTensors of this rank's part of a DistributedOptimizer, by a name for each parameter and state.

    `model_state`: sharded state of the model, whose tensors are the parameters themselves.

    Raises:
        NotImplementedError: a weight is stored in parts that are not boxes of it.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    stored, _ = extract_sharded_tensors_and_factories(model_state)
    by_parameter = {entry.data: entry for entry in nested_values(stored)}
    found: dict[str, list[Any]] = {}
    for number, (parameter, places) in enumerate(_local_parameters(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        start, end = places["param"].start, places["param"].end
        for name in STATES:
            parts = list(_parts(by_parameter[parameter], name, tensors[name], start, end))
            if parts:
                found[f"{number}.{name}"] = parts
    return found


def _local_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:  # noqa: ANN401
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _parts(stored: Any, name: str, shard: torch.Tensor, start: int, end: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield the tensors of the elements `start` to `end` of a parameter, whose state is the flat `shard`."""
    shape = tuple(stored.data.shape)
    for first, box in rectangles_of(shape, start, end):
        values = shard.detach()[first - start : first - start + box.elements].view(box.sizes)
        for leaf, place in _leaves(stored, shape):
            common = box.overlap(place)
            if common is not None:
                yield _sharded(leaf, name, values[common.within(box)], common, place)


def _leaves(stored: Any, shape: tuple[int, ...]) -> Iterator[tuple[Any, Rectangle]]:  # noqa: ANN401
    """Yield the tensors under which a parameter is stored, several if a factory makes them, with their boxes in it."""
    if not hasattr(stored, "build_fn"):
        yield stored, Rectangle(offsets=(0,) * len(shape), sizes=shape)
        return
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    whole = torch.empty(shape, dtype=stored.data.dtype, device="meta")
    for leaf in nested_values({"leaves": dataclasses.replace(stored, data=whole).build()}):
        yield leaf, _box(leaf, whole)


def _box(leaf: Any, whole: torch.Tensor) -> Rectangle:  # noqa: ANN401
    view = leaf.data
    if view.stride() != whole.stride():
        raise NotImplementedError(f"{leaf.key} is stored in parts that are not boxes of the parameter")
    rest, offsets = view.storage_offset(), []
    for stride in whole.stride():
        offsets.append(rest // stride)
        rest %= stride
    return Rectangle(offsets=tuple(offsets), sizes=tuple(view.shape))


def _sharded(leaf: Any, name: str, values: torch.Tensor, box: Rectangle, place: Rectangle) -> Any:  # noqa: ANN401
    """Return the box of a parameter as a part of the tensor that `leaf` describes, which is at `place`."""
    inner = [start - outer for start, outer in zip(box.offsets, place.offsets, strict=True)]
    ahead = leaf.prepend_axis_num
    offsets = (*leaf.global_offset[:ahead], *(a + b for a, b in zip(leaf.global_offset[ahead:], inner, strict=True)))
    assert math.prod(box.sizes) == values.numel()
    return dataclasses.replace(
        leaf,
        key=f"optimizer.state.{name}.{leaf.key}",
        data=values,
        dtype=values.dtype,
        local_shape=box.sizes,
        global_offset=offsets,
        axis_fragmentations=None,
        replica_id=(*leaf.replica_id[:-1], 0),  # each rank of the data-parallel group has other elements
    )
