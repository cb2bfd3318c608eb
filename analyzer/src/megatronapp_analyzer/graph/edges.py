"""Edges of the event graph of a step."""

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matching import Index

Seconds = NDArray[np.float64]


class EdgeKind(enum.IntEnum):
    """Meaning of an edge's weight; `Edges.span` is the span that it belongs to."""

    SPAN = 0
    """Own duration of a span, or of a wait once its partner was ready."""
    GAP = 1
    """Time on the rank between the previous span and this one."""
    DELIVERY = 2
    """From the post of a send to the end of the matching receive, once both sides were ready."""
    READY = 3
    """From the post of a receive to the end of the matching send."""
    ARRIVE = 4
    """A member reaches its collective; weight 0."""
    TRANSFER = 5
    """Time from when the last member reached a collective to this member's end."""
    HANDOVER = 6
    """As GAP, from the end of the DATA of another member of the unit, which reads for this rank, too."""
    REDUCED = 7
    """From when the last replica was ready to reduce gradients to the end of a pass that waited for it inside."""


GAP_KINDS = (EdgeKind.GAP, EdgeKind.HANDOVER)
"""Edges that end where a gap ends; one gap may have both."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """Parallel arrays, one entry per edge."""

    source: Index
    target: Index
    weight: Seconds
    kind: NDArray[np.int8]
    span: Index


def edges_of(source: Index, target: Index, weight: Seconds, kind: EdgeKind, span: Index) -> Edges:
    """Return edges of one kind; weights below 0, as of clocks that differ, are 0."""
    return Edges(
        source=source,
        target=target,
        weight=np.maximum(weight, 0.0),
        kind=np.full(len(source), int(kind), np.int8),
        span=span,
    )


def joined(parts: list[Edges]) -> Edges:
    """Return all edges, one part after the other."""
    return Edges(
        source=np.concatenate([part.source for part in parts]),
        target=np.concatenate([part.target for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
        kind=np.concatenate([part.kind for part in parts]),
        span=np.concatenate([part.span for part in parts]),
    )


def taken(edges: Edges, order: Index) -> Edges:
    """Return the edges with these numbers, in that order."""
    return Edges(
        source=edges.source[order],
        target=edges.target[order],
        weight=edges.weight[order],
        kind=edges.kind[order],
        span=edges.span[order],
    )
