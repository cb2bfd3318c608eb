"""Results of compared rows on rank 0, merged from the parts of all ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.comparison.rank_comparer import RankRows
from megatronapp_trainer.scope.comparison.shard_divergence import Divergence, merged


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResult:
    """Numbers of one row of a branch; arrays over all layers and heads of the model."""

    branch: int
    index: int
    divergence: Divergence
    drift: NDArray[np.float32] | None
    """[layers]."""
    heads: NDArray[np.float32] | None
    """[layers, heads]."""


def row_results(ranks: Sequence[RankRows], shard: RankShard) -> list[RowResult]:
    """Merge the parts of all ranks. `shard`: of any rank, for the sizes of the model."""
    divergence = [part.divergence for part in ranks if part.divergence is not None]
    drift = _whole(ranks, "drift", shard.num_layers)
    heads = _whole(ranks, "changes", shard.num_layers, shard.num_heads)
    return [
        RowResult(
            branch=branch,
            index=index,
            divergence=merged(np.concatenate([part[place] for part in divergence])),
            drift=None if drift is None else drift[place],
            heads=None if heads is None else heads[place],
        )
        for place, (branch, index) in enumerate(ranks[0].rows)
    ]


def _whole(ranks: Sequence[RankRows], name: str, *sizes: int) -> NDArray[np.float32] | None:
    """Join the parts of a quantity to [R, *sizes]; None where no rank has any."""
    found: Any = None
    for part in ranks:
        values = getattr(part, name)
        if values is None:
            continue
        if found is None:
            found = np.full((len(part.rows), *sizes), np.nan, "<f4")
        place = (slice(None), slice(*part.layers), slice(*part.heads))[: values.ndim]
        found[place] = values
    return found  # type: ignore[no-any-return] # None, or an array
