"""Hooks that add the values of sites to statistics while training steps compute their forward passes."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatronapp_common.scope.layer_statistics import COMPUTED, SiteLayer
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.recomputation import is_recomputing
from megatronapp_trainer.hooks.sites import ShardAxis, Site, modules_of, site_of
from megatronapp_trainer.scope.statistics.accumulator import StatisticsAccumulator

log = logging.getLogger(__name__)


class SiteHooks:
    """Forward hooks on the sites of a rank's model chunks, installed for captured steps alone.

    Every number of a site is counted once: where tensor ranks have the same values, by the first of them. Under
    sequence parallelism each has other tokens, and after a column-parallel layer other features.
    """

    def __init__(self, chunks: Sequence[Any], *, tensor_rank: int, sequence_parallel: bool) -> None:
        """Find the modules of all sites in megatron-core's models, `chunks`, wrapped or not."""
        self._modules: list[tuple[SiteLayer, Site, torch.nn.Module]] = []
        models = [model_of(chunk) for chunk in chunks]
        for name in COMPUTED:
            site = site_of(name)
            if tensor_rank and not sequence_parallel and site.axis is ShardAxis.WHOLE:
                continue
            for model in models:
                self._modules += _found(site, model)
        self._handles: list[Any] = []

    @property
    def rows(self) -> list[SiteLayer]:
        """Sites and layers whose numbers this rank counts."""
        return [row for row, _, _ in self._modules]

    def install(self, statistics: StatisticsAccumulator) -> None:
        """Add the values of all forward passes to `statistics` until `remove`."""
        for row, site, module in self._modules:
            self._handles.append(_hook(row, site, module, statistics))

    def remove(self) -> None:
        """Remove the hooks, so that later passes are not counted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def model_of(chunk: Any) -> Any:  # noqa: ANN401 - megatron-core's wrappers
    """Return the model in megatron-core's wrappers of data parallelism and half precision."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def _found(site: Site, model: Any) -> list[tuple[SiteLayer, Site, torch.nn.Module]]:  # noqa: ANN401 - GPTModel
    try:
        modules = modules_of(site, model)
    except CaptureError as error:  # as fc1 and fc2 in layers of experts
        log.warning("captures of the training are without a site: %s", error)
        return []
    return [(SiteLayer(site.name, layer), site, module) for layer, module in modules if module is not None]


def _hook(row: SiteLayer, site: Site, module: torch.nn.Module, statistics: StatisticsAccumulator) -> Any:  # noqa: ANN401
    def add(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401
        if is_recomputing():
            return
        with torch.no_grad():
            taken = site.take((*args, *kwargs.values()), output)
            value, bias = taken if isinstance(taken, tuple) else (taken, None)
            statistics.add(row, value if bias is None else value + bias)

    return module.register_forward_hook(add, with_kwargs=True)
