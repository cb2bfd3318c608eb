"""Key of a message: its directed pair, and its ordinal within the step.

gloo and NCCL deliver in order per pair, so counting on both sides gives the same number to both ends.
"""

SENDS = ("send_next", "send_prev")


class PeerCounters:
    """Slots and counters of the directed pairs between this rank and its pipeline neighbours."""

    def __init__(self, rank: int, slots: dict[tuple[int, int], int]) -> None:
        self._rank = rank
        self._slots = slots
        self._sent = dict.fromkeys(slots, 0)

    def begin_step(self) -> None:
        """Restart the ordinals, which count from 0 in every step."""
        self._sent = dict.fromkeys(self._slots, 0)

    def next_message(self, name: str, peer: int) -> tuple[int, int]:
        """Return slot and ordinal of the next message; `name` is send_next, send_prev, recv_next or recv_prev."""
        pair = (self._rank, peer) if name in SENDS else (peer, self._rank)
        ordinal = self._sent[pair]
        self._sent[pair] = ordinal + 1
        return self._slots[pair], ordinal
