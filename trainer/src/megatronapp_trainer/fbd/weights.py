"""Weights from backward to forward ranks: each parameter in parts, sent from where it is and received in place."""

from typing import Any

import torch

from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.plan import WEIGHT_PART_BYTES
from megatronapp_trainer.fbd.graph.slicing import weight_part
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec


def send_weights(channel: Channel, chunks: list[Any], step: int) -> None:
    """Start to send all parameters of the chunks to each partner; they may change once the partners have answered."""
    parameters = [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    for key, part in _messages(parameters, step):
        for partner in channel.partners:
            channel.send(partner, key, part)


@torch.no_grad()
def receive_weights(channel: Channel, partner: int, chunks: list[Any], step: int) -> None:
    """Wait for all parameters of the chunks from one partner. Raises TransferError if its model is another one."""
    _receive(channel, partner, [parameter.detach() for chunk in chunks for parameter in chunk.parameters()], step)


@torch.no_grad()
def receive_weight_parts(channel: Channel, chunks: list[Any], step: int) -> None:
    """Wait for the parameters of whole chunks from the ranks of a tensor group, each of which has a part of them."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for place, partner in enumerate(channel.partners):
        parts = [weight_part(parameter, place, len(channel.partners)) for parameter in parameters]
        received = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
        _receive(channel, partner, received, step)
        for part, own in zip(parts, received, strict=True):
            part.copy_(own)


def _receive(channel: Channel, partner: int, parameters: list[torch.Tensor], step: int) -> None:
    for key, part in _messages(parameters, step):
        part.copy_(channel.receive(partner, key, TensorSpec(tuple(part.shape), part.dtype)))


def _messages(parameters: list[torch.Tensor], step: int) -> list[tuple[MessageKey, torch.Tensor]]:
    """Return the parameters in order as flat views of at most the bytes of a message, with their keys."""
    parts: list[torch.Tensor] = []
    for parameter in parameters:
        parts += torch.split(parameter.view(-1), WEIGHT_PART_BYTES // parameter.element_size())
    return [(MessageKey(MessageKind.WEIGHTS, step, index), part) for index, part in enumerate(parts)]
