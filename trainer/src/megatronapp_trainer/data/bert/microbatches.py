"""Microbatches of BERT, as they are read and on the device. Every model chunk reads them, because of the padding.

G microbatches that are sent together, P planes, B samples of a microbatch, S sequence.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import TOGETHER, broadcast_in_tensor_group
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.parallel.layout import Layout

_PLANES = ("tokens", "token_types", "labels", "loss_mask", "padding_mask")


class HostBertMicrobatch(TypedDict):
    """One microbatch of this rank's replica, as it is read."""

    tokens: torch.Tensor
    """int64 [B, S], masked"""
    token_types: torch.Tensor
    """int64 [B, S], 0 in the first text, 1 in the second one"""
    labels: torch.Tensor
    """int64 [B, S], the token before it was masked; 0 where the loss is not counted"""
    loss_mask: torch.Tensor
    """int64 [B, S], 1 where the loss is counted"""
    padding_mask: torch.Tensor
    """int64 [B, S], 1 at tokens, 0 at padding"""
    swapped: torch.Tensor
    """int64 [B], 1 where the texts have changed places"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BertMicrobatch:
    """One microbatch of this rank's replica, on its device; all int64."""

    tokens: torch.Tensor
    """[B, S]"""
    token_types: torch.Tensor
    """[B, S]"""
    labels: torch.Tensor
    """[B, S]"""
    loss_mask: torch.Tensor
    """[B, S]"""
    padding_mask: torch.Tensor
    """[B, S]"""
    swapped: torch.Tensor
    """[B]"""


def collate(samples: Sequence[dict[str, Any]], vocab_size: int) -> HostBertMicrobatch:
    """Stack samples of megatron-core's dataset.

    Raises:
        DataError: a token for which the model has no embedding.
    """

    def stacked(key: str) -> torch.Tensor:
        return torch.stack([torch.as_tensor(sample[key], dtype=torch.int64) for sample in samples])

    tokens, loss_mask = stacked("text"), stacked("loss_mask")
    labels = stacked("labels") * loss_mask  # megatron-core writes -1 where no loss is counted
    for ids in (tokens, labels):
        largest, least = int(ids.max()), int(ids.min())
        if largest >= vocab_size or least < 0:
            raise DataError(
                f"the corpus has token id {largest if largest >= vocab_size else least} outside the vocabulary of "
                f"{vocab_size}; was it made with another tokenizer, or damaged?"
            )
    return {
        "tokens": tokens,
        "token_types": stacked("types"),
        "labels": labels,
        "loss_mask": loss_mask,
        "padding_mask": stacked("padding_mask"),
        "swapped": stacked("is_random"),
    }


class BertBatchSource:
    """Source of this rank's microbatches on its device; the first rank of a tensor group sends them to the others."""

    def __init__(self, config: TrainerConfig, layout: Layout, device: Device) -> None:
        self.reading_chunks = frozenset(range(layout.virtual_size))
        self.together = 1 if config.data.num_workers == 0 else TOGETHER
        self._device = device
        self._size = (config.training.micro_batch_size, config.model.seq_length)
        self._reads = layout.tensor_rank == 0
        self._broadcasts = layout.tensor_size > 1

    def read(self, iterator: Iterator[HostBertMicrobatch], count: int) -> list[BertMicrobatch]:
        """Return the next `count` microbatches of this iterator; collective over the tensor group."""
        samples, length = self._size
        batches = list(itertools.islice(iterator, count)) if self._reads else []
        # Whether the texts of a sample were swapped travels as one more column of its last plane.
        packed_GPBT = broadcast_in_tensor_group(
            self._packed(batches),
            (count, len(_PLANES), samples, length + 1),
            torch.int64,
            self._device,
            broadcasts=self._broadcasts,
        )
        return [
            BertMicrobatch(
                **dict(zip(_PLANES, planes_PBT[..., :length].contiguous().unbind(), strict=True)),
                swapped=planes_PBT[-1, :, length].contiguous(),
            )
            for planes_PBT in packed_GPBT
        ]

    def work(self, batch: BertMicrobatch) -> None:
        """Return None: all microbatches have the same shape, and padding is computed like text."""

    def _packed(self, batches: list[HostBertMicrobatch]) -> torch.Tensor | None:
        if not batches:
            return None
        planes = torch.stack([torch.stack([batch[name] for name in _PLANES]) for batch in batches])  # type: ignore[literal-required]
        swapped = torch.stack([batch["swapped"] for batch in batches])
        return torch.cat((planes, swapped[:, None, :, None].expand(*planes.shape[:3], 1)), -1)
