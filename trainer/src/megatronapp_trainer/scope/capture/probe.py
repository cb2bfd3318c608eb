"""Exact numbers of sites for a probe: what its rows gave, without any reduction."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatronapp_common.scope.protocol_requests import ProbeSite
from megatronapp_trainer.hooks.hook_collector import HookCollector, Layers
from megatronapp_trainer.hooks.sites import ATTENTION, ShardAxis, Site, site_of
from megatronapp_trainer.scope.capture import attention_recompute
from megatronapp_trainer.scope.capture.rank_shard import RankShard, Span
from megatronapp_trainer.scope.capture.reductions import QUERIES, PromptChunk, Reductions, codes
from megatronapp_trainer.scope.capture.tracked_requests import PromptRead
from megatronapp_trainer.scope.transfer.device_copy import NamedTensor

LOGITS = "logits"


def name_of(probe_site: ProbeSite) -> str:
    """Return the name under which a site of a probe is kept."""
    return _site(probe_site).name


def sites_of(probe_sites: Sequence[ProbeSite]) -> dict[str, Site]:
    """Return the sites that a probe reads. Raises CaptureError."""
    return {site.name: site for site in map(_site, probe_sites)}


def layers_of(works: Sequence[PromptChunk]) -> dict[str, Layers]:
    """Return the layers of each site that are kept: those of the probes, if no run is captured."""
    if any(work.tracked.recipe is not None for work in works):
        return {}
    layers_by_site: dict[str, set[int]] = {}
    for work in works:
        for probe_site, site in zip(work.tracked.sites, map(name_of, work.tracked.sites), strict=True):
            layers_by_site.setdefault(site, set()).update((*probe_site.layers, -1))
    return {name: frozenset(layers) for name, layers in layers_by_site.items()}


def _site(probe_site: ProbeSite) -> Site:
    return QUERIES if probe_site.site == ATTENTION else site_of(probe_site.site, rotary=probe_site.rotary)


class ProbeReader:
    """Probes of one rank."""

    def __init__(self, seen: HookCollector, shard: RankShard, reductions: Reductions) -> None:
        self._seen = seen
        self._shard = shard
        self._reductions = reductions

    @torch.no_grad()
    def read(self, work: PromptChunk, group: int, rows: slice, logit_rows: slice) -> Iterator[NamedTensor]:
        """Tensors of a probe, of the rows of this chunk: `rows` of what was kept, `logit_rows` of the logits."""
        for probe_site in work.tracked.sites:
            is_attention = probe_site.site == ATTENTION
            for found in (
                self._of_attention(work, probe_site) if is_attention else self._of(probe_site, rows, logit_rows)
            ):
                values = found.values.half() if probe_site.code == "f16" else found.values
                yield dataclasses.replace(found, values=values, group=group)

    def _of(self, probe_site: ProbeSite, rows: slice, logit_rows: slice) -> Iterator[NamedTensor]:
        site = _site(probe_site)
        layers = [layer for layer in self._seen.layers(site.name) if not site.per_layer or layer in probe_site.layers]
        if not layers or (site.axis is ShardAxis.WHOLE and not self._shard.is_first_of_tensor):
            return
        known = self._seen.layers(site.name)
        stacked = self._seen.stacked(site.name)
        values = torch.stack([stacked[known.index(layer)] for layer in layers]).float()
        values = values[:, logit_rows if site.name == LOGITS else rows]
        if site.name == LOGITS:
            values = values[..., : self._shard.vocabulary]
        for part, span in self._shared(site, values, probe_site):
            header = {"site": probe_site.site, "replicated": site.axis is ShardAxis.WHOLE, **span}
            if site.name != probe_site.site:
                header["rotary"] = probe_site.rotary
            if site.per_layer:
                yield NamedTensor(name=probe_site.site, values=part, layers=tuple(layers), header=header)
            else:
                yield NamedTensor(name=probe_site.site, values=part[0], header=header)

    def _shared(
        self, site: Site, values: torch.Tensor, probe_site: ProbeSite
    ) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """A rank's part of the numbers, with what it is of the whole."""
        shard = self._shard
        if site.axis in {ShardAxis.HEADS, ShardAxis.KEY_HEADS}:
            span = shard.heads if site.axis is ShardAxis.HEADS else shard.key_heads
            for first, end in spans(span, probe_site.heads):
                yield values[:, :, first - span[0] : end - span[0]], {"heads": [first, end]}
        elif site.axis is ShardAxis.MLP:
            width = shard.mlp[1] - shard.mlp[0]
            for half in range(2 if shard.gated else 1):
                first = half * shard.ffn + shard.mlp[0]
                yield values[..., half * width : (half + 1) * width], {"features": [first, first + width]}
        elif site.axis is ShardAxis.FEATURES:
            width = values.size(-1)
            yield values, {"features": [width * shard.tp, width * (shard.tp + 1)]}
        else:
            yield values, {}

    def _of_attention(self, work: PromptChunk, probe_site: ProbeSite) -> Iterator[NamedTensor]:
        """[L, rows, heads, keys], as many keys as the longest prompt of the probe has."""
        shard = self._shard
        layers = [layer for layer in range(*shard.layers) if layer in probe_site.layers]
        known = self._seen.layers(QUERIES.name)
        if not layers or not known:
            return
        query_LNHD = torch.stack([self._seen.stacked(QUERIES.name)[known.index(layer)] for layer in layers])
        for first, end in spans(shard.heads, probe_site.heads):
            chosen = slice(first - shard.heads[0], end - shard.heads[0])
            parts = [self._rows(work, layers, query_LNHD, chosen, reading) for reading in work.reads_with_rows()]
            if parts:
                values = torch.cat(parts, dim=1)
                header = {"site": ATTENTION, "heads": [first, end], "replicated": False}
                values = codes(values) if probe_site.code == "u8s" else values
                yield NamedTensor(name=ATTENTION, values=values, layers=tuple(layers), header=header)

    def _rows(
        self,
        work: PromptChunk,
        layers: Sequence[int],
        query_LNHD: torch.Tensor,
        heads: slice,
        reading: tuple[PromptRead, slice],
    ) -> torch.Tensor:
        """Compute the rows of one prompt: [L, rows, heads, keys]."""
        read, rows = reading
        tokens_Q = work.tokens_U[rows]
        keys_LTGD = self._reductions.keys_of(read)
        positions_1Q = (tokens_Q - read.first_token + read.segment.start)[None]
        most = max(work.tracked.lengths)
        out = []
        for place, layer in enumerate(layers):
            keys = keys_LTGD[layer - self._shard.layers[0]]
            chances = attention_recompute.probabilities(
                query_LNHD[place].index_select(0, tokens_Q)[None, None],
                keys[None, None],
                positions_1Q,
                self._reductions.rule,
            )
            padded = torch.nn.functional.pad(chances[0, 0, heads], (0, most - chances.size(-1)))
            out.append(padded.transpose(0, 1))
        return torch.stack(out)


def spans(own: Span, requested: Sequence[int] | None) -> Iterator[Span]:
    """Heads of this rank that are wanted, as runs that follow each other; None: all of them."""
    heads = [head for head in range(*own) if requested is None or head in requested]
    for place, head in enumerate(heads):
        if place == 0 or heads[place - 1] != head - 1:
            end = head
            while end in heads:
                end += 1
            yield head, end
