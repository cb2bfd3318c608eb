"""Weights of a rank and their gradients, by layer, each number on one rank alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatronapp_common.scope.layer_statistics import GRADIENT, NO_LAYER, UPDATE, WEIGHT, SiteLayer
from megatronapp_trainer.scope.statistics.accumulator import StatisticsAccumulator
from megatronapp_trainer.scope.statistics.site_hooks import model_of
from megatronapp_trainer.scope.statistics.updates import adam_updates


class LayerParameters:
    """Parameters of a rank's chunks after the gradients of a step were reduced.

    Weights are equal in a data-parallel group, whose first rank counts them. So are gradients, unless the optimizer is
    distributed: then each rank has the reduced ones of its part of each bucket, and counts these. Of weights that
    tensor ranks share none of, the first one counts; of tied embeddings the first stage.
    """

    def __init__(
        self, chunks: Sequence[Any], *, tensor_rank: int, loss_scale: Callable[[], float] = lambda: 1.0
    ) -> None:
        """`loss_scale`: factor of the gradients until the optimizer divides them by it."""
        self._loss_scale = loss_scale
        self._chunks = chunks
        self._firsts = {
            parameter
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            if buffer.data_parallel_group.rank() == 0
            for parameter in buffer.params
        }
        """Weights of which this rank is the first of those that have the same ones."""
        self._layers: dict[torch.nn.Parameter, int] = {}
        for chunk in chunks:
            model = model_of(chunk)
            self._layers |= dict.fromkeys(model.parameters(), NO_LAYER)
            for layer in model.decoder.layers:
                self._layers |= dict.fromkeys(layer.parameters(), layer.layer_number - 1)
        self._layers = {
            parameter: layer
            for parameter, layer in self._layers.items()
            if not getattr(parameter, "shared", False)
            and (tensor_rank == 0 or _differs_between_tensor_ranks(parameter))
        }

    @property
    def rows(self) -> list[SiteLayer]:
        """Rows that this rank may count."""
        layers = sorted(set(self._layers.values()))
        return [SiteLayer(site, layer) for site in (GRADIENT, WEIGHT, UPDATE) for layer in layers]

    def add_to(self, statistics: StatisticsAccumulator) -> None:
        """Add weights, and gradients without the loss scale."""
        scale = self._loss_scale()
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                group = buffer.data_parallel_group
                for parameter, gradient in _gradients(buffer, chunk.ddp_config.use_distributed_optimizer, group):
                    if parameter in self._layers:
                        unscaled = gradient if scale == 1 else gradient / scale
                        statistics.add(SiteLayer(GRADIENT, self._layers[parameter]), unscaled)
                if group.rank() == 0:
                    for parameter in buffer.params:
                        if parameter in self._layers:
                            statistics.add(SiteLayer(WEIGHT, self._layers[parameter]), parameter)

    def add_updates(self, statistics: StatisticsAccumulator, optimizer: Any) -> None:  # noqa: ANN401 - MegatronOptimizer
        """Add the changes of the weights by the step that `optimizer` has just done."""
        for is_first in (True, False):
            owned = [parameter for parameter in self._layers if (parameter in self._firsts) == is_first]
            for parameter, update in adam_updates(optimizer, owned, is_first_replica=is_first):
                statistics.add(SiteLayer(UPDATE, self._layers[parameter]), update)


def _differs_between_tensor_ranks(parameter: torch.nn.Parameter) -> bool:
    """Return True for shards, and for weights of experts, whose data-parallel groups are their own."""
    return getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)


def _gradients(
    buffer: Any,  # noqa: ANN401 - megatron-core's _ParamAndGradBuffer
    is_distributed: bool,
    group: Any,  # noqa: ANN401 - process group
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield the parameters of a buffer with the part of their gradients that this rank counts."""
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel()
        shard = size // group.size() if is_distributed else size
        first = shard * group.rank() if is_distributed else 0
        if not is_distributed and group.rank():
            return
        for parameter in bucket.params_list:
            begin, end, _ = buffer.param_index_map[parameter]
            begin, end = max(begin - bucket.offset, first), min(end - bucket.offset, first + shard)
            if begin < end:
                yield parameter, bucket.grad_data[begin:end]
