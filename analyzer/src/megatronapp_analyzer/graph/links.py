"""Links between ranks: directed pairs that exchange messages, and what takes long between them.

The operations of a link are what is left of its receives, and of the sends that wait for them, once both ends are
ready.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import EdgeKind, Seconds
from megatronapp_analyzer.graph.matching import Index
from megatronapp_native import segment_medians

Link = tuple[int, int]
"""Source and destination."""
NO_LINK = -1
_RANK_BITS = 32


def link_numbers(graph: StepGraph) -> Index:
    """Return the number of the link of each edge, the same in all graphs; NO_LINK of an edge of no message."""
    messages, of_span = graph.messages, np.full(len(graph.spans), NO_LINK, np.int64)
    number = (messages.source << _RANK_BITS) | messages.destination
    for waiter, partner in ((messages.recv_wait, messages.send_post), (messages.send_wait, messages.recv_post)):
        both = (waiter >= 0) & (partner >= 0)
        of_span[waiter[both]] = number[both]
    waits = np.isin(graph.edges.kind, (EdgeKind.SPAN, EdgeKind.DELIVERY, EdgeKind.READY))
    return np.where(waits, of_span[graph.edges.span], NO_LINK)


def link_of(number: int) -> Link:
    """Return the link with a number."""
    return int(number) >> _RANK_BITS, int(number) & ((1 << _RANK_BITS) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """Directed pairs of ranks that exchanged messages. Parallel arrays."""

    source: Index
    destination: Index
    seconds: Seconds
    """Median from when both ends were ready to the end of the receive."""
    count: Index


def deliveries_of(graphs: Sequence[StepGraph]) -> Deliveries:
    """Return the deliveries of the matched messages of all graphs."""
    sources, destinations, seconds = [], [], []
    for graph in graphs:
        chosen = graph.edges.kind == EdgeKind.DELIVERY
        sources.append(graph.spans["rank"][graph.edges.source[chosen] // 2].astype(np.int64))
        destinations.append(graph.spans["rank"][graph.edges.span[chosen]].astype(np.int64))
        seconds.append(graph.edges.weight[chosen])
    key = (np.concatenate(sources) << _RANK_BITS) | np.concatenate(destinations)
    names, group = np.unique(key, return_inverse=True)
    return Deliveries(
        source=names >> _RANK_BITS,
        destination=names & ((1 << _RANK_BITS) - 1),
        seconds=medians(group, np.concatenate(seconds), len(names)) if len(names) else np.empty(0),
        count=np.bincount(group, minlength=len(names)),
    )


def medians(group: Index, values: Seconds, groups: int) -> Seconds:
    """Return the median of each group, of two middles their mean; each group has a value."""
    upper = -segment_medians(group, -values, groups)
    return (segment_medians(group, values, groups) + upper) / 2
