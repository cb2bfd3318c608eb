"""Usual durations of a job's operations, and steps replayed with some of them usual and the others as recorded.

The definitions are those of the what-if analysis of OSDI'25 "Understanding Stragglers in Large Model Training": a step
is ideal if every operation takes as long as alike operations usually do; S_w is an ideal step in which only the
operations of w take as long as recorded, over the ideal step. Time between the spans of a rank is an operation here,
too, so that a host that stalls is found.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import GAP_KINDS, EdgeKind, Seconds
from megatronapp_analyzer.graph.links import NO_LINK, Link, link_numbers, link_of, medians
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.graph.records import is_kind
from megatronapp_analyzer.graph.replay import MIXED_AT_ONCE, MixedReplayer, mixed_lengths_s
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.trace import COMPUTE_KINDS
from megatronapp_native import segment_medians

Mask = NDArray[np.bool_]
MAX_CELLS = 256
"""Cells that are replayed at most: those with the most time beyond the usual."""
MAX_LINKS = 64
"""The same of links."""
_WORKERS_PERCENT = 3
_KINDS, _EDGE_KINDS = 256, len(EdgeKind)
_LEAST_TABLE = 1 << 20
"""Numbers in a table that is always cheap."""
_LEAST_LOSS = 1e-6
"""Fraction of the ideal steps below which a loss is an error of rounding, and has no parts."""


class PeerSet(enum.StrEnum):
    """Operations that are expected to take equally long."""

    POOLED = "pooled"
    """All operations of a kind, as published: of computation the mean, of the others the median. A stage with more work
    than others is found slow, and a slow rank of few makes what is usual longer."""
    WORK = "work"
    """All of a kind on one stage and chunk: the lower median over the ranks of each rank's median is usual."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Ranks by stage and data-parallel rank. Ranks that meet inside their spans (tensor, context and expert groups) are
    slow together and have a cell in common. Arrays are by cell, or by rank.
    """

    stage: Index
    replica: Index
    of_rank: Index

    def __len__(self) -> int:
        return len(self.stage)

    @classmethod
    def of(cls, layout: JobLayout) -> "Cells":
        """Return the cells of a job, sorted by stage, then replica."""
        replicas = np.array([at.dp // layout.ep for at in layout.coordinates], np.int64)
        stages = np.array(layout.stages, np.int64)
        width = int(replicas.max()) + 1
        names, of_rank = np.unique(stages * width + replicas, return_inverse=True)
        return cls(stage=names // width, replica=names % width, of_rank=of_rank.astype(np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slowdowns:
    """Slowdowns of a job over T steps and of its C cells, each 1 where nothing is lost. NaN for a cell not replayed."""

    recorded_T: Seconds
    """Seconds of each step as recorded."""
    ideal_T: Seconds
    """Seconds of each step with usual durations."""
    cells: Cells
    cells_CT: NDArray[np.float64]
    """Slowdown of each cell in each step."""
    kinds: dict[int, float]
    """Slowdown if only spans of one kind, and the time before them, take as long as recorded; largest first."""
    slowest_fraction: float | None
    """M_W: the fraction of the lost time that is saved if the slowest 3 % of cells are ideal; None without a loss."""
    last_stage_fraction: float | None
    """M_S: the same of the last stage."""
    links: dict[Link, float]
    """Slowdown if only the messages of one link take as long as recorded; largest first."""
    launch_ratio: float | None
    """Recorded steps over those in which no time passes between the spans of a rank; None if nothing is left of these.
    """

    @property
    def slowdown(self) -> float:
        """Return S, the recorded steps over the ideal ones."""
        return float(self.recorded_T.sum() / self.ideal_T.sum())

    @property
    def cells_C(self) -> NDArray[np.float64]:
        """Return S_w of each cell over all steps."""
        over: NDArray[np.float64] = (self.cells_CT * self.ideal_T).sum(axis=1) / self.ideal_T.sum()
        return over


def usual_weights(graphs: Sequence[StepGraph], layout: JobLayout, peers: PeerSet) -> list[Seconds]:
    """Return the usual weight of the edges of each graph, from the recorded weights of alike edges of all graphs."""
    weights = np.concatenate([graph.edges.weight for graph in graphs])
    chunks = 1 + max(int(graph.spans["chunk"].max(initial=0)) for graph in graphs)
    keys = np.concatenate([_keys(graph, layout, peers, chunks) for graph in graphs])
    names, group = _numbered(keys)
    if peers is PeerSet.WORK:
        ranks = np.concatenate([graph.spans["rank"][graph.edges.span] for graph in graphs])
        usual = _of_usual_rank(group, len(names), ranks.astype(np.int64), weights)
    else:
        usual = medians(group, weights, len(names))
        computes = np.isin(names % _EDGE_KINDS, (EdgeKind.SPAN, EdgeKind.TRANSFER))
        computes &= is_kind((names // _EDGE_KINDS % _KINDS).astype(np.uint8), COMPUTE_KINDS)
        means = np.bincount(group, weights, minlength=len(names)) / np.bincount(group, minlength=len(names))
        usual[computes] = means[computes]
    sizes = np.cumsum([len(graph.edges.weight) for graph in graphs])[:-1]
    parts: list[Seconds] = np.split(usual[group], sizes)
    return parts


def _keys(graph: StepGraph, layout: JobLayout, peers: PeerSet, chunks: int) -> Index:
    """Return a number for each edge, equal for alike edges: of its stage, chunk, kind of span and kind of edge."""
    key = graph.spans["kind"].astype(np.int64)  # of spans first, of which there are fewer than edges
    if peers is PeerSet.WORK:
        place = np.array(layout.stages, np.int64)[graph.spans["rank"]] * chunks + graph.spans["chunk"]
        key += place * _KINDS
    edges: Index = key[graph.edges.span] * _EDGE_KINDS + graph.edges.kind
    return edges


def _numbered(keys: Index) -> tuple[Index, Index]:
    """Return the distinct keys, ascending, and for each key its number among them.

    Where keys are small numbers, a table takes the place of the sort of `np.unique`.
    """
    size = int(keys.max(initial=-1)) + 1
    if size > max(_LEAST_TABLE, len(keys)):
        names, group = np.unique(keys, return_inverse=True)
        return names, group
    table = np.zeros(size, np.int64)
    table[keys] = 1
    names = np.flatnonzero(table)
    table[names] = np.arange(len(names))
    return names, table[keys]


def _of_usual_rank(group: Index, groups: int, ranks: Index, values: Seconds) -> Seconds:
    """Return for each group the lower median over ranks of each rank's median: of two ranks that of the faster one."""
    names, of_rank = _numbered(ranks * groups + group)
    return segment_medians(names % groups, medians(of_rank, values, len(names)), groups)


def find_slowdowns(
    graphs: Sequence[StepGraph],
    layout: JobLayout,
    peers: PeerSet,
    *,
    max_cells: int = MAX_CELLS,
    max_links: int = MAX_LINKS,
    replayer: MixedReplayer = mixed_lengths_s,
) -> Slowdowns:
    """Return the slowdowns over the steps of `graphs`, of which there is at least one."""
    window = _Window(graphs, layout, peers, replayer)
    replayed = np.sort(window.heaviest_cells(max_cells))
    links = window.heaviest_links(max_links)
    kinds = sorted({int(kind) for graph in graphs for kind in np.unique(graph.spans["kind"][graph.edges.span])})

    def scenarios(edges: _EdgeOwners) -> Iterator[Mask]:
        yield np.ones(len(edges.cell), np.bool_)
        yield np.zeros(len(edges.cell), np.bool_)
        yield ~edges.in_last_stage
        yield from (edges.cell == cell for cell in replayed)
        yield from (edges.kind == kind for kind in kinds)
        yield from (edges.link == link for link in links)

    table = window.seconds(scenarios)
    recorded_T, ideal_T, without_last_T = table[:3]
    by_cell, by_kind, by_link = np.split(table[3:], np.cumsum([len(replayed), len(kinds)]))
    cells_CT = np.full((len(window.cells), len(graphs)), np.nan)
    cells_CT[replayed] = by_cell / ideal_T
    of_kinds = {kind: float(row.sum() / ideal_T.sum()) for kind, row in zip(kinds, by_kind, strict=True)}
    of_links = {link_of(link): float(row.sum() / ideal_T.sum()) for link, row in zip(links, by_link, strict=True)}
    slowest = replayed[np.argsort(-by_cell.sum(axis=1), kind="stable")]
    slowest = slowest[: -(-len(window.cells) * _WORKERS_PERCENT // 100)]
    (without_slowest_T,) = window.seconds(lambda edges: [~np.isin(edges.cell, slowest)])
    return Slowdowns(
        recorded_T=recorded_T,
        ideal_T=ideal_T,
        cells=window.cells,
        cells_CT=cells_CT,
        kinds=dict(sorted(of_kinds.items(), key=lambda item: -item[1])),
        slowest_fraction=_saved_fraction(recorded_T, ideal_T, without_slowest_T),
        last_stage_fraction=_saved_fraction(recorded_T, ideal_T, without_last_T),
        links=dict(sorted(of_links.items(), key=lambda item: -item[1])),
        launch_ratio=_ratio(recorded_T, window.seconds_without_gaps()),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _EdgeOwners:
    """Cell, kind of span, stage and link of each edge of a graph."""

    cell: Index
    kind: NDArray[np.uint8]
    in_last_stage: Mask
    link: Index
    """NO_LINK of an edge of no message."""

    @classmethod
    def of(cls, graph: StepGraph, cell_of_rank: Index, is_last: Mask) -> "_EdgeOwners":
        """Return those of a graph, read from single columns: the rows of the spans of all edges are large."""
        ranks, kinds = (graph.spans[name][graph.edges.span] for name in ("rank", "kind"))
        return cls(cell=cell_of_rank[ranks], kind=kinds, in_last_stage=is_last[ranks], link=link_numbers(graph))


class _Window:
    """Steps with their usual weights, which can be replayed in scenarios."""

    def __init__(self, graphs: Sequence[StepGraph], layout: JobLayout, peers: PeerSet, replayer: MixedReplayer) -> None:
        self._graphs, self._replayer = graphs, replayer
        self._usual = usual_weights(graphs, layout, peers)
        self.cells = Cells.of(layout)
        is_last = np.isin(layout.stages, layout.loss_stages)
        self._edges = [_EdgeOwners.of(graph, self.cells.of_rank, is_last) for graph in graphs]

    def heaviest_cells(self, count: int) -> Index:
        """Return the cells with the most time beyond the usual, largest first."""
        excess = np.zeros(len(self.cells))
        for over, edges in self._excesses():
            excess += np.bincount(edges.cell, over, minlength=len(self.cells))
        return np.argsort(-excess, kind="stable")[:count]

    def heaviest_links(self, count: int) -> Index:
        """Return the numbers of the links with the most time beyond the usual, largest first; none without any."""
        numbers, seconds = [], []
        for over, edges in self._excesses():
            longer = np.flatnonzero((edges.link != NO_LINK) & (over > 0))
            numbers.append(edges.link[longer])
            seconds.append(over[longer])
        names, group = np.unique(np.concatenate(numbers), return_inverse=True)
        excess = np.bincount(group, np.concatenate(seconds), minlength=len(names))
        return names[np.argsort(-excess, kind="stable")[:count]]

    def _excesses(self) -> Iterator[tuple[Seconds, _EdgeOwners]]:
        """Yield by how much each edge of a step is longer than usual."""
        for graph, ideal, edges in zip(self._graphs, self._usual, self._edges, strict=True):
            yield np.maximum(graph.edges.weight - ideal, 0.0), edges

    def seconds_without_gaps(self) -> Seconds:
        """Return the length of each step, [T], with all spans as recorded and no time between those of a rank."""
        found = []
        for graph in self._graphs:
            weights = np.where(np.isin(graph.edges.kind, GAP_KINDS), 0.0, graph.edges.weight)
            found.append(self._replayer(graph, weights, np.zeros(len(weights), np.uint8), 1)[0])
        return np.array(found)

    def seconds(self, scenarios: Callable[[_EdgeOwners], Iterable[Mask]]) -> Seconds:
        """Return the length of each step, [scenarios, T]: an edge is as recorded where its mask is true."""
        columns = []
        for graph, ideal, edges in zip(self._graphs, self._usual, self._edges, strict=True):
            masks, parts = iter(scenarios(edges)), []
            while together := list(itertools.islice(masks, MIXED_AT_ONCE)):
                recorded_in = np.zeros(len(ideal), np.uint8)
                for bit, mask in enumerate(together):
                    recorded_in |= mask.view(np.uint8) << bit
                parts.append(self._replayer(graph, ideal, recorded_in, len(together)))
            columns.append(np.concatenate(parts))
        return np.stack(columns, axis=1)


def _ratio(over_T: Seconds, under_T: Seconds) -> float | None:
    return float(over_T.sum() / under_T.sum()) if under_T.sum() > 0 else None


def _saved_fraction(recorded_T: Seconds, ideal_T: Seconds, seconds_T: Seconds) -> float | None:
    lost_s = recorded_T.sum() - ideal_T.sum()
    if lost_s <= _LEAST_LOSS * ideal_T.sum():
        return None
    return float((recorded_T.sum() - seconds_T.sum()) / lost_s)
