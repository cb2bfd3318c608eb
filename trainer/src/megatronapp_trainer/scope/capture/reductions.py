"""Reductions of a step on the device, launched after the forward pass, once for all layers.

Shapes as in `attention_recompute`; U reported rows of a chunk of prompts, P pinned heads. Nothing here waits for the
device or reads a value from it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cachetools
import torch

from megatronapp_common.scope.codes import TensorCode
from megatronapp_trainer.device.compiling import can_compile
from megatronapp_trainer.hooks.forward_observer import StepContext
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.hooks.sites import STAGE_INPUT, Site, site_of
from megatronapp_trainer.scope.capture import attention_recompute
from megatronapp_trainer.scope.capture.attention_recompute import AttentionAtlas, AttentionRule
from megatronapp_trainer.scope.capture.capture_spec import (
    CaptureSpec,
    PixelReductions,
    residual_measures,
    residual_sites,
)
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.capture.tracked_requests import PromptRead, TrackedRequest
from megatronapp_trainer.scope.transfer.device_copy import NamedTensor
from megatronapp_trainer.scope.transfer.frame_template import VERSION
from megatronapp_trainer.scope.transfer.part_frames import ATLAS, EVERY, TrackedRow
from megatronapp_trainer.scope.transfer.quantise import encode_into

QUERIES = dataclasses.replace(site_of("q"), name="attention q")
"""Queries of all tokens, not only of reported rows."""
Pins = Sequence[tuple[int, int]]
"""Layer and head, of the whole model."""
OnReductionStream = Callable[[], contextlib.AbstractContextManager[Any]]
"""Context that launches kernels and copies after those of earlier steps' reductions."""
MOST_RECIPES = 8
"""Reductions that are kept ready; one for each slot if there are more slots."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PcaBasis:
    """Axes of PCA, of the layers that this rank has, on its device."""

    version: int
    layers: tuple[int, ...]
    places: torch.Tensor
    """Places of these layers among those of this rank."""
    mean_L1H: torch.Tensor
    axes_LHC: torch.Tensor


def active_sites(recipe: CaptureSpec) -> frozenset[Site]:
    """Sites at which any rank of a tensor group looks for a recipe: the same on all of them.

    Filters, pixels and what is done with the numbers later are not in it: they change nothing in the forward pass.
    """
    names = (["q", "k", "v"] if recipe.qkv else []) + ["mlp1"] * recipe.mlp1 + ["mlp2"] * recipe.mlp2
    found = {site_of(name, rotary=recipe.rotary) for name in names} | set(residual_sites().values())
    found |= {QUERIES} if recipe.attention else set()
    return frozenset(found | {dataclasses.replace(site, reducers=(), pixels=0) for site in recipe.own})


class Reductions:
    """Reductions of one rank."""

    def __init__(self, seen: HookCollector, shard: RankShard, keys_LZTGD: torch.Tensor) -> None:
        self.basis: PcaBasis | None = None
        self.rule = AttentionRule(scale=shard.scale, window=shard.window)
        self._seen = seen
        self._shard = shard
        self._keys_LZTGD = keys_LZTGD
        self.device = keys_LZTGD.device
        self._has_kernels = keys_LZTGD.is_cuda and can_compile()
        self._pixels: cachetools.LRUCache[CaptureSpec, PixelReductions] = cachetools.LRUCache(
            max(MOST_RECIPES, keys_LZTGD.size(1))
        )
        self._pins: dict[int, torch.Tensor] = {}
        self._pinned_last: dict[int, list[tuple[int, int]]] = {}
        self._atlases: dict[str, AttentionAtlas] = {}

    @property
    def most_keys(self) -> int:
        """Most keys of a sequence."""
        return self._keys_LZTGD.size(2) - 1

    def warm_up(self) -> None:
        """Compile the kernels of a GPU, so that no request waits for it when the first capture begins."""
        keys_LBTGD = self._keys_LZTGD[:, :1]
        if not self._has_kernels or not keys_LBTGD.numel():
            return
        heads = self._shard.heads[1] - self._shard.heads[0]
        query_LBHD = keys_LBTGD.new_zeros((keys_LBTGD.size(0), 1, heads, keys_LBTGD.size(4)))
        positions_B = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._step_measures(query_LBHD, keys_LBTGD, positions_B)
        self._pinned(query_LBHD, keys_LBTGD[:, :, :64], positions_B, positions_B.new_zeros((3, 1)))

    def sites(self, recipe: CaptureSpec) -> dict[str, Site]:
        """Return the sites of a recipe. Raises ReductionPlanError or FilterError if it does not fit the model."""
        found = dict(self.pixels_of(recipe).sites)
        if self._shard.is_first_of_tensor:
            found |= residual_sites()
        if recipe.attention:
            found[QUERIES.name] = QUERIES
        return found

    def drop(self, run: str) -> None:
        """A run has ended."""
        for name in [name for name in self._atlases if name.startswith(f"{ATLAS}{run} ")]:
            del self._atlases[name]

    def set_pins(self, pins: Pins, most: int, on_stream: OnReductionStream) -> int:
        """Write the pinned heads for the next step, in `on_stream`: after the kernels that read those of earlier steps.

        How many places there are: `most` or more.
        """
        if most == 0:
            return 0
        count = 1 << (most - 1).bit_length()
        if self._pinned_last.get(count) == list(pins):
            return count
        self._pinned_last[count] = list(pins)
        first, group = self._shard.heads[0], self._keys_LZTGD.size(3)
        shared = (self._shard.heads[1] - first) // group
        table = [(layer - self._shard.layers[0], head - first, (head - first) // shared) for layer, head in pins]
        indices = torch.tensor(table + [(0, 0, 0)] * (count - len(pins))).t().contiguous()
        with on_stream():
            if count not in self._pins:
                self._pins[count] = torch.zeros(3, count, dtype=torch.int64, device=self.device)
            source = indices.pin_memory() if self.device.type == "cuda" else indices
            self._pins[count].copy_(source, non_blocking=True)
        return count

    @torch.no_grad()
    def decode(
        self, positions_N: torch.Tensor, recipes: Sequence[CaptureSpec], pins: int, attended: int
    ) -> list[NamedTensor]:
        """Reduce a decode step, for all slots: tensors of each recipe, by the number of its group."""
        found = [tensor for group, recipe in enumerate(recipes) for tensor in self._of_recipe(recipe, group)]
        if not any(recipe.attention for recipe in recipes) or not self._seen.layers(QUERIES.name):
            return found
        query_LBHD = self._seen.stacked(QUERIES.name)
        keys_LBTGD = self._keys_LZTGD[:, : positions_N.size(0), :attended]
        measures = self._step_measures(query_LBHD, keys_LBTGD, positions_N)
        for group, recipe in enumerate(recipes):
            if recipe.attention:
                found += self._measured(measures, group)
        if pins:
            rows = self._pinned(query_LBHD, keys_LBTGD, positions_N, self._pins[pins])
            found.append(NamedTensor(name="pinned", values=rows, group=EVERY))
        return found

    @torch.no_grad()
    def prefill(self, works: "Sequence[PromptChunk]", context: StepContext, count: int) -> list[NamedTensor]:
        """Reduce a chunk of prompts: tensors over all `count` reported rows, by group; pictures of prompts."""
        recipes = capture_specs_of(works)
        found = [tensor for group, recipe in enumerate(recipes) for tensor in self._of_recipe(recipe, group)]
        with_attention = [work for work in works if work.tracked.recipe is not None and work.tracked.recipe.attention]
        if with_attention and self._seen.layers(QUERIES.name):
            query_LNHD = self._seen.stacked(QUERIES.name)
            measures = self._prompt_measures(with_attention, query_LNHD, context, count)
            for group, recipe in enumerate(recipes):
                found += self._measured(measures, group) if recipe.attention else []
            for work in with_attention:
                found += self._pictures(work, query_LNHD)
        return found

    def _of_recipe(self, recipe: CaptureSpec, group: int) -> Iterator[NamedTensor]:
        for tensor in self.pixels_of(recipe).compute(self._seen):
            yield dataclasses.replace(tensor, group=group)
        if not self._shard.is_first_of_tensor or not (layers := self._seen.layers("residual")):
            return
        after_LNH = self._seen.stacked("residual")
        before_LNH = torch.cat([self._seen.stacked(STAGE_INPUT.name), after_LNH[:-1]])
        header = {"site": "residual", "replicated": True}
        for name, values in residual_measures(before_LNH, after_LNH).items():
            yield NamedTensor(name=name, values=values, layers=tuple(layers), header=header, group=group)
        if recipe.pca and self.basis is not None and self.basis.layers:
            points = self._projected(after_LNH, self.basis)
            of_basis = header | {VERSION: self.basis.version}
            yield NamedTensor(name="pca", values=points, layers=self.basis.layers, header=of_basis, group=group)

    @staticmethod
    def _projected(residual_LNH: torch.Tensor, basis: PcaBasis) -> torch.Tensor:
        chosen = residual_LNH.index_select(0, basis.places).float()
        return torch.bmm(chosen - basis.mean_L1H, basis.axes_LHC)

    def pixels_of(self, recipe: CaptureSpec) -> PixelReductions:
        """Its filters on the device. A CUDA graph reads their memory: who keeps the graph keeps them."""
        if recipe not in self._pixels:
            if self._pixels.currsize == self._pixels.maxsize:  # free the memory before the next filters need it
                self._pixels.popitem()
            self._pixels[recipe] = PixelReductions(recipe, self._shard, self.device)
        return self._pixels[recipe]

    def _measures(
        self, query_LBQHD: torch.Tensor, keys_LBTGD: torch.Tensor, positions_BQ: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """[L, B, Q, H] each."""
        layers, batch, queries, heads, _ = query_LBQHD.shape
        parts = []
        for part in attention_recompute.slabs(layers, batch * queries * heads * keys_LBTGD.size(2)):
            chances = attention_recompute.probabilities(query_LBQHD[part], keys_LBTGD[part], positions_BQ, self.rule)
            parts.append(attention_recompute.head_measures(chances, positions_BQ, self.rule))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _measured(self, measures: Mapping[str, torch.Tensor], group: int) -> list[NamedTensor]:
        header = {"site": "attention", "heads": list(self._shard.heads), "replicated": False}
        layers = tuple(range(*self._shard.layers))
        return [
            NamedTensor(name=name, values=values, layers=layers, header=header, group=group)
            for name, values in measures.items()
        ]

    def _step_measures(
        self, query_LBHD: torch.Tensor, keys_LBTGD: torch.Tensor, positions_B: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """[L, B, H] each, of a decode step."""
        if self._has_kernels:
            from megatronapp_trainer.scope.capture import attention_kernels

            planes = attention_kernels.head_measures(query_LBHD, keys_LBTGD, positions_B, self.rule)
            return {name: plane.transpose(0, 1) for name, plane in zip(MEASURES, planes, strict=True)}
        found = self._measures(query_LBHD[:, :, None], keys_LBTGD, positions_B[:, None])
        return {name: values.squeeze(2) for name, values in found.items()}

    def _pinned(
        self, query_LBHD: torch.Tensor, keys_LBTGD: torch.Tensor, positions_B: torch.Tensor, pins_3P: torch.Tensor
    ) -> torch.Tensor:
        """Codes of the rows of pinned heads, [P, B, T]; for all groups."""
        if self._has_kernels:
            from megatronapp_trainer.scope.capture import attention_kernels

            return attention_kernels.pinned_codes(query_LBHD, keys_LBTGD, positions_B, pins_3P, self.rule)
        layers_P, heads_P, groups_P = pins_3P.unbind()
        query_PBD = query_LBHD.transpose(1, 2)[layers_P, heads_P]
        keys_PBTD = keys_LBTGD.permute(0, 3, 1, 2, 4)[layers_P, groups_P]
        rows = attention_recompute.probabilities(
            query_PBD[:, :, None, None], keys_PBTD[:, :, :, None], positions_B[:, None], self.rule
        )
        return codes(rows[:, :, 0, 0])

    def _prompt_measures(
        self, works: "Sequence[PromptChunk]", query_LNHD: torch.Tensor, context: StepContext, count: int
    ) -> dict[str, torch.Tensor]:
        """[L, U, H] each; 0 in rows of those who did not ask."""
        shape = (query_LNHD.size(0), count, query_LNHD.size(2))
        out = {name: torch.zeros(shape, device=self.device) for name in MEASURES}
        for work in works:
            for read, rows in work.reads_with_rows():
                tokens_Q = work.tokens_U[rows]
                query_L1QHD = query_LNHD.index_select(1, tokens_Q)[:, None]
                keys_L1TGD = self.keys_of(read)[:, None]
                positions_1Q = context.positions_N.index_select(0, tokens_Q)[None]
                for name, values in self._measures(query_L1QHD, keys_L1TGD, positions_1Q).items():
                    out[name][:, rows] = values.squeeze(1)
        return out

    def keys_of(self, read: PromptRead) -> torch.Tensor:
        """[L, T, G, D]: all keys of a sequence up to what has been read."""
        return self._keys_LZTGD[:, read.segment.slot, : read.segment.end]

    def _pictures(self, work: "PromptChunk", query_LNHD: torch.Tensor) -> Iterator[NamedTensor]:
        for read in work.reads:
            name = picture_name(work.tracked, read)
            if name not in self._atlases:
                length = work.tracked.lengths[read.sample]
                self._atlases[name] = AttentionAtlas(query_LNHD.size(0), query_LNHD.size(2), length, self.device)
            tokens = slice(read.first_token, read.first_token + len(read.segment.tokens))
            self._atlases[name].add(query_LNHD[:, tokens], self.keys_of(read), read.segment.start, self.rule)
            if read.ends:
                cells = codes(self._atlases.pop(name).cells)
                header = {"site": "attention", "heads": list(self._shard.heads), "replicated": False}
                layers = tuple(range(*self._shard.layers))
                yield NamedTensor(name=name, values=cells, layers=layers, header=header, group=EVERY, has_rows=False)


MEASURES = ("head.entropy", "head.max", "head.sink")


def picture_name(tracked: TrackedRequest, read: PromptRead) -> str:
    """Return the name of a prompt's atlas in the packed buffer."""
    return f"{ATLAS}{tracked.name} {read.sample}"


def codes(chances: torch.Tensor) -> torch.Tensor:
    """Encode probabilities as u8s."""
    data = torch.empty(chances.shape, dtype=torch.uint8, device=chances.device)
    encode_into(TensorCode.U8S, chances, data)
    return data


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptChunk:
    """Tokens of one run or probe in a chunk of prompts."""

    tracked: TrackedRequest
    reads: Sequence[PromptRead]
    reported_rows: Sequence[TrackedRow]
    rows: slice
    """Its rows among all reported rows of the chunk."""
    tokens_U: torch.Tensor
    """On the device: all reported rows, as places among the tokens of the chunk."""

    def reads_with_rows(self) -> Iterator[tuple[PromptRead, slice]]:
        """Give each prompt and its rows among all reported rows."""
        first = self.rows.start
        for read in self.reads:
            count = len(self.tracked.rows_of(read, decode=False))
            if count:
                yield read, slice(first, first + count)
            first += count


def capture_specs_of(works: Sequence[PromptChunk]) -> tuple[CaptureSpec, ...]:
    """Different recipes, in order; their places are the groups."""
    return tuple(dict.fromkeys(work.tracked.recipe for work in works if work.tracked.recipe is not None))
