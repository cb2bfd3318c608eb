"""Waits for other replicas inside the last backward pass of a step, with which reductions of gradients overlap.

A device with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) runs no kernel that was launched after a reduction
before that reduction can begin, and a second one begins when all replicas have reduced the first. So the last pass of a
fast replica lasts until the slowest one is there, as two H200 showed. The passes of the other microbatches overlap with
nothing: they show how long it would have taken alone.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.edges import EdgeKind, Edges, Seconds, edges_of, joined
from megatronapp_analyzer.graph.matching import Collectives, Index
from megatronapp_analyzer.graph.records import is_kind
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import Flag, RecordKind
from megatronapp_native import segment_medians

LEAST_WAIT = 0.05
"""Part by which a last pass must be longer than usual to have waited; the reductions themselves cost it about as much.
"""
LEAST_SINGLE_WAIT = 0.01
"""The same with a single microbatch, where last passes are compared with those of other replicas."""
MOST_AFTER = 0.25
"""Part of a last pass that may follow the begin of the last reduction, from which on no rank waits."""
BACKWARD = frozenset({RecordKind.BACKWARD})
PASSES = frozenset({RecordKind.FORWARD, RecordKind.BACKWARD})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverlappedReductions:
    """Reductions for which a member waited in its last pass: members of number i are those of `begin[i]` and on."""

    begin: Index
    last_pass: Index
    """Span of the last backward pass of each member."""
    ready_s: Seconds
    """When it would have begun the last reduction for which any of them waits."""
    waited_s: Seconds
    """How long it waited; 0 for the member that was the last to be ready, and others that did not wait."""

    def __len__(self) -> int:
        return len(self.begin) - 1

    @property
    def instance(self) -> Index:
        """Number of the reduction of each member."""
        return np.repeat(np.arange(len(self)), np.diff(self.begin))

    @property
    def last_s(self) -> Seconds:
        """When the last member of each reduction was ready."""
        return np.maximum.reduceat(self.ready_s, self.begin[:-1]) if len(self) else np.empty(0)


NO_REDUCTIONS = OverlappedReductions(
    begin=np.zeros(1, np.int64),
    last_pass=np.empty(0, np.int64),
    ready_s=np.empty(0),
    waited_s=np.empty(0),
)


def find_overlapped(
    spans: RankRecords, end_s: Seconds, collectives: Collectives, length_s: Seconds
) -> OverlappedReductions:
    """Return the reductions of gradients for which ranks waited in their last backward pass on a device.

    `length_s`: how long each pass took once all ranks that meet inside it had begun; NaN where that is not known, and
    for other spans. Of a rank with several reductions after its last pass it is the first.
    """
    backward = np.flatnonzero(is_kind(spans["kind"], BACKWARD) & ((spans["flags"] & Flag.DEVICE_CLOCK) != 0))
    instance = np.repeat(np.arange(len(collectives)), np.diff(collectives.begin))
    chosen = ((collectives.kind == RecordKind.GRAD_REDUCE) & collectives.complete)[instance]
    member, instance = collectives.record[chosen], instance[chosen]
    if not len(backward) or not len(member):
        return NO_REDUCTIONS
    before = np.searchsorted(backward, member) - 1
    last = backward[np.maximum(before, 0)]
    known = (before >= 0) & (spans["rank"][last] == spans["rank"][member]) & np.isfinite(length_s[last])
    known[known] &= _is_first(last[known], member[known])
    whole = np.bincount(instance[~known], minlength=len(collectives)) == 0
    last, instance = last[whole[instance]], instance[whole[instance]]
    usual_s, least = _usual_s(spans, backward, last, instance, length_s)
    own_s = np.fmin(length_s[last], usual_s)
    longer_s = length_s[last] - own_s
    ready_s = end_s[last] - longer_s
    latest_s = np.full(len(collectives), -np.inf)
    np.maximum.at(latest_s, instance, ready_s)
    before_s = latest_s[instance] - end_s[last]
    waits = (longer_s > least * own_s) & (before_s <= MOST_AFTER * own_s)
    after_s = np.zeros(len(collectives))
    np.maximum.at(after_s, instance[waits], before_s[waits])
    with_waits = np.bincount(instance[waits], minlength=len(collectives)) > 0
    chosen_rows = with_waits[instance]
    order = np.argsort(instance[chosen_rows], kind="stable")
    _, begin = np.unique(instance[chosen_rows][order], return_index=True)
    return OverlappedReductions(
        begin=np.append(begin, len(order)).astype(np.int64),
        last_pass=last[chosen_rows][order],
        ready_s=(ready_s - after_s[instance])[chosen_rows][order],
        waited_s=np.where(waits, longer_s, 0.0)[chosen_rows][order],
    )


def lengths_of_passes(edges: Edges, spans: RankRecords) -> Seconds:
    """Return the length of each backward and forward pass by the edges that lead to its end; NaN for other spans."""
    length_s = np.full(len(spans), np.nan)
    own = edges.target == 2 * edges.span + 1
    own &= is_kind(spans["kind"], PASSES)[edges.span]
    length_s[edges.span[own]] = edges.weight[own]
    return length_s


def with_reductions(edges: Edges, overlapped: OverlappedReductions, end_s: Seconds, first_event: int) -> Edges:
    """Return the edges with those passes waiting for an event, at which the last member is ready.

    Reduction i is event `first_event` + i.
    """
    if not len(overlapped):
        return edges
    place = np.full(len(end_s), -1)
    place[overlapped.last_pass] = np.arange(len(overlapped.last_pass))
    own = np.flatnonzero((edges.target == 2 * edges.span + 1) & (place[edges.span] >= 0))
    member = place[edges.span[own]]
    left_s = end_s[overlapped.last_pass] - overlapped.last_s[overlapped.instance]
    longer_s = (end_s[overlapped.last_pass] - overlapped.ready_s)[member]
    shorter_s = np.maximum(edges.weight[own] - longer_s, 0.0)
    event = first_event + overlapped.instance
    reached = dataclasses.replace(
        edges_of(edges.source[own], event[member], shorter_s, EdgeKind.SPAN, edges.span[own]), kind=edges.kind[own]
    )
    waiter = np.flatnonzero(overlapped.waited_s)
    span = overlapped.last_pass[waiter]
    transfers = edges_of(event[waiter], 2 * span + 1, left_s[waiter], EdgeKind.TRANSFER, span)
    weight = edges.weight.copy()
    waiting = overlapped.waited_s[member] > 0
    weight[own[waiting]] = shorter_s[waiting]
    return joined([dataclasses.replace(edges, weight=weight), reached, transfers])


def _is_first(last: Index, member: Index) -> NDArray[np.bool_]:
    """Return which members are the first of those with the same last pass."""
    order = np.lexsort((member, last))
    first = np.empty(len(order), np.bool_)
    first[order] = np.diff(last[order], prepend=-1) != 0
    return first


def _usual_s(
    spans: RankRecords, backward: Index, last: Index, instance: Index, length_s: Seconds
) -> tuple[Seconds, NDArray[np.float64]]:
    """Return how long each last pass would usually take, and the part of that by which one that waits is longer.

    That is the median of its rank's other backward passes of the same chunk. Where there is one microbatch, it is that
    of its forward pass times the least ratio of both in the reduction: that of the member which waits least.
    """
    chunks = 1 + int(spans["chunk"].max(initial=0))
    group = spans["rank"].astype(np.int64) * chunks + spans["chunk"]
    groups = int(group.max()) + 1
    may_wait = np.zeros(len(spans), np.bool_)
    may_wait[last] = True
    others = backward[~may_wait[backward] & np.isfinite(length_s[backward])]
    usual_s = segment_medians(group[others], length_s[others], groups)[group[last]]
    alone = np.isnan(usual_s)
    forward = np.flatnonzero((spans["kind"] == RecordKind.FORWARD) & np.isfinite(length_s))
    forward_s = segment_medians(group[forward], length_s[forward], groups)[group[last]]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(alone, length_s[last] / forward_s, np.nan)
    least = np.full(int(instance.max(initial=-1)) + 1, np.inf)
    np.fmin.at(least, instance, ratio)
    by_forward = forward_s * least[instance]
    return np.where(alone, by_forward, usual_s), np.where(alone, LEAST_SINGLE_WAIT, LEAST_WAIT)
