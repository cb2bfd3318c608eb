"""Commands of rank 0 to all ranks about comparisons, sent through the engine."""

import dataclasses

TOPIC = "comparison"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginComparison:
    """Begin to compare the branches of a name."""

    name: str
    drift: bool = False
    """Measure the residual after each layer."""
    heads: bool = False
    """Measure the output of each head."""
    lasting: bool = False
    """Keep the reference until the end: several branches are compared with it one after another."""
    watched: int | None = None
    """Token whose log-probability is reported instead of that of the reference's token."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectRows:
    """Gather the compared rows on rank 0. `number`: returned with them."""

    name: str
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndComparison:
    """Free what the ranks hold of a comparison."""

    name: str


ComparisonCommand = BeginComparison | CollectRows | EndComparison
