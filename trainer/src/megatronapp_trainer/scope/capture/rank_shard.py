"""The shard of the model that a rank holds, as docs/scope-protocol.md describes it, and the pixels that fit it."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from megatronapp_trainer.parallel.layout import Layout

Span = tuple[int, int]
"""First and end, of the whole model."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """Sizes of the model, and this rank's part of each."""

    layers: Span
    heads: Span
    key_heads: Span
    mlp: Span
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_width: int
    hidden: int
    ffn: int
    gated: bool
    vocabulary: int
    max_length: int
    positions: str
    window: int | None
    scale: float
    tp: int
    tensor_size: int
    pp: int
    pipeline_size: int

    @property
    def key_shards(self) -> int:
        """Different parts of the key heads among the tensor ranks."""
        return min(self.tensor_size, self.num_key_heads)

    @property
    def key_shard(self) -> int:
        """Which of them this rank holds; several may hold the same one."""
        return self.tp * self.key_shards // self.tensor_size

    @property
    def is_first_of_tensor(self) -> bool:
        """True for the rank that sends what all tensor ranks hold."""
        return self.tp == 0

    def model(self) -> dict[str, Any]:
        """Return the field `model` of SCOPE_HELLO."""
        return {
            "layers": self.num_layers,
            "hidden": self.hidden,
            "heads": self.num_heads,
            "keyHeads": self.num_key_heads,
            "headWidth": self.head_width,
            "mlpWidth": self.ffn,
            "gated": self.gated,
            "vocabulary": self.vocabulary,
            "positions": self.positions,
            "maxLength": self.max_length,
        }


def rank_shard_of(model: Any, layout: Layout, *, vocab_size: int, max_length: int) -> RankShard:  # noqa: ANN401 - GPTModel
    """Derive the shard of the rank that has this model."""
    config, tp, size = model.config, layout.tensor_rank, layout.tensor_size
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    groups = config.num_query_groups
    first_group = tp * groups // size
    window = getattr(config, "window_size", None)
    learned = model.position_embedding_type == "learned_absolute"
    return RankShard(
        layers=(min(numbers), max(numbers) + 1) if numbers else (0, 0),
        heads=_part(config.num_attention_heads, tp, size),
        key_heads=(first_group, max(first_group + 1, (tp + 1) * groups // size)),
        mlp=_part(config.ffn_hidden_size, tp, size),
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        num_key_heads=groups,
        head_width=config.kv_channels,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        gated=config.gated_linear_unit,
        vocabulary=vocab_size,
        max_length=max_length,
        positions="learned" if learned else "none" if model.position_embedding_type == "none" else "rotary",
        window=None if window is None or window[0] < 0 else int(window[0]),
        scale=config.softmax_scale or config.kv_channels**-0.5,
        tp=tp,
        tensor_size=size,
        pp=layout.pipeline_rank,
        pipeline_size=layout.pipeline_size,
    )


def _part(whole: int, index: int, count: int) -> Span:
    return whole * index // count, whole * (index + 1) // count


def pixel_count(width: int, requested: int, shards: int) -> int:
    """Return the number of pixels, at most `requested`, that fits these shards of a vector at least as wide.

    Each pixel lies within one of them, or is made of as many as every other.
    """
    if requested >= shards:
        return max(shards, min(requested, width) // shards * shards)
    return max(count for count in range(1, max(1, requested) + 1) if shards % count == 0)


def pins_of(pins: Iterable[tuple[int, int]], *, layers: Span, heads: Span) -> tuple[list[tuple[int, int]], int]:
    """Pinned heads (layer, head) of a rank, and how many the rank of its tensor group with the most has.

    The graph of a step depends on that number. Were it another on each rank, one would capture a graph, and so run the
    group's collectives more often, while another replays.
    """
    (first, end), (low, high) = layers, heads
    of_stage = sorted(pin for pin in pins if first <= pin[0] < end)
    counts = collections.Counter(head // (high - low) for _, head in of_stage)
    return [pin for pin in of_stage if low <= pin[1] < high], max(counts.values(), default=0)
