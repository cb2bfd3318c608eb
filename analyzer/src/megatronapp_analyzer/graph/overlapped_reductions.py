"""Waits for other replicas inside the last backward pass of a step, with which reductions of gradients overlap.

A device with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) runs no kernel that was launched after a reduction
before that reduction can start, and a second one starts when all replicas have reduced the first. So the last pass of a
fast replica lasts until the slowest one is there, and both end together, as two H200 showed. If the slowest one
computes on after its last reduction, the others have ended that reduction earlier than its pass ends. The passes of the
other microbatches overlap with nothing: they show how long the last one would have taken alone.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.edges import EdgeKind, Edges, Seconds, edges_of, joined
from megatronapp_analyzer.graph.matching import Collectives, Index
from megatronapp_analyzer.graph.records import is_kind
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import PASS_KINDS, Flag, RecordKind
from megatronapp_native import segment_medians

LEAST_WAIT = 0.05
"""Part by which a last pass must be longer than usual to have waited; the reductions themselves cost it about as much.
"""
LEAST_SINGLE_WAIT = 0.01
"""The same with a single microbatch, where last passes are compared with those of other replicas."""
MOST_APART = 0.05
"""Part of a last pass by which the ends of all members may differ if they wait for each other inside it.

They may differ by more for a member that has already reduced its gradients when the last pass of another ends. Without
overlap that cannot be: a reduction needs the gradients of all.
"""
_KINDS = 256
LAST_PASSES = frozenset({RecordKind.BACKWARD, RecordKind.WEIGHT})
"""Passes with gradients; of split ones WEIGHT has those that are reduced."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverlappedReductions:
    """Reductions for which a member waited in its last pass. Members of number i are `begin[i]` to `begin[i + 1]`."""

    begin: Index
    last_pass: Index
    """Span of the last pass of each member."""
    ready_s: Seconds
    """When it would have started the last reduction for which any of them waits."""
    waited_s: Seconds
    """How long it waited; 0 for the member that was the last to be ready, and for others that did not wait."""

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
    spans: RankRecords, end_s: Seconds, collectives: Collectives, length_s: Seconds, tolerance_s: float
) -> OverlappedReductions:
    """Return the reductions of gradients for which ranks waited in their last pass on a device.

    `length_s`: how long each pass took once all ranks that meet inside it had begun; NaN where that is not known, and
    for other spans. `tolerance_s`: by how much the clocks of two ranks may differ. Of several reductions after the
    last pass of a rank, that with the most members is used.
    """
    gradients = np.flatnonzero(is_kind(spans["kind"], LAST_PASSES) & ((spans["flags"] & Flag.DEVICE_CLOCK) != 0))
    instance = np.repeat(np.arange(len(collectives)), np.diff(collectives.begin))
    reduces = (collectives.kind == RecordKind.GRAD_REDUCE)[instance]
    member, instance = collectives.record[reduces], instance[reduces]
    if not len(gradients) or not len(member):
        return NO_REDUCTIONS
    before = np.searchsorted(gradients, member) - 1
    last = gradients[np.maximum(before, 0)]
    known = (before >= 0) & (spans["rank"][last] == spans["rank"][member]) & np.isfinite(length_s[last])
    known[known] &= _is_largest(last[known], member[known], collectives.expected[instance[known]])
    last, instance, reduced_s = last[known], instance[known], end_s[member[known]]
    usual_s, least = _usual_s(spans, gradients, last, instance, length_s)
    own_s = np.fmin(length_s[last], usual_s)
    longer_s = length_s[last] - own_s
    ready_s = end_s[last] - longer_s
    count = len(collectives)
    latest_s, last_end_s = _maxima(ready_s, instance, count), _maxima(end_s[last], instance, count)
    is_reduced = reduced_s + tolerance_s <= last_end_s[instance]
    all_begun_s = _maxima(end_s[last] - length_s[last], instance, count)
    shortest_s = -_maxima(-own_s, instance, count)
    least_end_s = np.where(is_reduced, all_begun_s[instance], (last_end_s - MOST_APART * shortest_s)[instance])
    together = _maxima(least_end_s - end_s[last], instance, count) <= 0
    waited_s = np.minimum(longer_s, latest_s[instance] - ready_s)
    waits = together[instance] & (waited_s > least * own_s)
    # A member whose pass lasts longer than the first wait was ready when that wait ended.
    first_end_s = -_maxima(np.where(waits, -end_s[last], -np.inf), instance, count)
    ready_s = np.minimum(ready_s, first_end_s[instance])
    with_waits = np.bincount(instance[waits], minlength=count) > 0
    rows = np.flatnonzero(with_waits[instance])
    rows = rows[np.argsort(instance[rows], kind="stable")]
    _, begin = np.unique(instance[rows], return_index=True)
    return OverlappedReductions(
        begin=np.append(begin, len(rows)).astype(np.int64),
        last_pass=last[rows],
        ready_s=ready_s[rows],
        waited_s=np.where(waits, waited_s, 0.0)[rows],
    )


def lengths_of_passes(edges: Edges, spans: RankRecords) -> Seconds:
    """Return the length of each pass by the edges that lead to its end; NaN for other spans."""
    length_s = np.full(len(spans), np.nan)
    own = edges.target == 2 * edges.span + 1
    own &= is_kind(spans["kind"], PASS_KINDS)[edges.span]
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
    transfers = edges_of(event[waiter], 2 * span + 1, left_s[waiter], EdgeKind.REDUCED, span)
    weight = edges.weight.copy()
    waiting = overlapped.waited_s[member] > 0
    weight[own[waiting]] = shorter_s[waiting]
    return joined([dataclasses.replace(edges, weight=weight), reached, transfers])


def _is_largest(last: Index, member: Index, size: Index) -> NDArray[np.bool_]:
    """Return which members are those of the largest reduction after their last pass; of equal ones, of the first."""
    order = np.lexsort((member, -size, last))
    out = np.empty(len(order), np.bool_)
    out[order] = np.diff(last[order], prepend=-1) != 0
    return out


def _maxima(values: Seconds, group: Index, groups: int) -> Seconds:
    """Return the largest known value of each group; -inf without any."""
    out = np.full(groups, -np.inf)
    np.fmax.at(out, group, values)
    return out


def _usual_s(
    spans: RankRecords, gradients: Index, last: Index, instance: Index, length_s: Seconds
) -> tuple[Seconds, NDArray[np.float64]]:
    """Return how long each last pass would usually take, and the part of that by which one that waits is longer.

    That is the median of its rank's other passes of this kind and chunk. With one microbatch, it is the length of its
    forward pass times the least ratio of both in the reduction, which the member has that waits least.
    """
    chunks = 1 + int(spans["chunk"].max(initial=0))
    group = spans["rank"].astype(np.int64) * chunks + spans["chunk"]
    groups = int(group.max()) + 1
    of_kind = group * _KINDS + spans["kind"]
    may_wait = np.zeros(len(spans), np.bool_)
    may_wait[last] = True
    others = gradients[~may_wait[gradients] & np.isfinite(length_s[gradients])]
    usual_s = segment_medians(of_kind[others], length_s[others], groups * _KINDS)[of_kind[last]]
    alone = np.isnan(usual_s)
    if not alone.any():
        return usual_s, np.full(len(last), LEAST_WAIT)
    forward = np.flatnonzero((spans["kind"] == RecordKind.FORWARD) & (length_s > 0))
    forward_s = segment_medians(group[forward], length_s[forward], groups)[group[last]]
    least = -_maxima(np.where(alone, -length_s[last] / forward_s, -np.inf), instance, int(instance.max()) + 1)
    least[~np.isfinite(least)] = np.nan
    return np.where(alone, forward_s * least[instance], usual_s), np.where(alone, LEAST_SINGLE_WAIT, LEAST_WAIT)
