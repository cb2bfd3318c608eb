"""Who waits for whom: every wait, attributed to the rank that was not ready.

A receive waits for its sender until the message was posted; what comes after is delivery, and the link's. A member of a
collective waits for the last one to arrive; the transfer after that is nobody's.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.graph.build import Seconds, StepGraph
from megatronapp_analyzer.graph.matching import Collectives, Index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Parallel arrays: `waiter` lost `seconds` because `cause` was late."""

    waiter: Index
    cause: Index
    seconds: Seconds

    def imposed_by(self, ranks: tuple[int, ...]) -> dict[int, float]:
        """Seconds that each other rank waited for any of `ranks`, largest first."""
        chosen = np.isin(self.cause, ranks) & ~np.isin(self.waiter, ranks)
        lost = np.bincount(self.waiter[chosen], weights=self.seconds[chosen])
        order = np.argsort(-lost, kind="stable")
        return {int(rank): float(lost[rank]) for rank in order if lost[rank] > 0}


def attribute(graph: StepGraph) -> Waits:
    """Waits of one step."""
    parts = [_receives(graph), _groups(graph, graph.collectives), _groups(graph, graph.meetings)]
    return Waits(
        waiter=np.concatenate([part.waiter for part in parts]),
        cause=np.concatenate([part.cause for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
    )


def _receives(graph: StepGraph) -> Waits:
    messages = graph.messages
    matched = messages.matched
    send, recv = messages.send_post[matched], messages.recv_wait[matched]
    late = np.minimum(graph.end_s[send], graph.end_s[recv]) - graph.start_s[recv]
    return _kept(messages.destination[matched], messages.source[matched], late)


def _groups(graph: StepGraph, groups: Collectives) -> Waits:
    size = np.diff(groups.begin)
    instance = np.repeat(np.arange(len(groups)), size)
    whole = groups.complete[instance]
    member, instance = groups.record[whole], instance[whole]
    rank = graph.spans["rank"][member].astype(np.int64)
    order = np.lexsort((graph.start_s[member], instance))
    member, instance, rank = member[order], instance[order], rank[order]
    final = np.flatnonzero(np.diff(instance, append=-1))
    last = np.zeros(len(groups), np.int64)
    last[instance[final]] = final
    late = graph.start_s[member[last[instance]]] - graph.start_s[member] if len(member) else np.empty(0)
    return _kept(rank, rank[last[instance]] if len(member) else rank, late)


def _kept(waiter: Index, cause: Index, seconds: Seconds) -> Waits:
    real = (seconds > 0) & (waiter != cause)
    return Waits(waiter=waiter[real].astype(np.int64), cause=cause[real].astype(np.int64), seconds=seconds[real])
