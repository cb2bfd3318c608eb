"""Logit lens: the residual after any layer through the final norm and the unembedding (nostalgebraist 2020).

Shapes: R rows, H hidden size, V vocabulary, K likeliest tokens. Residuals of a layer are on its stage, the unembedding
is on the last one: the other stages send it their rows, layer by layer. There all tensor ranks compute the logits with
the kernels of generation, in blocks of bounded memory, and the first of them reduces them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatronapp_common.scope.analysis_requests import LensRequest
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.hooks.sites import Site, site_of
from megatronapp_trainer.scope.analysis.chunk_values import AnalysisMemory, ChunkValues
from megatronapp_trainer.scope.analysis.rank_exchange import RankExchange
from megatronapp_trainer.scope.capture.rank_shard import RankShard

BLOCK_NUMBERS = 1 << 24
"""Most logits at a time: 64 MiB with 32 bits."""
FP32_BYTES = 4
_LOGIT_BYTES = 32
"""Most memory for each logit of a block: the logits as the model computes them, and five tensors with 32 bits."""
NO_TARGET = -1
"""Rank of the token that follows where none is known."""
RESIDUAL = site_of("residual")
Unembed = Callable[[torch.Tensor], torch.Tensor]
"""From residuals [R, H] of the last stage to logits [R, V] without padding, on all of its tensor ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LensRows:
    """Numbers of some rows at some layers, both in order: [L, R, ..]."""

    token: NDArray[np.uint32]
    """Likeliest tokens, [L, R, K]."""
    logprob: NDArray[np.float32]
    """Their log-probabilities."""
    entropy: NDArray[np.float32]
    """Entropy of the whole distribution in nats."""
    followed: NDArray[np.float32]
    """Rank and log-probability of watched tokens, [L, R, watched, 2]: the one that follows, then the requested one."""


class LensAnalysis:
    """The lens of one rank."""

    sites: Sequence[Site] = (RESIDUAL,)
    whole_sites: Sequence[Site] = ()

    def __init__(self, request: LensRequest, shard: RankShard, exchange: RankExchange, unembed: Unembed) -> None:
        self._request = request
        self._shard = shard
        self._exchange = exchange
        self._unembed = unembed

    def positions(self, segment: Segment) -> list[int]:
        """Return the requested rows of a segment."""
        first, end = self._request.rows
        return list(range(max(first, segment.start), min(end, segment.end)))

    def memory(self, segment: Segment) -> AnalysisMemory:
        """Return the memory of the residuals of all layers of this rank, and of a block of logits on the last stage."""
        rows, shard = len(self.positions(segment)), self._shard
        values = rows * shard.hidden * (shard.layers[1] - shard.layers[0]) * FP32_BYTES
        if self._exchange.stage != self._exchange.last_stage:
            return AnalysisMemory(values=values, work=0)
        logits = min(rows, _block_rows(shard.vocabulary)) * shard.vocabulary
        return AnalysisMemory(values=values, work=logits * _LOGIT_BYTES + rows * shard.hidden * FP32_BYTES)

    @torch.no_grad()
    def read(self, chunk: ChunkValues) -> LensRows | None:
        """Return the numbers of a chunk on the first rank of the last stage, None on the others."""
        spans = self._exchange.layers_of_stages()
        if self._exchange.stage != self._exchange.last_stage:
            for layer in self._layers_of(spans[self._exchange.stage]):
                self._exchange.send(chunk.value(RESIDUAL, layer), self._exchange.last_stage)
            return None
        found: dict[int, torch.Tensor] = {}
        for stage, span in enumerate(spans):
            for layer in self._layers_of(span):
                found[layer] = self._columns(self._residual(chunk, layer, stage), chunk.positions)
        if not self._shard.is_first_of_tensor:
            return None
        table = torch.stack([found[layer] for layer in self._request.layers]).cpu().numpy()
        top = self._top
        return LensRows(
            token=table[..., :top].astype(np.uint32),
            logprob=table[..., top : 2 * top].astype(np.float32),
            entropy=table[..., 2 * top].astype(np.float32),
            followed=table[..., 2 * top + 1 :].reshape(*table.shape[:2], -1, 2).astype(np.float32),
        )

    @property
    def _top(self) -> int:
        return min(self._request.top, self._shard.vocabulary)

    def _layers_of(self, span: tuple[int, int]) -> list[int]:
        return [layer for layer in sorted(set(self._request.layers)) if span[0] <= layer < span[1]]

    def _residual(self, chunk: ChunkValues, layer: int, stage: int) -> torch.Tensor:
        """Return [R, H] of a layer of any stage."""
        if stage == self._exchange.last_stage:
            return chunk.value(RESIDUAL, layer)
        like = self._unembedded_like(chunk)
        return self._exchange.receive(like, stage)

    def _unembedded_like(self, chunk: ChunkValues) -> torch.Tensor:
        """Return rows of this stage, whose form is that of all stages."""
        rows = next(iter(chunk.sites[RESIDUAL.name].values.values()))
        return rows.new_empty((len(chunk.positions), rows.size(-1)))

    def _columns(self, residual_RH: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Reduce each row: fp64 [R, tokens, log-probabilities, entropy, rank and log-probability of watched ones]."""
        block = _block_rows(self._shard.vocabulary)
        columns = []
        for first in range(0, len(positions), block):
            logits_RV = self._unembed(residual_RH[first : first + block]).float()
            watched_RW = self._watched(positions[first : first + block]).to(logits_RV.device)
            columns.append(reduced(logits_RV, self._top, watched_RW))
        return torch.cat(columns)

    def _watched(self, positions: Sequence[int]) -> torch.Tensor:
        """Return int64 [R, W] of the token that follows each row, -1 where none is known, and of the requested one."""
        ids, token = self._request.ids, self._request.token
        following = [ids[place + 1] if place + 1 < len(ids) else NO_TARGET for place in positions]
        requested = [] if token is None else [[token] * len(following)]
        return torch.tensor([following, *requested]).t()


def _block_rows(vocabulary: int) -> int:
    return max(1, BLOCK_NUMBERS // vocabulary)


def reduced(logits_RV: torch.Tensor, top: int, watched_RW: torch.Tensor) -> torch.Tensor:
    """Reduce logits to fp64 [R, 2 top + 1 + 2 W], which holds tokens exactly.

    The rank of a watched token is the number of tokens with a larger logit; token -1 has rank -1 and NaN.
    """
    total_R1 = logits_RV.logsumexp(1, keepdim=True)
    best_RK, token_RK = logits_RV.topk(top, dim=1)
    logs_RV = logits_RV - total_R1
    entropy_R1 = -(logs_RV.exp() * logs_RV).sum(1, keepdim=True)
    parts = [token_RK.double(), (best_RK - total_R1).double(), entropy_R1.double()]
    for token_R in watched_RW.unbind(1):
        known_R1 = (token_R != NO_TARGET)[:, None]
        logit_R1 = logits_RV.gather(1, token_R.clamp(min=0)[:, None])
        rank_R1 = (logits_RV > logit_R1).sum(1, keepdim=True)
        parts.append(torch.where(known_R1, rank_R1.double(), float(NO_TARGET)))
        parts.append(torch.where(known_R1, (logit_R1 - total_R1).double(), float("nan")))
    return torch.cat(parts, 1)
