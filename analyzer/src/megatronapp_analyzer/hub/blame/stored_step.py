"""Blame of a stored step, against what is usual in it and in the steps before. Pure."""

from collections.abc import Sequence

import numpy as np

from megatronapp_analyzer.graph.blame import StepBlame, find_blame
from megatronapp_analyzer.graph.usual import MAX_CELLS, Cells, PeerSet, usual_weights
from megatronapp_analyzer.hub.ingest.step_graphs import StepGraphs
from megatronapp_analyzer.hub.ingest.store import StepStore, StoredStep
from megatronapp_analyzer.model import JobLayout

WINDOW_STEPS = 32
"""Steps that are replayed together at most: the newest of the range."""
REFERENCE_STEPS = 16
"""Steps up to that whose blame is requested, which say what is usual."""
EDGE_REPLAYS = 40_000_000
"""Edges times scenarios of an answer, about a second of a core."""
EDGES_PER_SPAN = 3
EXTRA_SCENARIOS = 32
"""Scenarios in addition to those of cells: recorded, ideal, one for each kind of span and for the worst links."""


def default_peers(layout: JobLayout) -> PeerSet:
    """Return the peers that are expected to take equally long: equal work, where another rank has it."""
    stages = layout.stages
    return PeerSet.WORK if len(Cells.of(layout)) > len(set(stages)) else PeerSet.POOLED


def few_enough(steps: Sequence[StoredStep], cells: Cells) -> list[StoredStep]:
    """Return the newest steps, at least one, whose replays with each cell stay within EDGE_REPLAYS."""
    newest = list(steps[-WINDOW_STEPS:])
    scenarios = min(len(cells), MAX_CELLS) + EXTRA_SCENARIOS
    edges = np.cumsum([EDGES_PER_SPAN * len(step.view.records) * scenarios for step in reversed(newest)])
    count = max(1, int(np.searchsorted(edges, EDGE_REPLAYS, side="right")))
    return newest[-count:]


def steps_before(store: StepStore, step: StoredStep) -> list[StoredStep]:
    """Return the whole steps of the same attempt before a step, as many as say what is usual."""
    attempt, number = step.key
    older = store.select(max(0, number - REFERENCE_STEPS), number - 1, newest=REFERENCE_STEPS)
    return [before for before in older if before.view.attempt == attempt and before.digest.complete]


def blame_of(
    step: StoredStep, before: Sequence[StoredStep], layout: JobLayout, peers: PeerSet, graphs: StepGraphs
) -> StepBlame | None:
    """Return the blame of a step; None if its records make no graph."""
    cells = Cells.of(layout)
    found = graphs.of([*few_enough(before, cells), step], layout)
    if not found or (found[-1].attempt, found[-1].step) != step.key:
        return None
    ideal = usual_weights([of_step.graph for of_step in found], layout, peers)[-1]
    return find_blame(found[-1].graph, ideal, cells.of_rank)
