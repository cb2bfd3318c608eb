"""Weights from backward to forward ranks: each parameter in parts, sent from where it is and received in place.

The first message is the version of the weights, the number of optimizer steps that made them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatronapp_trainer.errors import WeightVersionError
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind, Traffic
from megatronapp_trainer.fbd.channels.plan import WEIGHT_PART_BYTES
from megatronapp_trainer.fbd.graph.slicing import weight_part
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

_VERSION = TensorSpec((1,), torch.int64)


def send_weights(channel: Channel, chunks: list[Any], step: int, version: int) -> None:
    """Start to send the version and all parameters of the chunks to each partner, and return.

    They may change once the partners have answered: a partner has all of them before its first pass.

    Args:
        channel: of a backward rank.
        chunks: with the parameters.
        step: number of the command that the weights belong to.
        version: optimizer steps that made the weights.
    """
    parameters = [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    header = torch.full(_VERSION.shape, version, dtype=_VERSION.dtype, device=parameters[0].device)
    for key, part in [(MessageKey(MessageKind.WEIGHTS, step), header), *_messages(parameters, step)]:
        for partner in channel.partners:
            channel.send(partner, key, part)


@torch.no_grad()
def receive_weights(channel: Channel, partner: int, chunks: list[Any], step: int) -> int:
    """Wait for all parameters of the chunks from one partner. Returns their version.

    Raises TransferError if its model is another one.
    """
    parameters = [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    return _receive(channel, partner, parameters, step)


@torch.no_grad()
def receive_weight_parts(channel: Channel, chunks: list[Any], step: int) -> int:
    """Wait for the parameters of whole chunks from the ranks of a tensor group, each of which has a part of them.

    Returns their version. Raises WeightVersionError if the ranks have sent different ones.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    versions = {}
    for place, partner in enumerate(channel.partners):
        parts = [weight_part(parameter, place, len(channel.partners)) for parameter in parameters]
        received = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
        versions[partner] = _receive(channel, partner, received, step)
        for part, own in zip(parts, received, strict=True):
            part.copy_(own)
    if len(set(versions.values())) > 1:
        raise WeightVersionError(
            f"command {step}: the backward ranks of a tensor group have sent weights of different versions, by rank "
            f"{versions}; the model would be a mixture of them"
        )
    return versions[channel.partners[0]]


def weight_traffic(parameters: Sequence[torch.Tensor]) -> Traffic:
    """Return messages and bytes with which all parameters and their version are sent to one rank."""
    messages, size = 1, _VERSION.bytes
    for parameter in parameters:
        messages += -(-parameter.numel() // _elements_of_part(parameter))
        size += parameter.numel() * parameter.element_size()
    return Traffic(messages, size)


def _receive(channel: Channel, partner: int, parameters: list[torch.Tensor], step: int) -> int:
    version = int(channel.receive(partner, MessageKey(MessageKind.WEIGHTS, step), _VERSION))
    for key, part in _messages(parameters, step):
        part.copy_(channel.receive(partner, key, TensorSpec(tuple(part.shape), part.dtype)))
    return version


def _messages(parameters: Sequence[torch.Tensor], step: int) -> list[tuple[MessageKey, torch.Tensor]]:
    """Return the parts of the parameters with their keys, which follow that of the version."""
    return [(MessageKey(MessageKind.WEIGHTS, step, 1 + index), part) for index, part in enumerate(_parts(parameters))]


def _parts(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters in order as flat views of at most the bytes of a message."""
    parts: list[torch.Tensor] = []
    for parameter in parameters:
        parts += torch.split(parameter.view(-1), _elements_of_part(parameter))
    return parts


def _elements_of_part(parameter: torch.Tensor) -> int:
    return WEIGHT_PART_BYTES // parameter.element_size()
