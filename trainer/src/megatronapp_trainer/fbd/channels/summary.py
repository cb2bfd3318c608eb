"""Report of a forward rank to each of its backward ranks after a training step."""

import dataclasses
import pickle

import torch

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.plan import SUMMARY_BYTES
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

_SPEC = TensorSpec((SUMMARY_BYTES,), torch.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """State of a forward rank after a step."""

    counts: list[tuple[MessageKind, int, int]]
    """Kind, messages and bytes that it has sent in the step."""
    versions: dict[int, int]
    """Passes of the receiver's replica by the version of the weights that they used."""
    states: dict[str, object]
    """Its random states, which a checkpoint of this step has; without megatron-core's tracker if the receiver keeps its
    own."""
    stop_requested: bool
    forward_seconds: float
    """Length of its forward passes of a microbatch, all chunks together; mean of the step."""


def send_summary(channel: Channel, partner: int, step: int, summary: StepSummary) -> None:
    """Send a summary to a backward rank."""
    content = pickle.dumps(summary)
    if len(content) > _SPEC.bytes:
        raise TransferError(f"a summary of {len(content)} bytes does not fit a message of {_SPEC.bytes}")
    tensor = torch.zeros(_SPEC.shape, dtype=_SPEC.dtype)
    tensor[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    channel.send(partner, MessageKey(MessageKind.SUMMARY, step), tensor.to(channel.device))


def receive_summary(channel: Channel, partner: int, step: int) -> StepSummary:
    """Wait for the summary of a forward rank."""
    content = channel.receive(partner, MessageKey(MessageKind.SUMMARY, step), _SPEC)
    summary = pickle.loads(content.cpu().numpy().tobytes())
    assert isinstance(summary, StepSummary)
    return summary
