"""Dependency graphs of stored steps, for replays that users request."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from megatronapp_analyzer.errors import GraphError
from megatronapp_analyzer.graph.build import StepGraph, build
from megatronapp_analyzer.graph.usual import Cells
from megatronapp_analyzer.hub.ingest.step_cache import StepCache
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import JobLayout, StepRecords, copy_rows

CACHED_BYTES = 256 << 20
"""Memory of the graphs that are cached: enough for one of a million spans, which slowdowns and blame have in common."""


def aligned(step: StoredStep) -> StepRecords:
    """Return a step with the starts of all spans on one clock, that of the store; rows keep their order."""
    records = copy_rows(step.view.records)
    starts = records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    records["start_ns"] = np.maximum(starts, 0).astype(np.uint64)
    return dataclasses.replace(step.view, records=records)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphOfStep:
    """Graph of a stored step."""

    attempt: int
    step: int
    graph: StepGraph


class StepGraphs:
    """Graphs of steps that were requested before."""

    def __init__(self) -> None:
        self._cache: StepCache[GraphOfStep] = StepCache(_bytes_of, CACHED_BYTES)

    def of(self, steps: Iterable[StoredStep], layout: JobLayout) -> list[GraphOfStep]:
        """Return the graphs of steps, without those that have none."""
        return self._cache.figures(steps, lambda step: _graph_of(step, layout))


def _graph_of(step: StoredStep, layout: JobLayout) -> GraphOfStep | None:
    """Return the graph of a step; None without work, with unknown ranks, or where operations depend in a circle."""
    records = step.view.records
    if not len(records) or int(records["rank"].max()) >= layout.world:
        return None
    try:
        graph = build(aligned(step), unit_of_rank=Cells.of(layout).of_rank)
    except GraphError:
        return None
    return GraphOfStep(step.view.attempt, step.view.step, graph) if len(graph.spans) else None


def _bytes_of(found: GraphOfStep | None) -> int:
    """Return an upper bound of the bytes of a graph: about 41 for an edge, and 8 or more for events and spans."""
    if found is None:
        return 512
    graph = found.graph
    return 4096 + 41 * len(graph.edges.weight) + 8 * graph.events + (graph.spans.itemsize + 64) * len(graph.spans)
