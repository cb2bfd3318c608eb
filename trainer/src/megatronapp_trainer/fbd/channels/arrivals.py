"""Messages of a step that a rank takes in any order, as they arrive."""

import contextlib
import time
from typing import NamedTuple

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.errors import TransferTimeoutError
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

_WITHHELD_S = 1e-3
"""Wait until withheld messages are asked for again."""


class AwaitedMessage(NamedTuple):
    """A message that a pass needs."""

    peer: int
    key: MessageKey
    spec: TensorSpec
    target: PassKey | None
    """Pass that takes it; None for a message after which more of the same follow."""


class _WithheldMessage(NamedTuple):
    tensor: torch.Tensor
    copy: ObservedCopy
    release_ns: int


class Arrivals:
    """Polls the messages of a rank that may run one of several passes, and waits for any of them.

    A wait ends with the message after which a pass can run; to the observer the pass says so as it begins (`take`).
    """

    def __init__(self, channel: Channel, step: int) -> None:
        """Begin a step, whose command has number `step`."""
        self._channel = channel
        self._step = step
        self._seen = channel.activity()
        self._withheld: dict[tuple[int, MessageKey], _WithheldMessage] = {}
        self._arrived: dict[PassKey, int] = {}
        """Messages that no pass has taken, by their place in the order of arrivals."""
        self._credits: list[PassKey] = []
        self._count = 0

    def begin_poll(self) -> None:
        """Begin a round of polls; what arrives after this ends the next wait at once."""
        self._seen = self._channel.activity()

    def poll(self, awaited: AwaitedMessage) -> torch.Tensor | None:
        """Return a message if it has arrived, and no fault withholds it."""
        peer, key, spec, target = awaited
        observer, withheld = self._channel.observer, self._withheld.pop((peer, key), None)
        if withheld is None:
            message = self._channel.poll_message(peer, key, spec)
            if message is None or observer is None:
                return None if message is None else message.tensor
            copy = ObservedCopy(peer, spec.bytes, *message.copied_ns, path=self._channel.path_from(peer))
            if target is None:
                if key.kind is MessageKind.SAVED:
                    observer.part_arrived(PassKey(RecordKind.FORWARD, key.chunk, key.item), copy)
                return message.tensor
            withheld = _WithheldMessage(message.tensor, copy, observer.release_ns(copy))
        if withheld.release_ns > time.monotonic_ns():
            self._withheld[peer, key] = withheld
            return None
        assert observer is not None and target is not None
        observer.arrived(target, withheld.copy)
        self._note(target)
        return withheld.tensor

    def poll_number(self, partner: int) -> int | None:
        """Return the next number of a partner if it has arrived."""
        return self._channel.poll_number(partner)

    def announce_credit(self, partner: int, target: PassKey) -> None:
        """Announce a credit for a pass; the next pass that begins takes it."""
        if self._channel.observer is None:
            return
        if target in self._arrived:  # of another replica, and no pass has begun since
            self.take()
        self._channel.announce_number(partner, target)
        self._note(target)
        self._credits.append(target)

    def take(self, *targets: PassKey) -> None:
        """Take the messages of a pass that begins, and all credits; the one that arrived last has ended the wait."""
        if self._channel.observer is None:
            return
        taken = {target for target in (*targets, *self._credits) if target in self._arrived}
        self._credits.clear()
        for target in sorted(taken, key=self._arrived.__getitem__, reverse=True):
            self._channel.observer.take(target)
            del self._arrived[target]

    def wait(self, expected: str) -> None:
        """Wait until something arrives that the last round of polls has not seen.

        Raises TransferTimeoutError, which says what was `expected`, after the deadline.
        """
        observer, limit_s = self._channel.observer, self._channel.deadline_s
        with contextlib.nullcontext() if observer is None else observer.waiting():
            if self._withheld:
                self._channel.wait_activity(self._seen, _WITHHELD_S)
            elif not self._channel.wait_activity(self._seen, limit_s):
                raise TransferTimeoutError(
                    f"command {self._step}: nothing has arrived for {limit_s:g} s; expected next: {expected}"
                )

    def _note(self, target: PassKey) -> None:
        self._count += 1
        self._arrived[target] = self._count
