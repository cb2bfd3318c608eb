"""Weights from backward to forward ranks: each parameter in segments, sent from where it is and received in place."""

from collections.abc import Iterator
from typing import Any

import torch

from megatronapp_trainer.fbd.channels.channel import WEIGHT_PART_BYTES, Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec


def send_weights(channel: Channel, chunks: list[Any], step: int) -> None:
    """Start to send all parameters of the chunks to each partner; they may change once the partners have answered."""
    for index, segment in enumerate(_segments(chunks)):
        for partner in channel.partners:
            channel.send(partner, MessageKey(MessageKind.WEIGHTS, step, index), segment)


@torch.no_grad()
def receive_weights(channel: Channel, partner: int, chunks: list[Any], step: int) -> None:
    """Wait for all parameters of the chunks from one partner. Raises TransferError if its model is another one."""
    for index, segment in enumerate(_segments(chunks)):
        spec = TensorSpec(tuple(segment.shape), segment.dtype)
        segment.copy_(channel.receive(partner, MessageKey(MessageKind.WEIGHTS, step, index), spec))


def _segments(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters of the chunks in order, as flat views of at most the bytes of a message."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            flat = parameter.detach().view(-1)
            yield from flat.split(WEIGHT_PART_BYTES // flat.element_size())
