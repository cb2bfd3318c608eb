"""Arrows between spans for the messages of one step, and the other end of every transfer. Pure NumPy."""

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matching import match_messages
from megatronapp_analyzer.hub.ingest.digest import is_kind
from megatronapp_analyzer.hub.ingest.ring_metadata import p2p_peer
from megatronapp_analyzer.model import StepRecords
from megatronapp_common.trace import P2P_KINDS, RecordKind


def match_transfers(view: StepRecords) -> NDArray[np.int64]:
    """Return pairs [n, 2]: index of the span that sends, index of the span that receives.

    An arrow leads from the post of the send to the wait of the receive; where one is missing, the other half is used.
    """
    messages = match_messages(view.records, view.comms)
    send = np.where(messages.send_post >= 0, messages.send_post, messages.send_wait)
    receive = np.where(messages.recv_wait >= 0, messages.recv_wait, messages.recv_post)
    known = (send >= 0) & (receive >= 0)
    return np.stack([send[known], receive[known]], axis=1)


def peers(view: StepRecords) -> NDArray[np.int64]:
    """Return the rank at the other end of every transfer; -1 for spans that are none."""
    records = view.records
    out = np.full(len(records), -1, np.int64)
    transfers = np.flatnonzero(is_kind(records, P2P_KINDS | {RecordKind.COPY}))
    known: dict[tuple[int, int], int] = {}
    for index in transfers:
        rank, slot = int(records["rank"][index]), int(records["comm"][index])
        if (rank, slot) not in known:
            peer = p2p_peer(view.comms.get(rank, {}).get(slot), rank)
            known[rank, slot] = -1 if peer is None else peer
        out[index] = known[rank, slot]
    return out
