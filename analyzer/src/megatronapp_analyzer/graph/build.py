"""The event graph of one step.

Events are the starts and ends of spans, and one event per collective ("the last member has arrived"). An edge says
"not before that event plus this weight", so that the longest path gives every event's time (max-plus algebra). The
decomposition follows the what-if analysis of OSDI'25 "Understanding Stragglers in Large Model Training": a
communication keeps only what remains after the last participant was ready; waiting for others is never a weight.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import GraphError
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.edges import EdgeKind, Edges, Seconds, edges_of, joined, taken
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Collectives, Index, Messages, handovers_of, meetings_of
from megatronapp_analyzer.graph.overlapped_reductions import (
    OverlappedReductions,
    find_overlapped,
    lengths_of_passes,
    with_reductions,
)
from megatronapp_analyzer.model import RankRecords, StepRecords
from megatronapp_native import sort_by_level

CLOCK_TOLERANCE_S = 1e-3
"""Seconds that a message may appear to arrive before it was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """Spans of a step and the edges between their events: span i starts at event 2 i and ends at event 2 i + 1."""

    spans: RankRecords
    start_s: Seconds
    end_s: Seconds
    messages: Messages
    collectives: Collectives
    meetings: Collectives
    """Compute spans of units of several ranks."""
    overlapped: OverlappedReductions
    """Reductions of gradients that ranks waited for in their last backward pass."""
    edges: Edges
    """Sorted by the target's level, then by target."""
    level_begin: Index
    """Edges of level k are `level_begin[k]:level_begin[k + 1]`."""
    initial_s: Seconds
    """Time of each event without any predecessor; 0 for all others."""
    unmatched: int
    """Number of receives and collectives at their recorded duration, because a partner's record is missing."""

    @property
    def events(self) -> int:
        return len(self.initial_s)


def build(view: StepRecords, *, tolerance_s: float = CLOCK_TOLERANCE_S, unit_of_rank: Index | None = None) -> StepGraph:
    """Build the graph of one step as `build_matched`."""
    return build_matched(MatchedStep(view), tolerance_s=tolerance_s, unit_of_rank=unit_of_rank)


def build_matched(
    step: MatchedStep, *, tolerance_s: float = CLOCK_TOLERANCE_S, unit_of_rank: Index | None = None
) -> StepGraph:
    """Build the graph of one step on aligned clocks, which may be wrong by `tolerance_s`.

    Ranks of one unit meet inside their compute spans; without `unit_of_rank` no ranks do.

    Raises GraphError where operations depend on each other in a circle.
    """
    spans, messages, collectives = step.spans, step.messages, step.collectives
    origin = int(spans["start_ns"].min()) if len(spans) else 0
    start, end = rec.laid_out_s(spans, origin)
    waits, free, unmatched = _message_edges(messages, start, end, tolerance_s)
    groups, in_group = _group_edges(collectives, start, end, 2 * len(spans))
    free[in_group] = False
    units = np.arange(int(spans["rank"].max(initial=-1)) + 1) if unit_of_rank is None else unit_of_rank
    meetings = meetings_of(spans, units)
    parts, roots = _stream_edges(spans, start, end, handovers_of(spans, meetings, end))
    inside, in_meeting = _group_edges(meetings, start, end, 2 * len(spans) + len(collectives))
    free[in_meeting] = False
    own = np.flatnonzero(free)
    plain = edges_of(2 * own, 2 * own + 1, (end - start)[own], EdgeKind.SPAN, own)
    edges = joined([plain, parts, waits, groups, inside])
    events = 2 * len(spans) + len(collectives) + len(meetings)
    overlapped = find_overlapped(spans, end, collectives, lengths_of_passes(edges, spans), tolerance_s)
    edges = with_reductions(edges, overlapped, end, events)
    events += len(overlapped)
    initial = np.zeros(events)
    initial[2 * roots] = start[roots]
    order, begin = _by_level(edges, events)
    return StepGraph(
        spans=spans,
        start_s=start,
        end_s=end,
        messages=messages,
        collectives=collectives,
        overlapped=overlapped,
        edges=taken(edges, order),
        level_begin=begin,
        initial_s=initial,
        meetings=meetings,
        unmatched=unmatched + int((~collectives.complete).sum()),
    )


def _stream_edges(
    spans: RankRecords, start: Seconds, end: Seconds, handovers: tuple[Index, Index]
) -> tuple[Edges, Index]:
    """Return gaps between consecutive spans of a rank, and the first span of each rank.

    What waits for data that another rank reads has its gap after both. `handovers` are those of `handovers_of`.
    """
    rank = spans["rank"]
    follows = rank[1:] == rank[:-1]
    later = np.flatnonzero(follows) + 1
    first = np.flatnonzero(np.append(True, ~follows)) if len(spans) else np.empty(0, np.int64)
    reader, waiter = handovers
    ready = np.append(end[:1], end[:-1])
    ready[waiter] = np.maximum(ready[waiter], end[reader])
    gaps = edges_of(2 * (later - 1) + 1, 2 * later, start[later] - ready[later], EdgeKind.GAP, later)
    handed = edges_of(2 * reader + 1, 2 * waiter, start[waiter] - ready[waiter], EdgeKind.HANDOVER, waiter)
    return joined([gaps, handed]), first


def _message_edges(
    messages: Messages, start: Seconds, end: Seconds, tolerance_s: float
) -> tuple[Edges, NDArray[np.bool_], int]:
    """Return edges of messages; mask of spans that keep their own duration; number of receives without their send."""
    free = np.ones(len(start), np.bool_)
    send, recv = messages.send_post[messages.matched], messages.recv_wait[messages.matched]
    causal = end[recv] >= start[send] - tolerance_s
    send, recv = send[causal], recv[causal]
    free[recv] = False
    left = end[recv] - np.maximum(start[recv], end[send])
    parts = [
        edges_of(2 * recv, 2 * recv + 1, left, EdgeKind.SPAN, recv),
        edges_of(2 * send + 1, 2 * recv + 1, left, EdgeKind.DELIVERY, recv),
    ]
    both = (messages.send_wait >= 0) & (messages.recv_post >= 0)
    wait, post = messages.send_wait[both], messages.recv_post[both]
    ended_before = end[wait] < end[post] - tolerance_s
    rendezvous = (end[wait] >= end[post]) & ~_is_eager(messages.source[both], messages.destination[both], ended_before)
    wait, post = wait[rendezvous], post[rendezvous]
    free[wait] = False
    left = end[wait] - np.maximum(start[wait], end[post])
    parts.append(edges_of(2 * wait, 2 * wait + 1, left, EdgeKind.SPAN, wait))
    parts.append(edges_of(2 * post + 1, 2 * wait + 1, left, EdgeKind.READY, wait))
    return joined(parts), free, int((messages.recv_wait >= 0).sum()) - len(recv)


def _is_eager(source: Index, destination: Index, ended_before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return messages of pairs whose sends do not wait for a posted receive: one of them `ended_before` that."""
    if not ended_before.any():
        return ended_before
    # Messages are sorted by pair, so that few runs of equal pairs remain to be sorted.
    pair = source * (int(destination.max()) + 1) + destination
    begin = np.flatnonzero(np.diff(pair, prepend=-1))
    _, of_run = np.unique(pair[begin], return_inverse=True)
    where = np.repeat(of_run, np.diff(begin, append=len(pair)))
    eager: NDArray[np.bool_] = np.bincount(where, ended_before)[where] > 0
    return eager


def _group_edges(collectives: Collectives, start: Seconds, end: Seconds, first_event: int) -> tuple[Edges, Index]:
    """Return edges of whole collectives, and the spans in them; instance i is event `first_event` + i."""
    sizes = np.diff(collectives.begin)
    instance = np.repeat(np.arange(len(collectives)), sizes)
    inside = collectives.complete[instance]
    member, instance = collectives.record[inside], instance[inside]
    last = np.full(len(collectives), -np.inf)
    np.maximum.at(last, instance, start[member])
    event = first_event + instance
    arrive = edges_of(2 * member, event, np.zeros(len(member)), EdgeKind.ARRIVE, member)
    transfer = edges_of(event, 2 * member + 1, end[member] - last[instance], EdgeKind.TRANSFER, member)
    return joined([arrive, transfer]), member


def _by_level(edges: Edges, events: int) -> tuple[Index, Index]:
    """Sort the edges by level of their target, then by target; return order and start of each level."""
    order, level_begin, seen = sort_by_level(edges.source, edges.target, events)
    if seen < events:
        raise GraphError(
            f"{events - seen} of {events} events of the step depend on each other in a circle; "
            "check the clock alignment"
        )
    return order, level_begin
