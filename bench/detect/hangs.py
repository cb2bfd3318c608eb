"""Progress of the ranks of a job in which one has hung: no step ends, and ranks fall silent one after the other.

The rank that hangs is stopped, or stays inside a pass. Those of its pipeline then wait for its messages, and all
others, once they have no passes left, for its part of the reduction or of the gradient norm.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from detect.faults import SimulatedFault
from detect.layout import Grid
from megatronapp_common.trace import RecordKind

HANG_SECONDS = 40
"""Seconds that are watched after the last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankProgress:
    """Progress of a rank as its ring's header shows it."""

    rank: int
    silent_s: float
    """Seconds since it began or ended a span."""
    span: RecordKind
    """Span that it is inside of."""
    stopped: bool = False
    """True if its process is stopped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressReport:
    """Progress of all ranks at a moment, in a step that does not end."""

    step: int
    real_time_s: float
    ranks: tuple[RankProgress, ...]


def reports(grid: Grid, fault: SimulatedFault, step_s: float, begin_s: float, seed: int) -> Iterator[ProgressReport]:
    """Yield a report for each second after a rank has hung.

    Args:
        grid: of the job.
        fault: the hang.
        step_s: length of the steps before.
        begin_s: real time of the end of the last step.
        seed: of the moment within the step.
    """
    rng = np.random.default_rng((seed, 5))
    culprits = set(fault.ranks)
    places = {rank % grid.stage_size for rank in culprits}
    hung_s = begin_s + float(rng.uniform(0.1, 0.9)) * step_s
    after = {rank: float(rng.uniform(0.0, 0.5)) * step_s for rank in range(grid.world)}
    for second in range(1, HANG_SECONDS + 1):
        now_s = begin_s + second
        ranks = [
            RankProgress(
                rank=rank,
                silent_s=max(now_s - hung_s - (0.0 if rank in culprits else after[rank]), 0.0),
                span=_span(grid, rank, culprits, places),
                stopped=rank in culprits and fault.stopped,
            )
            for rank in range(grid.world)
        ]
        yield ProgressReport(step=fault.begin, real_time_s=now_s, ranks=tuple(ranks))


def _span(grid: Grid, rank: int, culprits: set[int], places: set[int]) -> RecordKind:
    """Return the span that a rank is inside of in the end."""
    if rank in culprits:
        return RecordKind.BACKWARD
    if rank % grid.stage_size in places and grid.pp > 1:
        return RecordKind.RECV_WAIT
    is_peer = any(grid.stage_of(rank) == grid.stage_of(other) for other in culprits)
    return RecordKind.GRAD_REDUCE if is_peer and grid.dp > 1 else RecordKind.GRAD_NORM
