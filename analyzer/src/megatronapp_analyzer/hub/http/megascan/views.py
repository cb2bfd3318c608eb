"""Answers about slowdowns, computed from the steps of the store."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.links import deliveries_of
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.graph.records import stream_rows
from megatronapp_analyzer.graph.usual import MAX_CELLS, MAX_LINKS, Cells, PeerSet, Slowdowns, find_slowdowns
from megatronapp_analyzer.hub.blame.stored_step import EDGE_REPLAYS, blame_of, few_enough
from megatronapp_analyzer.hub.http.megascan import schemas
from megatronapp_analyzer.hub.ingest import step_totals
from megatronapp_analyzer.hub.ingest.digest import durations_ns
from megatronapp_analyzer.hub.ingest.step_graphs import GraphOfStep, StepGraphs, aligned
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.ranks import kind_name
from megatronapp_analyzer.model import JobLayout, RankRecords

LEAST_CELLS = 8
LEAST_LINKS = 8
"""Links that are replayed at least, if that many take longer than usual."""
SHOWN_CELLS, SHOWN_LINKS, SHOWN_BLAMED, SHOWN_VICTIMS, SHOWN_SPANS = 4096, 1024, 32, 256, 2000
DECIMALS = 7


def slowdowns_view(
    attempt: int, layout: JobLayout | None, steps: Sequence[StoredStep], peers: PeerSet, graphs: StepGraphs
) -> schemas.SlowdownsView:
    """Return the slowdowns over the newest of `steps`, whole ones of one attempt, as many as are replayed quickly."""
    chosen = [] if layout is None else few_enough(steps, Cells.of(layout))
    found = [] if layout is None else graphs.of(chosen, layout)
    if layout is None or not found:
        return schemas.SlowdownsView(
            attempt=attempt, peers=peers.value, steps=[], recorded_seconds=[], ideal_seconds=[], slowdown=None,
            cells=[], replicas_per_cell=1, kinds={}, slowest_fraction=None, last_stage_fraction=None, links=[],
            launch_ratio=None, skipped_steps=len(chosen),
        )  # fmt: skip
    edges = sum(len(of_step.graph.edges.weight) for of_step in found)
    scenarios = EDGE_REPLAYS // max(edges, 1)
    cells = int(np.clip(scenarios, LEAST_CELLS, MAX_CELLS))
    links = int(np.clip(scenarios // 4, LEAST_LINKS, MAX_LINKS))
    result = find_slowdowns([of_step.graph for of_step in found], layout, peers, max_cells=cells, max_links=links)
    per_cell = -(-len(result.cells) // SHOWN_CELLS)
    return schemas.SlowdownsView(
        attempt=attempt,
        peers=peers.value,
        steps=[of_step.step for of_step in found],
        recorded_seconds=_numbers(result.recorded_T),
        ideal_seconds=_numbers(result.ideal_T),
        slowdown=round(result.slowdown, DECIMALS),
        cells=_cells(result, per_cell),
        replicas_per_cell=per_cell,
        kinds={kind_name(kind): round(ratio, DECIMALS) for kind, ratio in result.kinds.items()},
        slowest_fraction=result.slowest_fraction,
        last_stage_fraction=result.last_stage_fraction,
        links=_links(found, layout, result),
        launch_ratio=None if result.launch_ratio is None else round(result.launch_ratio, DECIMALS),
        skipped_steps=len(chosen) - len(found),
    )


def _cells(result: Slowdowns, per_cell: int) -> list[schemas.SlowCell]:
    """Return the cells, or of each `per_cell` neighbours of a stage the slowest one with the ranks of all."""
    members: dict[tuple[int, int], list[int]] = {}
    for number, (stage, replica) in enumerate(
        zip(result.cells.stage.tolist(), result.cells.replica.tolist(), strict=True)
    ):
        members.setdefault((stage, replica // per_cell * per_cell), []).append(number)
    overall, by_rank = result.cells_C, np.argsort(result.cells.of_rank, kind="stable")
    begin = np.searchsorted(result.cells.of_rank[by_rank], np.arange(len(result.cells) + 1))
    shown = []
    for (stage, replica), numbers in members.items():
        slowest = max(numbers, key=lambda number: -math.inf if math.isnan(overall[number]) else overall[number])
        shown.append(
            schemas.SlowCell(
                stage=stage,
                replica=replica,
                ranks=[rank for number in numbers for rank in by_rank[begin[number] : begin[number + 1]].tolist()],
                slowdown=_number(overall[slowest]),
                steps=_nullable(result.cells_CT[slowest]),
            )
        )
    return shown


def _links(found: Sequence[GraphOfStep], layout: JobLayout, result: Slowdowns) -> list[schemas.SlowLink]:
    pairs = deliveries_of([of_step.graph for of_step in found])
    nodes = np.unique(np.array(layout.nodes), return_inverse=True)[1]
    crosses = nodes[pairs.source] != nodes[pairs.destination]
    usual = np.zeros(len(crosses))
    for alike in (crosses, ~crosses):
        if alike.any():
            usual[alike] = np.median(pairs.seconds[alike])
    names = zip(pairs.source.tolist(), pairs.destination.tolist(), strict=True)
    slowdown = np.array([result.links.get(name, math.nan) for name in names])
    # Slowdowns that differ by less than a thousandth are noise: of these, the one with the longest delay is first.
    order = np.lexsort((usual - pairs.seconds, -np.nan_to_num(slowdown, nan=1.0).round(3)))[:SHOWN_LINKS]
    return [
        schemas.SlowLink(
            source=int(pairs.source[place]),
            destination=int(pairs.destination[place]),
            messages=int(pairs.count[place]),
            seconds=round(float(pairs.seconds[place]), 9),
            usual_seconds=round(float(usual[place]), 9),
            crosses_nodes=bool(crosses[place]),
            slowdown=_number(slowdown[place]),
        )
        for place in order.tolist()
    ]


def blame_view(
    step: StoredStep, before: Sequence[StoredStep], layout: JobLayout, peers: PeerSet, graphs: StepGraphs
) -> schemas.BlameView | None:
    """Return where a step lost its time, against what is usual in it and in the steps before; None without a graph."""
    blame = blame_of(step, before, layout, peers, graphs)
    if blame is None:
        return None
    records = aligned(step).records
    rows = stream_rows(records)
    path = _longest(rows[blame.path], records)
    return schemas.BlameView(
        attempt=step.view.attempt,
        step=step.view.step,
        peers=peers.value,
        recorded_seconds=round(blame.recorded_s, DECIMALS),
        ideal_seconds=round(blame.ideal_s, DECIMALS),
        blamed_seconds=round(blame.blamed_s, DECIMALS),
        blamed=[
            schemas.BlamedView(ranks=list(item.ranks), cause=item.cause.value, seconds=round(item.seconds, DECIMALS))
            for item in blame.items[:SHOWN_BLAMED]
        ],
        victims=[
            schemas.VictimView(
                rank=victim.rank,
                waited_for=victim.waited_for,
                seconds=round(victim.seconds, DECIMALS),
                distance=victim.distance,
            )
            for victim in blame.victims[:SHOWN_VICTIMS]
        ],
        path=path,
        path_ranks=records["rank"][path].tolist(),
        culprit_spans=_longest(rows[blame.culprit_spans], records),
        victim_spans=_longest(rows[blame.victim_spans], records),
    )


def _longest(rows: Index, records: RankRecords) -> list[int]:
    """Return the rows of the SHOWN_SPANS longest spans, in the order in which they are given."""
    order = np.argsort(-durations_ns(records[rows]), kind="stable")[:SHOWN_SPANS]
    return [int(row) for row in rows[np.sort(order)]]


def tracer_view(hub: HubReader, recent: Sequence[StoredStep]) -> schemas.TracerView:
    """Return the state of the tracer; `recent` are the steps that its cost is measured in."""
    state, analysis = hub.ingest.newest, hub.analysis
    lost = hub.ingest.lost_by_worker()
    rings = {} if state is None else state.rings
    connected = {worker for attempt, worker in hub.links if state is None or attempt == state.attempt}
    by_worker: dict[int, list[int]] = {}
    for rank, ring in rings.items():
        by_worker.setdefault(ring.worker, []).append(rank)
    costs = {rank: ring.record_cost_ns for rank, ring in rings.items() if ring.record_cost_ns is not None}
    return schemas.TracerView(
        workers=[
            schemas.TracedWorker(
                worker=worker,
                node=rings[ranks[0]].node,
                ranks=len(ranks),
                connected=worker in connected,
                lost=lost.get(worker, 0),
                clock_seconds=None if state is None else _number(max(map(state.clock_doubt_s, ranks))),
            )
            for worker, ranks in sorted(by_worker.items())
        ],
        missing_ranks=[] if state is None else state.missing,
        overhead=step_totals.overhead_ratio(recent, costs),
        records=hub.totals.records,
        stored_steps=hub.ingest.store.full_steps,
        stored_bytes=hub.ingest.store.full_bytes,
        lag_seconds=None if analysis.lag_s is None else round(analysis.lag_s, 3),
        skipped_steps=analysis.skipped,
        detector_failures=analysis.failures,
    )


def _numbers(values: NDArray[np.float64]) -> list[float]:
    return [round(value, DECIMALS) for value in values.tolist()]


def _nullable(values: NDArray[np.float64]) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return round(float(value), DECIMALS) if math.isfinite(value) else None
