"""Attention computed again for some queries, from queries after rotation and cached keys, with 32 bits.

Shapes: L layers, B sequences (at prefill 1), Q queries of each, H query heads and G key heads of this rank, R = H / G,
D channels of a head, T keys. Fused kernels do not return their probabilities; this is the same rule written out, for as
many layers at once as a bounded buffer takes.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.scope.protocol import ATLAS

BUFFER_NUMBERS = 1 << 24
"""Most probabilities at a time: 64 MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRule:
    """Which keys a query sees, and how scores are scaled."""

    scale: float
    window: int | None
    """Tokens before itself; None: all."""


@torch.no_grad()
def probabilities(
    query_LBQHD: torch.Tensor, keys_LBTGD: torch.Tensor, positions_BQ: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """fp32 [L, B, H, Q, T]: what each query gives to each key; 0 at keys that it does not see."""
    (layers, batch, queries, heads, channels), (_, _, length, groups, _) = query_LBQHD.shape, keys_LBTGD.shape
    query = query_LBQHD.reshape(layers, batch, queries, groups, heads // groups, channels).permute(0, 1, 3, 4, 2, 5)
    keys = keys_LBTGD.permute(0, 1, 3, 4, 2)
    count = layers * batch * groups
    scores = _product(query.reshape(count, -1, channels), keys.reshape(count, channels, length))
    scores = scores.view(layers, batch, heads, queries, length).mul_(rule.scale)
    key_T = torch.arange(length, device=scores.device)
    hidden_BQT = key_T > positions_BQ[..., None]
    if rule.window is not None:
        hidden_BQT |= key_T < positions_BQ[..., None] - rule.window
    return scores.masked_fill_(hidden_BQT[:, None], float("-inf")).softmax(-1)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """fp32 products: those of 16-bit numbers are exact, and summed with 32 bits."""
    if left.is_cuda and left.dtype in {torch.bfloat16, torch.float16}:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def head_measures(chances: torch.Tensor, positions_BQ: torch.Tensor, rule: AttentionRule) -> dict[str, torch.Tensor]:
    """Measure each query, [L, B, Q, H]: entropy over the logarithm of keys seen, largest probability, that of key 0."""
    seen_BQ = positions_BQ + 1 if rule.window is None else (positions_BQ + 1).clamp(max=rule.window + 1)
    most_BQ = seen_BQ.float().log().clamp(min=1e-9)
    entropy = torch.special.entr(chances).sum(-1) / most_BQ[:, None]
    found = {"head.entropy": entropy, "head.max": chances.amax(-1), "head.sink": chances[..., 0]}
    return {name: values.transpose(-1, -2) for name, values in found.items()}


def slabs(layers: int, layer_numbers: int) -> Iterator[slice]:
    """Layers that are computed together."""
    at_once = max(1, BUFFER_NUMBERS // max(1, layer_numbers))
    for first in range(0, layers, at_once):
        yield slice(first, min(layers, first + at_once))


class AttentionAtlas:
    """Pictures of all heads of one prompt, [L, H, 8, 8]: largest probabilities, over all queries and keys of a cell.

    Chunks of the prompt are added as they are read; queries are taken in blocks, so that no picture of full size is
    ever in memory.
    """

    def __init__(self, layers: int, heads: int, length: int, device: torch.device) -> None:
        self.cells = torch.zeros((layers, heads, ATLAS, ATLAS), device=device)
        self._edges = [index * length // ATLAS for index in range(ATLAS + 1)]

    @torch.no_grad()
    def add(self, query_LQHD: torch.Tensor, keys_LTGD: torch.Tensor, start: int, rule: AttentionRule) -> None:
        """Queries that follow each other from position `start` on, and all keys up to the last of them."""
        layers, queries, heads, _ = query_LQHD.shape
        row = heads * keys_LTGD.size(1)
        block = max(1, min(queries, BUFFER_NUMBERS // row))
        for part in slabs(layers, block * row):
            for first in range(0, queries, block):
                self._add(part, query_LQHD[part, first : first + block], keys_LTGD[part], start + first, rule)

    def _add(
        self, part: slice, query_LQHD: torch.Tensor, keys_LTGD: torch.Tensor, start: int, rule: AttentionRule
    ) -> None:
        end = start + query_LQHD.size(1)
        positions_1Q = torch.arange(start, end, device=query_LQHD.device)[None]
        chances = probabilities(query_LQHD[:, None], keys_LTGD[:, None], positions_1Q, rule).squeeze(1)
        self._pool(part, _columns(chances, self._edges), start)

    def _pool(self, part: slice, largest_LHQA: torch.Tensor, start: int) -> None:
        end = start + largest_LHQA.size(2)
        for place in range(ATLAS):
            first, last = max(self._edges[place], start), min(self._edges[place + 1], end)
            if first < last:
                cells = self.cells[part, :, place]
                torch.maximum(cells, largest_LHQA[:, :, first - start : last - start].amax(2), out=cells)


def _columns(chances: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    """[L, H, Q, columns]: the largest of each; 0 where the keys do not reach."""
    length = chances.size(-1)
    spans = [(first, min(last, length)) for first, last in itertools.pairwise(edges)]
    none = chances.new_zeros(chances.shape[:-1])
    return torch.stack([chances[..., a:b].amax(-1) if a < b else none for a, b in spans], dim=-1)


def bucket(count: int, most: int) -> int:
    """The smallest power of two, 64 at least, that holds `count`: so that decode steps have few shapes."""
    return min(max(64, 1 << math.ceil(math.log2(max(count, 1)))), most)
