"""Replay of a step's graph with other weights, such as without a slowness."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import Seconds
from megatronapp_native import latest_times, longest_paths

MAX_NUMBERS = 10_000_000
"""Numbers in an array of a replay: 80 MB; a step with more edges is replayed in one scenario at a time."""
MAX_LANES = 16
MIXED_AT_ONCE = 8
"""Scenarios of `mixed_lengths_s` at a time: a bit of a byte each. They take 64 bytes for an event, however many."""


def lanes_at_once(graph: StepGraph) -> int:
    """Return how many scenarios are replayed together, so that weights and times stay within MAX_NUMBERS."""
    return min(MAX_LANES, max(1, MAX_NUMBERS // max(len(graph.edges.weight), graph.events, 1)))


class Replayer(Protocol):
    """Computes when the events of a step happen if its edges have other weights."""

    def __call__(self, graph: StepGraph, weights: Seconds) -> Seconds:
        """Return the time of every event in seconds; neither argument is changed.

        `weights` is [edges] or [edges, scenarios]; the result has the same trailing shape.
        """


def replay(graph: StepGraph, weights: Seconds) -> Seconds:
    """Replay in C++, edge after edge, all scenarios at once; see `Replayer`."""
    lanes = weights.shape[1:]
    times = np.empty((graph.events, *lanes))
    times[:] = graph.initial_s.reshape(-1, *([1] * len(lanes)))
    if graph.events:
        table = times.reshape(graph.events, -1)
        longest_paths(graph.edges.source, graph.edges.target, weights.reshape(-1, table.shape[1]), table)
    return times


def makespan_s(graph: StepGraph, times: Seconds) -> Seconds:
    """Return the length of the step for each scenario: last event less the first recorded start, in seconds."""
    if graph.events == 0:
        return np.zeros(times.shape[1:])
    span: Seconds = times.max(axis=0) - float(graph.start_s.min())
    return span


class MixedReplayer(Protocol):
    """Computes how long a step is if some of its edges are as recorded, and the others ideal."""

    def __call__(self, graph: StepGraph, ideal: Seconds, recorded_in: NDArray[np.uint8], scenarios: int) -> Seconds:
        """Return the length of the step in seconds for each of up to MIXED_AT_ONCE scenarios.

        An edge is as recorded in those whose bit of `recorded_in` is set, and has its weight of `ideal` in the others.
        """


def mixed_lengths_s(graph: StepGraph, ideal: Seconds, recorded_in: NDArray[np.uint8], scenarios: int) -> Seconds:
    """Replay in C++, without arrays of weights and times by scenario; see `MixedReplayer`."""
    if graph.events == 0:
        return np.zeros(scenarios)
    edges = graph.edges
    latest = latest_times(edges.source, edges.target, edges.weight, ideal, recorded_in, graph.initial_s, scenarios)
    return latest - float(graph.start_s.min())
