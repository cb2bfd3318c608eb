"""Transfers between the ranks of an analysis, through gloo and the memory of the hosts.

They follow from the step plan and the analyses that all ranks know, so every rank sends and receives in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.parallel.layout import Layout

Span = tuple[int, int]
"""First and end, of the whole model."""


class RankExchange:
    """Exchange of one rank. `group`: gloo group of all ranks; None for a single rank."""

    def __init__(self, layout: Layout, group: Any, layers: Span) -> None:  # noqa: ANN401 - a process group
        self._layout = layout
        self._group = group
        self._layers = layers
        self._spans: list[Span] | None = None

    @property
    def last_stage(self) -> int:
        """Return the number of the last pipeline stage."""
        return self._layout.pipeline_size - 1

    @property
    def stage(self) -> int:
        """Return the number of this rank's pipeline stage."""
        return self._layout.pipeline_rank

    def layers_of_stages(self) -> list[Span]:
        """Return the layers of each pipeline stage. Collective in the first call."""
        if self._spans is None:
            spans = [self._layers]
            if self._group is not None:
                spans = [(0, 0)] * self._layout.world_size
                dist.all_gather_object(spans, self._layers, group=self._group)
            self._spans = spans[:: self._layout.tensor_size]
        return self._spans

    def send(self, values: torch.Tensor, stage: int) -> None:
        """Send values to the rank of another stage with the same tensor rank."""
        data = values.contiguous().cpu().view(torch.uint8)
        dist.send(data, dst=self._rank_of(stage), group=self._group)

    def receive(self, values: torch.Tensor, stage: int) -> torch.Tensor:
        """Receive values from the rank of another stage with the same tensor rank, of the form of `values`."""
        data = torch.empty(values.shape, dtype=values.dtype).view(torch.uint8)
        dist.recv(data, src=self._rank_of(stage), group=self._group)
        return data.view(values.dtype).to(values.device)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are true on any rank. Collective; all ranks have equally many."""
        if self._group is None:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in found.tolist()]

    def gather(self, part: Any) -> list[Any] | None:  # noqa: ANN401 - what can be pickled
        """Return the parts of all ranks on rank 0, None on the others. Collective."""
        if self._group is None:
            return [part]
        parts = [None] * self._layout.world_size if self._layout.rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self._group)
        return parts

    def _rank_of(self, stage: int) -> int:
        return stage * self._layout.tensor_size + self._layout.tensor_rank
