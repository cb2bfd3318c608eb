"""Small messages between the ranks of a gang at step boundaries, through gloo and the hosts' memory.

Each message is one transfer of a fixed size, and a second one if it is larger.
"""

import dataclasses
import datetime
import enum
import pickle
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.parallel.layout import Layout

_BUFFER_BYTES = 8192
_HEADER = 8


class ControlMessage(enum.Enum):
    """Messages that carry no content."""

    BEAT = "beat"
    """Heartbeat: nothing to do, the gang lives."""
    CLOSE = "close"
    """End of the generation by rank 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """Command that all ranks handle at the next step boundary, with their handler of this topic."""

    topic: str
    payload: Any
    """Content that can be pickled."""


class RankChannel:
    """Channel from rank 0 to all others, and back from the first rank of the last stage. Collective to make."""

    def __init__(self, layout: Layout, *, timeout: datetime.timedelta) -> None:
        self.leader = layout.world_size - layout.tensor_size
        """Rank that reads the logits."""
        self._alone = layout.world_size == 1
        self.group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)
        """The gloo group of all ranks; None for a single rank."""

    def broadcast(self, message: object) -> None:
        """Send a message from rank 0 to every other rank."""
        if self._alone:
            return
        for part in _packed(message):
            dist.broadcast(part, src=0, group=self.group)

    def receive_broadcast(self) -> Any:  # noqa: ANN401 - the message of rank 0
        """Wait for a message of rank 0, on other ranks."""
        return _unpacked(lambda part: dist.broadcast(part, src=0, group=self.group))

    def send_reply(self, message: object) -> None:
        """Send a message from the leader to rank 0, if they differ."""
        for part in _packed(message):
            dist.send(part, dst=0, group=self.group)

    def receive_reply(self) -> Any:  # noqa: ANN401 - the message of the leader
        """Wait for the leader, on rank 0."""
        return _unpacked(lambda part: dist.recv(part, src=self.leader, group=self.group))


def _packed(message: object) -> list[torch.Tensor]:
    data = pickle.dumps(message)
    whole = len(data).to_bytes(_HEADER, "little") + data
    first = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8)
    head = whole[:_BUFFER_BYTES]
    first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if len(whole) <= _BUFFER_BYTES:
        return [first]
    return [first, torch.frombuffer(bytearray(whole[_BUFFER_BYTES:]), dtype=torch.uint8)]


def _unpacked(receive: Any) -> Any:  # noqa: ANN401 - a function that fills a tensor; the message
    first = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
    receive(first)
    length = int.from_bytes(bytes(first[:_HEADER].tolist()), "little")
    data = first[_HEADER : _HEADER + length].numpy().tobytes()
    if len(data) < length:
        rest = torch.empty(length - len(data), dtype=torch.uint8)
        receive(rest)
        data += rest.numpy().tobytes()
    return pickle.loads(data)
