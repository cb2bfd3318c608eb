"""Scores of heads over a text, from their exact attention (Elhage et al. 2021; Olsson et al. 2022).

Shapes: L layers and H heads of this rank, Q queries of a block, T keys, S scores.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatronapp_common.scope.analysis_requests import HEAD_SCORES, HeadScoreRequest
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.hooks.sites import Site
from megatronapp_trainer.scope.analysis.chunk_values import AnalysisMemory, ChunkValues
from megatronapp_trainer.scope.analysis.logit_lens import FP32_BYTES
from megatronapp_trainer.scope.capture import attention_recompute
from megatronapp_trainer.scope.capture.attention_recompute import BUFFER_NUMBERS, AttentionRule
from megatronapp_trainer.scope.capture.rank_shard import RankShard, Span
from megatronapp_trainer.scope.capture.reductions import QUERIES

_CHANCE_BYTES = 16
"""Memory for each probability of a block: scores, their mask and softmax with 32 bits, and products."""
_WEIGHT_BYTES = 64
"""Memory for each pair of query and key: the weights of all scores with 32 bits, and their masks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSums:
    """Sums of a chunk over its queries, and the number of queries that each score is over."""

    layers: Span
    heads: Span
    sums: NDArray[np.float64]
    """[L, H, S], in the order of `HEAD_SCORES`."""
    counts: NDArray[np.int64]
    """[S]."""


class HeadScoreAnalysis:
    """The scores of the heads of one rank."""

    sites: Sequence[Site] = ()
    whole_sites: Sequence[Site] = (QUERIES,)

    def __init__(self, request: HeadScoreRequest, shard: RankShard, keys_LZTGD: torch.Tensor) -> None:
        self._ids = torch.tensor(request.ids, device=keys_LZTGD.device)
        self._shard = shard
        self._keys_LZTGD = keys_LZTGD
        self._rule = AttentionRule(scale=shard.scale, window=shard.window)

    def positions(self, segment: Segment) -> list[int]:
        """Return all positions of a segment."""
        return list(range(segment.start, segment.end))

    def memory(self, segment: Segment) -> AnalysisMemory:
        """Return the memory of the queries of all layers, and of a block of attention."""
        shard, tokens = self._shard, segment.end - segment.start
        heads = shard.heads[1] - shard.heads[0]
        values = tokens * heads * shard.head_width * (shard.layers[1] - shard.layers[0]) * FP32_BYTES
        queries = min(tokens, self._block_queries(segment))
        cells = queries * segment.end
        return AnalysisMemory(values=values, work=cells * (heads * _CHANCE_BYTES + _WEIGHT_BYTES))

    @torch.no_grad()
    def read(self, chunk: ChunkValues) -> HeadSums:
        """Return the sums over the queries of a chunk."""
        layers, heads = self._shard.layers, self._shard.heads
        sums = np.zeros((layers[1] - layers[0], heads[1] - heads[0], len(HEAD_SCORES)))
        counts = np.zeros(len(HEAD_SCORES), dtype=np.int64)
        for positions_Q, tokens in self._blocks(chunk):
            weights_SQT = score_weights(self._ids, positions_Q)
            counts += (weights_SQT.sum(2) > 0).sum(1).cpu().numpy()
            for place in range(len(sums)):
                query_QHD = chunk.sites[QUERIES.name].values[layers[0] + place][tokens]
                sums[place] += self._sums(query_QHD, place, chunk.segment.slot, positions_Q, weights_SQT)
        return HeadSums(layers=layers, heads=heads, sums=sums, counts=counts)

    def _blocks(self, chunk: ChunkValues) -> Iterator[tuple[torch.Tensor, slice]]:
        """Give positions of queries and their places among the tokens of the step, in blocks of bounded memory."""
        segment = chunk.segment
        block = self._block_queries(segment)
        for first in range(segment.start, segment.end, block):
            end = min(segment.end, first + block)
            start = chunk.tokens.start + first - segment.start
            yield torch.arange(first, end, device=self._ids.device), slice(start, start + end - first)

    def _block_queries(self, segment: Segment) -> int:
        row = (self._shard.heads[1] - self._shard.heads[0]) * segment.end
        return max(1, BUFFER_NUMBERS // row)

    def _sums(
        self,
        query_QHD: torch.Tensor,
        layer: int,
        slot: int,
        positions_Q: torch.Tensor,
        weights_SQT: torch.Tensor,
    ) -> NDArray[np.float64]:
        """Return [H, S] of one layer."""
        keys_TGD = self._keys_LZTGD[layer, slot, : weights_SQT.size(2)]
        chances_HQT = attention_recompute.probabilities(
            query_QHD[None, None], keys_TGD[None, None], positions_Q[None], self._rule
        )[0, 0]
        sums_HS: NDArray[np.float64] = torch.einsum("hqt,sqt->hs", chances_HQT, weights_SQT).double().cpu().numpy()
        return sums_HS


def score_weights(ids: torch.Tensor, positions_Q: torch.Tensor) -> torch.Tensor:
    """Return which keys count for each score and query: fp32 [S, Q, T] of 0 and 1.

    Previous: the key before the query. First: key 0 (not of query 0). Duplicate: earlier keys with the token of the
    query. Induction: keys that follow such a key, before the query.
    """
    length = int(positions_Q[-1]) + 1
    key_T = torch.arange(length, device=ids.device)
    query_Q1 = positions_Q[:, None]
    duplicate_QT = (ids[:length] == ids[positions_Q][:, None]) & (key_T < query_Q1)
    after_QT = torch.nn.functional.pad(duplicate_QT[:, :-1], (1, 0)) & (key_T < query_Q1)
    previous_QT = key_T == query_Q1 - 1
    first_QT = (key_T == 0) & (query_Q1 > 0)
    return torch.stack([previous_QT, first_QT, duplicate_QT, after_QT]).float()
