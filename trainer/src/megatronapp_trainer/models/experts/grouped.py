"""The experts of one rank: an MLP for each, whose products torch computes in one kernel where it can.

Shapes: N tokens of all experts, sorted by expert, E experts of this rank, H hidden, F channels inside an expert on this
tensor rank (the first product of a gated MLP has twice as many outputs).
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule

from megatronapp_trainer.models.experts.products import grouped_product

EXPERT_AXIS, OUTPUT_AXIS, INPUT_AXIS = 0, 1, 2
"""Axes of a weight."""


class ExpertLinear(torch.nn.Module):
    """A linear layer of each expert of this rank, with weights [E, outputs, inputs], split over the tensor group.

    megatron-core awaits gathered parameters in a hook before the forward pass of the module that has them, so that
    the product is this module's.
    """

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        *,
        split_axis: int,
        grouped: bool,
        config: Any,  # noqa: ANN401 - TransformerConfig
    ) -> None:
        """Leave the weights uninitialised. `split_axis`: the axis of which this rank has a part."""
        super().__init__()
        self._grouped = grouped
        self.weight = torch.nn.Parameter(torch.empty(experts, outputs, inputs, dtype=config.params_dtype))
        marks = {
            "tensor_model_parallel": True,
            "partition_dim": split_axis,
            "partition_stride": 1,
            # Experts of several ranks differ, so that their gradients are reduced over a group of their own; also where
            # one rank has all of them, so that the optimizer's state has the same form in each layout.
            "allreduce": False,
        }
        for name, value in marks.items():
            setattr(self.weight, name, value)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Multiply rows [N, inputs], of which each expert has its number in `counts` [E] -> [N, outputs]."""
        return grouped_product(rows, self.weight, counts, fused=self._grouped)


class Experts(MegatronModule):  # type: ignore[misc] # megatron-core carries no types
    """MLPs without bias, with the interface of megatron-core's ``SequentialMLP``."""

    def __init__(self, num_local_experts: int, config: Any, *, grouped: bool, pg_collection: Any) -> None:  # noqa: ANN401
        """Build the experts. `grouped`: in one product where the device and the type of numbers allow it."""
        super().__init__(config=config)
        self._groups = pg_collection
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        outputs = 2 * width if config.gated_linear_unit else width
        hidden = config.hidden_size
        experts, options = num_local_experts, {"grouped": grouped, "config": config}
        self.linear_fc1 = ExpertLinear(experts, outputs, hidden, split_axis=OUTPUT_AXIS, **options)
        self.linear_fc2 = ExpertLinear(experts, hidden, width, split_axis=INPUT_AXIS, **options)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute [N, H] from tokens [N, H], the number of each expert's [E], and scores [N], which weight them."""
        active = self._activate(self.linear_fc1(tokens, tokens_per_expert))
        weighted = (active * scores.unsqueeze(-1)).to(active.dtype)
        return self.linear_fc2(weighted, tokens_per_expert), None

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        if not self.config.gated_linear_unit:
            active: torch.Tensor = self.config.activation_func(inner)
            return active
        gate, up = inner.chunk(2, dim=-1)
        gated: torch.Tensor = self.config.activation_func(gate) * up
        return gated

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weights as parts of tensors of all experts, which any layout can read."""
        halves = 2 if self.config.gated_linear_unit else 1
        return {
            f"{prefix}linear_fc1.weight": self._sharded(
                f"{prefix}linear_fc1.weight", self.linear_fc1.weight, sharded_offsets, OUTPUT_AXIS, halves
            ),
            f"{prefix}linear_fc2.weight": self._sharded(
                f"{prefix}linear_fc2.weight", self.linear_fc2.weight, sharded_offsets, INPUT_AXIS, 1
            ),
        }

    def _sharded(
        self, key: str, weight: torch.Tensor, before: tuple[tuple[int, int, int], ...], axis: int, halves: int
    ) -> Any:  # noqa: ANN401 - ShardedTensor, or a factory of several
        """Return the place of a weight in the whole tensor; gate and up projection are split apart.

        The optimizer finds its state by the parameter itself, which must not be replaced by a view of it.
        """
        replica = (0, 0, self._groups.expt_dp.rank())
        if halves == 1:
            return self._part(key, weight, before, axis, replica=replica)

        def build(
            key: str, data: torch.Tensor, replica_id: tuple[int, int, int], flattened_range: slice | None
        ) -> list[ShardedTensor]:
            if flattened_range is not None:
                raise NotImplementedError("weights are not cut within a tensor; see content._OPTIMIZER_FORMAT")
            parts = enumerate(data.chunk(halves, axis))
            return [
                self._part(key, part, before, axis, half=half, halves=halves, replica=replica_id)
                for half, part in parts
            ]

        def merge(parts: list[torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                return torch.cat(parts, axis)

        return ShardedTensorFactory(key, weight, build, merge, replica)

    def _part(
        self,
        key: str,
        data: torch.Tensor,
        before: tuple[tuple[int, int, int], ...],
        axis: int,
        *,
        half: int = 0,
        halves: int = 1,
        replica: tuple[int, int, int],
    ) -> ShardedTensor:
        """Return the place of this rank's part of one of the `halves` along the split axis."""
        tensor, expert = self._groups.expt_tp, self._groups.ep
        axes = len(before)
        return ShardedTensor.from_rank_offsets(
            key,
            data,
            *before,
            (axes + EXPERT_AXIS, expert.rank(), expert.size()),
            (axes + axis, half * tensor.size() + tensor.rank(), halves * tensor.size()),
            replica_id=replica,
            prepend_axis_num=axes,
        )
