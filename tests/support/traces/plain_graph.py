"""Plain forms, in NumPy, of what the analyzer computes in C++ of the graph of a step and of groups of values."""

import itertools
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import EdgeKind, Seconds
from megatronapp_analyzer.graph.matching import Index, Messages
from megatronapp_analyzer.graph.records import CommIndex, is_kind
from megatronapp_analyzer.graph.replay import makespan_s
from megatronapp_analyzer.graph.usual import PeerSet
from megatronapp_analyzer.model import JobLayout, RankRecords
from megatronapp_common.trace import COMPUTE_KINDS, RecordKind

_ORDINAL_BITS = 32
_PARTS = (RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT)


def plain_sort_by_level(source: Index, target: Index, events: int) -> tuple[Index, Index, int]:
    """Sort edges by level of their target (Kahn's algorithm by levels): order, start of each level, events reached."""
    by_source = np.argsort(source, kind="stable")
    begin = np.searchsorted(source[by_source], np.arange(events + 1))
    waiting = np.bincount(target, minlength=events)
    level = np.zeros(events, np.int64)
    frontier = np.flatnonzero(waiting == 0)
    seen, depth = 0, 0
    while len(frontier):
        seen += len(frontier)
        level[frontier] = depth
        depth += 1
        counts = begin[frontier + 1] - begin[frontier]
        offsets = np.repeat(begin[frontier] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        targets, arrivals = np.unique(target[by_source[offsets]], return_counts=True)
        waiting[targets] -= arrivals
        frontier = targets[waiting[targets] == 0]
    if seen < events:
        return np.empty(0, np.int64), np.empty(0, np.int64), seen
    order = np.lexsort((target, level[target]))
    return order, np.searchsorted(level[target][order], np.arange(1, depth + 1)), seen


def plain_replay(graph: StepGraph, weights: Seconds) -> Seconds:
    """Replay with NumPy, level after level, all scenarios at once; see `Replayer`."""
    scenarios = weights.shape[1:]
    times = np.empty((graph.events, *scenarios))
    times[:] = graph.initial_s.reshape(-1, *([1] * len(scenarios)))
    target = graph.edges.target
    begin = np.flatnonzero(np.diff(target, prepend=-1))  # of the edges of each target, which are in one level
    reached_events = target[begin]
    parts = zip(
        itertools.pairwise(graph.level_begin),
        itertools.pairwise(np.searchsorted(begin, graph.level_begin)),
        strict=True,
    )
    for (first, last), (first_event, last_event) in parts:
        if last > first:
            part, events = slice(first, last), slice(first_event, last_event)
            reached = times[graph.edges.source[part]] + weights[part]
            times[reached_events[events]] = np.maximum.reduceat(reached, begin[events] - first, axis=0)
    return times


def plain_mixed_lengths_s(graph: StepGraph, ideal: Seconds, recorded_in: NDArray[np.uint8], scenarios: int) -> Seconds:
    """Replay with a table of weights for each scenario; see `MixedReplayer`."""
    recorded = (recorded_in[:, None] >> np.arange(scenarios)) & 1 != 0
    return makespan_s(graph, plain_replay(graph, np.where(recorded, graph.edges.weight[:, None], ideal[:, None])))


def plain_usual_weights(graphs: Sequence[StepGraph], layout: JobLayout, peers: PeerSet) -> list[Seconds]:
    """Return the usual weights of each graph, group by group."""
    alike: dict[tuple[int, ...], dict[int, list[float]]] = {}
    keys = []
    for graph in graphs:
        spans = graph.spans[graph.edges.span]
        of_graph = []
        for kind, span, weight in zip(graph.edges.kind.tolist(), spans, graph.edges.weight.tolist(), strict=True):
            rank = int(span["rank"])
            place = (layout.stages[rank], int(span["chunk"])) if peers is PeerSet.WORK else ()
            key: tuple[int, ...] = (kind, int(span["kind"]), *place)
            alike.setdefault(key, {}).setdefault(rank, []).append(weight)
            of_graph.append(key)
        keys.append(of_graph)
    usual = {}
    for key, by_rank in alike.items():
        if peers is PeerSet.WORK:
            usual[key] = statistics.median_low([statistics.median(weights) for weights in by_rank.values()])
        else:
            every = np.concatenate(list(by_rank.values()))
            computes = key[0] in (EdgeKind.SPAN, EdgeKind.TRANSFER) and key[1] in COMPUTE_KINDS
            usual[key] = float(np.mean(every) if computes else np.median(every))
    return [np.array([usual[key] for key in of_graph]) for of_graph in keys]


def plain_segment_medians(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the median of each group's values, the lower one of two middles; NaN where a group is empty."""
    order = np.lexsort((values, group))
    begin = np.searchsorted(group[order], np.arange(groups + 1))
    size = np.diff(begin)
    out = np.full(groups, np.nan)
    filled = np.flatnonzero(size)
    out[filled] = values[order[begin[filled] + (size[filled] - 1) // 2]]
    return out


def plain_messages_of(records: RankRecords, index: CommIndex) -> Messages:
    """Match messages as `match_messages`, with the communicators already numbered."""
    numbers = index.numbers(records)
    where = np.flatnonzero((numbers >= 0) & is_kind(records["kind"], frozenset(_PARTS)))
    pairs = index.pairs
    where = where[pairs[numbers[where], 0] >= 0]
    key = (numbers[where] << _ORDINAL_BITS) | records["ordinal"][where].astype(np.int64)
    keys, row = np.unique(key, return_inverse=True)
    kinds = records["kind"][where]
    parts = [_column(len(keys), row[kinds == part], where[kinds == part]) for part in _PARTS]
    pair = pairs[keys >> _ORDINAL_BITS]
    return Messages(
        source=pair[:, 0],
        destination=pair[:, 1],
        ordinal=keys & ((1 << _ORDINAL_BITS) - 1),
        send_post=parts[0],
        send_wait=parts[1],
        recv_post=parts[2],
        recv_wait=parts[3],
    )


def _column(length: int, rows: Index, values: Index) -> Index:
    column = np.full(length, -1, np.int64)
    column[rows] = values
    return column
