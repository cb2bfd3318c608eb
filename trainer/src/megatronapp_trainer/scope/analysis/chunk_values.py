"""Values of a step that an analysis reads: the tokens of its text, and its sites at the requested rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.hooks.hook_collector import SiteValues
from megatronapp_trainer.hooks.sites import Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkValues:
    """A chunk of the text of one analysis, after its forward pass."""

    segment: Segment
    positions: Sequence[int]
    """Positions of the rows that were kept, in the order of the values."""
    rows: slice
    """Places of these rows among those of all analyses of the step."""
    tokens: slice
    """Places of the segment among all tokens of the step, for sites of which every row was kept."""
    sites: Mapping[str, SiteValues]

    def value(self, site: Site, layer: int = -1) -> torch.Tensor:
        """Return the rows of a site without a bias that the module leaves to its caller."""
        return self.sites[site.name].values[layer][self.rows]

    def bias(self, site: Site, layer: int) -> torch.Tensor | None:
        """Return the bias that the module leaves to its caller, if it has one."""
        return self.sites[site.name].biases.get(layer)

    def layers(self, site: Site) -> list[int]:
        """Return the layers of this rank whose values were kept."""
        return sorted(self.sites[site.name].values) if site.name in self.sites else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalysisMemory:
    """Memory that an analysis takes for a chunk on one rank, in bytes; an upper bound."""

    values: int
    """Values of sites, from the forward pass on."""
    work: int
    """Tensors that are computed from them."""


class ChunkAnalysis(Protocol):
    """An analysis on one rank."""

    sites: Sequence[Site]
    """Sites whose requested rows it reads."""
    whole_sites: Sequence[Site]
    """Sites whose rows of all tokens it reads."""

    def positions(self, segment: Segment) -> list[int]:
        """Return the positions of a segment that it reads; none: it ignores the step."""

    def memory(self, segment: Segment) -> AnalysisMemory:
        """Return the memory that a segment takes."""

    def read(self, chunk: ChunkValues) -> Any:  # noqa: ANN401 - a part of the result that can be pickled
        """Return this rank's part of the result of a chunk. May exchange values with the other ranks."""
