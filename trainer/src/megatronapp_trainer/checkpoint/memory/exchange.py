"""Transfers of files between ranks over a gloo group, from memory to memory."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 16 << 20
"""Bytes of a file that are on the way at a time."""

Group = Any
"""ProcessGroup of all ranks, on gloo, for these transfers alone."""
Peers = Sequence[tuple[torch.Tensor, int]]
"""Bytes of a file, each with the rank that sends or receives it."""


def exchange(outgoing: Peers, incoming: Peers, group: Group) -> None:
    """Send and receive at the same time, so that no order of ranks can wait in a circle.

    Raises:
        RuntimeError: a peer was lost.
    """
    largest = max((content.numel() for content, _ in (*outgoing, *incoming)), default=0)
    for start in range(0, largest, CHUNK_BYTES):
        works = []
        for content, peer in incoming:
            if (chunk := content[start : start + CHUNK_BYTES]).numel():
                works.append(dist.irecv(chunk, src=peer, group=group))
        for content, peer in outgoing:
            if (chunk := content[start : start + CHUNK_BYTES]).numel():
                works.append(dist.isend(chunk, dst=peer, group=group))
        with contextlib.ExitStack() as stack:  # all are waited for, also after a failure: they use the memory
            for work in works:
                stack.callback(_wait, work)


def _wait(work: "dist.Work | None") -> None:
    assert work is not None, "this rank belongs to the group"
    work.wait()
