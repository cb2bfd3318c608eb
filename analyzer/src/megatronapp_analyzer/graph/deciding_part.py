"""The replicas of a large job by which the length of a step is decided, as a step of their own.

Until they meet in a collective, data-parallel replicas do not depend on each other, and in it all wait for the last.
So a replay without a slowness needs the replicas that have it, and those that are the last without them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.edges import Seconds
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.graph.records import CommIndex, is_kind
from megatronapp_analyzer.model import Communicator, JobLayout, StepRecords, select_rows
from megatronapp_common.trace import PASS_KINDS

MOST_WHOLE = 16
"""Replicas of a job that is replayed whole."""
LAST_OTHERS = 7
"""Replicas without a slowness that are replayed: those whose passes end last, one of which is waited for next, and as
many whose last pass starts last.
"""
LAST_SLOW = 4
"""The same of the replicas of one subject, as of a stage, which all replicas have."""


def replica_of_rank(layout: JobLayout) -> Index:
    """Return the replica of each rank; with MegaFBD backward ranks are in that of the forward ranks that serve them."""
    return np.array([replica for _, _, replica in layout.pipeline_places], np.int64)


def deciding_part(step: MatchedStep, replica_of_rank: Index, subjects: Sequence[tuple[int, ...]]) -> MatchedStep:
    """Return the records of the replicas that decide the step, with and without the slowness of any of `subjects`.

    The step itself where the job is small or most replicas are needed. `subjects` are the ranks of each.
    """
    replicas = int(replica_of_rank.max(initial=-1)) + 1
    if replicas <= MOST_WHOLE or not len(step.view.records):
        return step
    chosen = np.zeros(replicas, np.bool_)
    orders = [
        _latest(step, times_s, replica_of_rank, replicas) for times_s in (step.columns.end_s, step.columns.start_s)
    ]
    for latest in orders:
        place = np.argsort(latest)
        for ranks in subjects:
            own = np.unique(replica_of_rank[list(ranks)])
            chosen[own[np.argsort(place[own])][:LAST_SLOW]] = True
    slow = chosen.copy()
    for latest in orders:
        chosen[latest[~slow[latest]][:LAST_OTHERS]] = True
    if chosen.sum() > replicas / 2:
        return step
    part = MatchedStep(_of_ranks(step.view, chosen[replica_of_rank]))
    part.index = CommIndex(part.view.comms)  # of this step alone: the index of the job's table stays the newest
    return part


def _latest(step: MatchedStep, times_s: Seconds, replica_of_rank: Index, replicas: int) -> Index:
    """Return the replicas, the one with the latest of these times of a pass first.

    Those that wait for each other in their last pass end it together: which of them is slow shows when it starts.
    """
    columns = step.columns
    begin = _begin_of_ranks(columns.rank, len(replica_of_rank))
    ranks = np.flatnonzero(np.diff(begin))
    newest = np.full(replicas, -np.inf)
    if len(ranks):
        of_passes = np.where(is_kind(columns.kind, PASS_KINDS), times_s, -np.inf)
        np.maximum.at(newest, replica_of_rank[ranks], np.maximum.reduceat(of_passes, begin[ranks]))
    order: Index = np.argsort(-newest, kind="stable")
    return order


def _begin_of_ranks(sorted_ranks: NDArray[np.integer], world: int) -> Index:
    """Return the row at which the rows of each rank begin, and their number."""
    begin: Index = np.searchsorted(sorted_ranks, np.arange(world + 1))
    return begin


def _of_ranks(view: StepRecords, chosen: NDArray[np.bool_]) -> StepRecords:
    """Return the records of the chosen ranks; of the communicators, the members among them."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def reduced(comm: Communicator) -> Communicator:
        members = known.get(comm.members)
        if members is None:
            members = known[comm.members] = tuple(rank for rank in comm.members if chosen[rank])
        return Communicator(comm.kind, members)

    tables: Mapping[int, Mapping[int, Communicator]] = {
        rank: {slot: reduced(comm) for slot, comm in table.items()}
        for rank, table in view.comms.items()
        if chosen[rank]
    }
    begin = _begin_of_ranks(np.ascontiguousarray(view.records["rank"]), len(chosen))
    rows = np.concatenate([np.arange(begin[rank], begin[rank + 1]) for rank in np.flatnonzero(chosen)])
    return StepRecords(
        attempt=view.attempt,
        step=view.step,
        records=select_rows(view.records, rows),
        comms=tables,
        boot_ids={rank: boot_id for rank, boot_id in view.boot_ids.items() if chosen[rank]},
        real_time_s=view.real_time_s,
        lost=view.lost,
    )
