"""Core attention over the cache, which replaces the model's own while it generates.

megatron-core's attention modules stay unchanged: they make queries, keys and values, call core attention, and project
its result. Rotation happens here, in a separate module, so that forward hooks see queries and keys before it (its
input) and after it (its output), at prefill and at decode alike.

Shapes: N tokens of the step, packed; B sequences; H query heads and G key heads of this rank, R = H / G, D channels of
a head; Z slots, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.model.kv_cache import LayerKvCache

Attend = Callable[[torch.Tensor, LayerKvCache], torch.Tensor]
"""Function from queries [N, H, D] and the cache, which holds the step's own keys already, to context [N, H, D]."""


@dataclasses.dataclass(kw_only=True, slots=True)
class AttentionStep:
    """Inputs that all layers of one step share."""

    rows_N: torch.Tensor
    """Row of each token in the flat cache."""
    cos_N1D: torch.Tensor | None
    sin_N1D: torch.Tensor | None
    """Sines of the rotary angles at the tokens' positions, the first half negated; None without rotation."""
    attend: Attend
    fused: bool = False
    """Rotate by the compiled function."""


class CurrentStep:
    """Holder of the step that is being computed, for the layers."""

    def __init__(self) -> None:
        self.step: AttentionStep | None = None

    @property
    def current(self) -> AttentionStep:
        """Return the step. Layers of a generating model cannot be called outside one."""
        if self.step is None:
            raise RuntimeError("a model that generates was called outside a step of its engine")
        return self.step


class Rotation(torch.nn.Module):
    """Rotary positions, or nothing where the model has none. Queries [N, H, D] and keys [N, G, D] in, the same out."""

    def __init__(self, holder: CurrentStep) -> None:
        super().__init__()
        self._holder = holder

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate both by the positions of the step."""
        step = self._holder.current
        if step.cos_N1D is None or step.sin_N1D is None:
            return query, key
        rotate = _fused_rotation() if step.fused else rotated_pair
        return rotate(query, key, step.cos_N1D, step.sin_N1D)


def rotated_pair(
    query_NHD: torch.Tensor, key_NGD: torch.Tensor, cos_N1D: torch.Tensor, signed_sin_N1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys in one function, so that it compiles to as few kernels as possible."""
    return rotated(query_NHD, cos_N1D, signed_sin_N1D), rotated(key_NGD, cos_N1D, signed_sin_N1D)


@functools.cache
def _fused_rotation() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(rotated_pair, dynamic=False)


def rotated(heads_NHD: torch.Tensor, cos_N1D: torch.Tensor, signed_sin_N1D: torch.Tensor) -> torch.Tensor:
    """Rotate the channels that the angles cover, halves against each other (Su et al. 2021); the others pass."""
    width = cos_N1D.size(-1)
    turning, passing = heads_NHD[..., :width], heads_NHD[..., width:]
    swapped = torch.cat((turning[..., width // 2 :], turning[..., : width // 2]), dim=-1)
    turned = torch.addcmul(turning * cos_N1D, swapped, signed_sin_N1D)
    return turned if passing.size(-1) == 0 else torch.cat((turned, passing), dim=-1)


class CachedAttention(torch.nn.Module):
    """Replacement of megatron-core's core attention: query [N, 1, H, D], key and value [N, 1, G, D] -> [N, 1, HD]."""

    def __init__(self, holder: CurrentStep, cache: LayerKvCache) -> None:
        super().__init__()
        self.rotation = Rotation(holder)
        self._holder = holder
        self._cache = cache

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: torch.Tensor | None,
        **_options: Any,  # noqa: ANN401 - other arguments of megatron-core; none of them applies here
    ) -> torch.Tensor:
        """Add the step's keys and values to the cache and attend to all that its queries may see."""
        step = self._holder.current
        query_NHD, key_NGD = self.rotation(query.squeeze(1), key.squeeze(1))
        self._cache.write(step.rows_N, key_NGD, value.squeeze(1))
        context: torch.Tensor = step.attend(query_NHD, self._cache).flatten(1).unsqueeze(1)
        return context


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillAttention:
    """Attention of each segment to its own sequence up to each token; it may begin anywhere in the prompt."""

    segments: tuple[Segment, ...]
    scale: float
    window: int | None
    """Number of tokens that a query sees before itself; None: all."""

    def __call__(self, query_NHD: torch.Tensor, cache: LayerKvCache) -> torch.Tensor:
        """Call the fused kernel once per segment."""
        parts = torch.split(query_NHD, [len(segment.tokens) for segment in self.segments])
        return torch.cat(
            [self._segment(part, segment, cache) for part, segment in zip(parts, self.segments, strict=True)]
        )

    def _segment(self, query_NHD: torch.Tensor, segment: Segment, cache: LayerKvCache) -> torch.Tensor:
        keys_TGD = cache.keys_ZTGD[segment.slot, : segment.end]
        values_TGD = cache.values_ZTGD[segment.slot, : segment.end]
        context_1HND = scaled_dot_product_attention(
            query_NHD.transpose(0, 1).unsqueeze(0),
            keys_TGD.transpose(0, 1).unsqueeze(0),
            values_TGD.transpose(0, 1).unsqueeze(0),
            attn_mask=self._mask(segment, query_NHD.device),
            scale=self.scale,
            enable_gqa=query_NHD.size(1) != keys_TGD.size(1),
        )
        return context_1HND.squeeze(0).transpose(0, 1)

    def _mask(self, segment: Segment, device: torch.device) -> torch.Tensor:
        """Return true at the keys to attend to. Without a window it is a rule that the kernels know, not a tensor."""
        if self.window is None or segment.end <= self.window:
            mask: torch.Tensor = causal_lower_right(len(segment.tokens), segment.end)
            return mask
        query_N1 = torch.arange(segment.start, segment.end, device=device)[:, None]
        key_T = torch.arange(segment.end, device=device)
        return (key_T <= query_N1) & (key_T >= query_N1 - self.window)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedDecode:
    """Attention of one token per slot to the first T of its slot, under a mask. Any device, any type."""

    mask_B11T: torch.Tensor
    """Mask added to the scores, in the model's type: made once for all layers, and not once in each of them."""
    scale: float

    def __call__(self, query_BHD: torch.Tensor, cache: LayerKvCache) -> torch.Tensor:
        """Attend with the query heads that share a key head as its queries, so that no key is copied."""
        (slots, heads, channels), attended = query_BHD.shape, self.mask_B11T.size(-1)
        keys_BGTD = cache.keys_ZTGD[:slots, :attended].transpose(1, 2)
        values_BGTD = cache.values_ZTGD[:slots, :attended].transpose(1, 2)
        groups = keys_BGTD.size(1)
        context_BGRD = scaled_dot_product_attention(
            query_BHD.reshape(slots, groups, heads // groups, channels),
            keys_BGTD,
            values_BGTD,
            attn_mask=self.mask_B11T.expand(-1, groups, heads // groups, -1),
            scale=self.scale,
        )
        return context_BGRD.reshape(slots, heads, channels)


def decode_mask(positions_B: torch.Tensor, attended: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, 1, 1, T]: 0 at the keys that the token at this position sees, minus infinity elsewhere."""
    key_T = torch.arange(attended, device=positions_B.device)
    seen_BT = key_T <= positions_B[:, None]
    if window is not None:
        seen_BT &= key_T >= positions_B[:, None] - window
    mask_BT = torch.zeros(seen_BT.shape, dtype=dtype, device=positions_B.device).masked_fill_(~seen_BT, float("-inf"))
    return mask_BT[:, None, None, :]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlashDecode:
    """Attention as of `MaskedDecode` by torch's flash kernel for unequal lengths, which reads no key beyond a length.

    CUDA, fp16 or bf16. It shares key heads by itself, and splits long sequences over the multiprocessors.
    """

    lengths_B: torch.Tensor
    """Number of keys of each slot, this step's included; int32."""
    query_starts_B1: torch.Tensor
    """Starts of the queries 0, 1, .. B; int32."""
    key_starts_B1: torch.Tensor
    """Starts of the slots in the flat cache, and the end; int32."""
    rows_per_slot: int
    scale: float
    window: int | None

    def __call__(self, query_BHD: torch.Tensor, cache: LayerKvCache) -> torch.Tensor:
        """Call the kernel once for all slots."""
        slots = query_BHD.size(0)
        context_BHD: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query_BHD,
            cache.keys_ZTGD[:slots].flatten(0, 1),
            cache.values_ZTGD[:slots].flatten(0, 1),
            self.query_starts_B1,
            self.key_starts_B1,
            1,
            self.rows_per_slot,
            0.0,
            False,
            False,
            scale=self.scale,
            window_size_left=-1 if self.window is None else self.window,
            window_size_right=-1 if self.window is None else 0,
            seqused_k=self.lengths_B,
        )[0]
        return context_BHD
