"""Blame of one step: the operations that it lost its time to, and the ranks that waited because of them.

As durations grow from usual to recorded, the step grows with the operations on its critical path. The path is walked
at some points in between, and each operation on it is blamed for its growth from there on, so that the blame of a step
sums to the time that it lost, but for the number of points: an Aumann-Shapley value (Aumann and Shapley, "Values of
Non-Atomic Games", 1974). A rank that is nearly as slow as the culprit is on no critical path and gets no blame; the
slowdowns of `graph.usual` show it.
"""

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np

from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import GAP_KINDS, EdgeKind, Seconds
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.graph.records import is_kind
from megatronapp_analyzer.graph.replay import Replayer, lanes_at_once, makespan_s, replay
from megatronapp_analyzer.graph.waits import Waits, attribute
from megatronapp_common.trace import COMPUTE_KINDS, P2P_KINDS, RecordKind

POINTS = 32
"""Points between usual and recorded durations at which the critical path is walked."""
LEAST_WAIT = 0.02
"""Fraction of the time a step lost that a rank must have waited for another to be its victim."""


class BlamedCause(enum.StrEnum):
    """Class of an operation that is blamed."""

    COMPUTE = "compute"
    HOST = "host"
    """Between spans, or waiting for data."""
    LINK = "link"
    """Delivery of a message after both ends were ready."""
    COLLECTIVE = "collective"
    """Transfer of a collective after its last member arrived."""
    OTHER = "other"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlamedItem:
    """Seconds that a step lost to one cause of some ranks; negative where it was shorter than usual.

    The ranks are one rank, those of a unit, which meet inside their spans, or a link (source, destination).
    """

    ranks: tuple[int, ...]
    cause: BlamedCause
    seconds: float

    @property
    def late_ranks(self) -> tuple[int, ...]:
        """Return the ranks that others wait for: of a link its destination."""
        return self.ranks[-1:] if self.cause is BlamedCause.LINK else self.ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A rank that waited because of the culprit: for it (distance 1), or for another victim."""

    rank: int
    waited_for: int
    seconds: float
    distance: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBlame:
    """Blame of one step. Spans are indices into the stream of the step."""

    recorded_s: float
    ideal_s: float
    items: tuple[BlamedItem, ...]
    """Largest first."""
    victims: tuple[Victim, ...]
    """Nearest to the culprit first, then those that waited longest."""
    path: Index
    """Spans on the critical path of the recorded step, in order."""
    culprit_spans: Index
    """Spans on that path that are the culprit's, and longer than usual."""
    victim_spans: Index
    """Spans in which victims waited."""

    @property
    def lost_s(self) -> float:
        """Return the seconds by which the step was longer than ideal."""
        return self.recorded_s - self.ideal_s

    @property
    def blamed_s(self) -> float:
        """Return the sum of all items; equal to `lost_s` but for the number of points."""
        return sum(item.seconds for item in self.items)


def find_blame(graph: StepGraph, ideal: Seconds, unit_of_rank: Index, replayer: Replayer = replay) -> StepBlame:
    """Return the blame of a step whose edges usually have the weights `ideal`; units are those it was built with."""
    grown = graph.edges.weight - ideal
    arrivals = _Arrivals.of(graph)
    replays = _replays(graph, ideal, grown, replayer)
    ideal_s = float(makespan_s(graph, next(replays)[1]))
    weights, times = next(replays)
    recorded_s, path = float(makespan_s(graph, times)), arrivals.longest_path(weights, times)
    blame = np.zeros(len(grown))
    for weights, times in replays:
        between = arrivals.longest_path(weights, times)
        blame[between] += grown[between] / POINTS
    items = _items(graph, blame, unit_of_rank)
    culprit = items[0] if items and items[0].seconds > 0 else None
    late = () if culprit is None else culprit.late_ranks
    waits = attribute(graph)
    victims = _victims(waits, late, recorded_s - ideal_s)
    return StepBlame(
        recorded_s=recorded_s,
        ideal_s=ideal_s,
        items=items,
        victims=victims,
        path=_in_order(graph.edges.span[path]),
        culprit_spans=_culprit_spans(graph, path, grown, culprit),
        victim_spans=_victim_spans(waits, victims, late),
    )


def _replays(graph: StepGraph, ideal: Seconds, grown: Seconds, replayer: Replayer) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield weights and times of the step with none of the growth, with all of it, and at each point in between."""
    parts = np.concatenate([[0.0, 1.0], (np.arange(POINTS) + 0.5) / POINTS])
    together = lanes_at_once(graph)
    for first in range(0, len(parts), together):
        weights = np.multiply.outer(grown, parts[first : first + together])
        weights += ideal[:, None]
        times = replayer(graph, weights)
        for column in range(weights.shape[1]):
            yield weights[:, column], times[:, column]


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrivals:
    """Edges by the event that they lead to: the number of the first, -1 without any, and the end of these edges."""

    source: Index
    first: Index
    end: Index

    @classmethod
    def of(cls, graph: StepGraph) -> "_Arrivals":
        """Return those of a graph, whose edges are sorted by the event that they lead to."""
        target = graph.edges.target
        begin = np.flatnonzero(np.diff(target, prepend=-1))
        first = np.full(graph.events, -1, np.int64)
        first[target[begin]] = begin
        end = np.zeros(graph.events, np.int64)
        end[target[begin]] = np.append(begin[1:], len(target))
        return cls(graph.edges.source, first, end)

    def longest_path(self, weights: Seconds, times: Seconds) -> Index:
        """Return the edges of a longest path to the last event; `times` are those of a replay with `weights`."""
        event = int(times.argmax()) if len(times) else -1
        path = []
        while event >= 0 and self.first[event] >= 0:
            edges = slice(self.first[event], self.end[event])
            edge = int(self.first[event] + np.argmax(times[self.source[edges]] + weights[edges]))
            path.append(edge)
            event = int(self.source[edge])
        return np.array(path[::-1], np.int64)


def _causes(graph: StepGraph) -> Index:
    """Return the number of the cause of each edge, in the order of `BlamedCause`."""
    edges, kinds = graph.edges, graph.spans["kind"][graph.edges.span]
    order = list(BlamedCause)
    found = np.full(len(kinds), order.index(BlamedCause.OTHER), np.int64)
    found[edges.kind == EdgeKind.TRANSFER] = order.index(BlamedCause.COLLECTIVE)
    found[is_kind(kinds, P2P_KINDS)] = order.index(BlamedCause.LINK)
    found[is_kind(kinds, COMPUTE_KINDS)] = order.index(BlamedCause.COMPUTE)
    found[edges.kind == EdgeKind.REDUCED] = order.index(BlamedCause.COLLECTIVE)
    gaps = np.isin(edges.kind, GAP_KINDS)
    found[(kinds == RecordKind.DATA) | gaps] = order.index(BlamedCause.HOST)
    return found


def _senders(graph: StepGraph) -> Index:
    """Return the other end of the message that each span waits for; -1 where it waits for none."""
    messages = graph.messages
    found = np.full(len(graph.spans), -1, np.int64)
    for column, other in (
        (messages.recv_wait, messages.source),
        (messages.send_wait, messages.destination),
    ):
        found[column[column >= 0]] = other[column >= 0]
    return found


def _items(graph: StepGraph, blame: Seconds, unit_of_rank: Index) -> tuple[BlamedItem, ...]:
    causes = list(BlamedCause)
    number, rank = _causes(graph), graph.spans["rank"][graph.edges.span].astype(np.int64)
    computes = number == causes.index(BlamedCause.COMPUTE)
    owner = np.where(computes, unit_of_rank[rank], rank)
    other = np.where(number == causes.index(BlamedCause.LINK), _senders(graph)[graph.edges.span], -1)
    blamed = np.flatnonzero(blame != 0)
    key = ((other[blamed] + 1) << 32) | (owner[blamed] << 8) | number[blamed]
    names, group = np.unique(key, return_inverse=True)
    sums = np.bincount(group, blame[blamed], minlength=len(names))
    items = []
    for place in np.argsort(-sums, kind="stable").tolist():
        name = int(names[place])
        cause, source, own = causes[name & 0xFF], (name >> 32) - 1, (name >> 8) & 0xFF_FFFF
        ranks: tuple[int, ...] = (own,) if source < 0 else (source, own)
        if cause is BlamedCause.COMPUTE:
            ranks = tuple(np.flatnonzero(unit_of_rank == own).tolist())
        items.append(BlamedItem(ranks=ranks, cause=cause, seconds=float(sums[place])))
    return tuple(items)


def _victims(waits: Waits, late: tuple[int, ...], lost_s: float) -> tuple[Victim, ...]:
    """Return the ranks that waited for the culprit or for its victims, each with the rank nearer to the culprit."""
    size = 1 + int(max(waits.waiter.max(initial=0), waits.cause.max(initial=0)))
    key, group = np.unique(waits.waiter * size + waits.cause, return_inverse=True)
    seconds = np.bincount(group, waits.seconds, minlength=len(key))
    real = seconds >= LEAST_WAIT * max(lost_s, 0.0)
    waiter, cause, seconds = key[real] // size, key[real] % size, seconds[real]
    distance, nearest = dict.fromkeys(late, 0), set(late)
    found: list[Victim] = []
    while nearest:
        reached: dict[int, Victim] = {}
        for place in np.flatnonzero(np.isin(cause, sorted(nearest))).tolist():
            victim = Victim(
                rank=int(waiter[place]),
                waited_for=int(cause[place]),
                seconds=float(seconds[place]),
                distance=distance[int(cause[place])] + 1,
            )
            known = reached.get(victim.rank)
            if victim.rank not in distance and (known is None or known.seconds < victim.seconds):
                reached[victim.rank] = victim
        found += sorted(reached.values(), key=lambda victim: -victim.seconds)
        distance |= {rank: victim.distance for rank, victim in reached.items()}
        nearest = set(reached)
    return tuple(found)


def _culprit_spans(graph: StepGraph, path: Index, grown: Seconds, culprit: BlamedItem | None) -> Index:
    if culprit is None:
        return np.empty(0, np.int64)
    spans = graph.edges.span[path]
    own = np.isin(graph.spans["rank"][spans], culprit.late_ranks)
    own &= _causes(graph)[path] == list(BlamedCause).index(culprit.cause)
    if culprit.cause is BlamedCause.LINK and len(culprit.ranks) > 1:
        own &= _senders(graph)[spans] == culprit.ranks[0]
    return np.unique(spans[own & (grown[path] > 0)])


def _victim_spans(waits: Waits, victims: tuple[Victim, ...], late: tuple[int, ...]) -> Index:
    """Return the spans in which a victim waited for a rank that is nearer to the culprit."""
    ends = [int(waits.waiter.max(initial=0)), int(waits.cause.max(initial=0)), *late]
    distance = np.full(1 + max(ends), np.iinfo(np.int64).max)
    distance[list(late)] = 0
    distance[[victim.rank for victim in victims]] = [victim.distance for victim in victims]
    return np.unique(waits.span[distance[waits.cause] < distance[waits.waiter]])


def _in_order(spans: Index) -> Index:
    """Return the spans without repetitions, in the order in which they first occur."""
    _, first = np.unique(spans, return_index=True)
    return spans[np.sort(first)]
