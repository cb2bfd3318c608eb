"""Frames that wait for the hub, in bounded memory. Pure.

A frame is retained for a while after it was sent: a hub that is killed may have received what it could not store. After
its restart it reports the last record that it has.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping

RingId = int | None
"""Global rank, or None for the worker's own ring."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordsPacket:
    """An encoded RECORDS frame: records [first, end) of one ring."""

    ring: RingId
    first: int
    end: int
    data: bytes


class SendBuffer:
    """Queue of packets that also retains the newest ones sent."""

    def __init__(self, *, limit_bytes: int, resend_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._resend_bytes = resend_bytes
        self._waiting: deque[RecordsPacket] = deque()
        self._sent: deque[RecordsPacket] = deque()
        self._waiting_bytes = 0
        self._sent_bytes = 0
        self.dropped_records = 0

    @property
    def buffered_bytes(self) -> int:
        """Size of the unsent packets."""
        return self._waiting_bytes

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, packet: RecordsPacket) -> None:
        """Queue a packet; drops the oldest ones beyond the limit."""
        self._waiting.append(packet)
        self._waiting_bytes += len(packet.data)
        self._drop_oldest()

    def peek(self) -> RecordsPacket | None:
        """Return the next packet to send."""
        return self._waiting[0] if self._waiting else None

    def mark_sent(self, packet: RecordsPacket) -> None:
        """Record that `packet` was sent. Does nothing if it was dropped in the meantime."""
        if not self._waiting or self._waiting[0] is not packet:
            return
        self._waiting.popleft()
        self._waiting_bytes -= len(packet.data)
        self._sent.append(packet)
        self._sent_bytes += len(packet.data)
        while self._sent_bytes > self._resend_bytes:
            self._sent_bytes -= len(self._sent.popleft().data)

    def rewind(self, have: Mapping[RingId, int]) -> None:
        """Queue again, in front, sent packets that the hub does not have. `have` maps rings to their next index."""
        again = [packet for packet in self._sent if packet.end > have.get(packet.ring, 0)]
        self._sent.clear()
        self._sent_bytes = 0
        self._waiting.extendleft(reversed(again))
        self._waiting_bytes += sum(len(packet.data) for packet in again)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self._waiting_bytes > self._limit_bytes and len(self._waiting) > 1:
            dropped = self._waiting.popleft()
            self._waiting_bytes -= len(dropped.data)
            self.dropped_records += dropped.end - dropped.first
