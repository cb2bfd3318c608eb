"""Attribution of every wait to the rank that was not ready.

A receive waits for its sender until the message was posted; what follows is delivery, attributed to the link. A member
of a collective waits for the last one to arrive; the transfer after that is attributed to no rank.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import Seconds
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Collectives, Index, Messages
from megatronapp_analyzer.model import RankRecords


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Parallel arrays: `waiter` lost `seconds` because `cause` was late."""

    waiter: Index
    cause: Index
    seconds: Seconds
    span: Index
    """Span of the waiter in which it waited, an index into the stream of the step."""

    def imposed_by(self, ranks: tuple[int, ...]) -> dict[int, float]:
        """Return seconds that each other rank waited for any of `ranks`, largest first."""
        chosen = np.isin(self.cause, ranks) & ~np.isin(self.waiter, ranks)
        lost = np.bincount(self.waiter[chosen], weights=self.seconds[chosen])
        order = np.argsort(-lost, kind="stable")
        return {int(rank): float(lost[rank]) for rank in order if lost[rank] > 0}


def attribute(graph: StepGraph) -> Waits:
    """Return the waits of one step."""
    parts = [
        _receives(graph.messages, graph.start_s, graph.end_s),
        _groups(graph.collectives, graph.spans, graph.start_s, graph.end_s)[0],
        _groups(graph.meetings, graph.spans, graph.start_s)[0],
        _overlapped(graph),
    ]
    return Waits(
        waiter=np.concatenate([part.waiter for part in parts]),
        cause=np.concatenate([part.cause for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        span=np.concatenate([part.span for part in parts]),
    )


def imposed_s(step: MatchedStep) -> dict[tuple[int, str], float]:
    """Return seconds that each rank made others wait in one step on aligned clocks, by kind of communicator.

    Waits inside compute spans (tensor parallelism) have no record and are not included.
    """
    spans, index, groups = step.spans, step.index, step.collectives
    start, end = step.times_s
    receives = _receives(step.messages, start, end)
    waits, instance = _groups(groups, spans, start, end)
    names = index.kinds
    kinds = np.append(np.zeros(len(receives.cause), np.int64), index.kind_of[groups.comm[instance]])
    causes, seconds = np.append(receives.cause, waits.cause), np.append(receives.seconds, waits.seconds)
    place = causes * len(names) + kinds
    sums, counts = np.bincount(place, seconds), np.bincount(place)
    return {
        (number // len(names), names[number % len(names)]): float(sums[number])
        for number in np.flatnonzero(counts).tolist()
    }


def _receives(messages: Messages, start_s: Seconds, end_s: Seconds) -> Waits:
    whole = messages.matched_only()
    late = np.minimum(end_s[whole.send_post], end_s[whole.recv_wait]) - start_s[whole.recv_wait]
    return _kept(whole.destination, whole.source, late, whole.recv_wait)


def _groups(
    groups: Collectives, spans: RankRecords, start_s: Seconds, end_s: Seconds | None = None
) -> tuple[Waits, Index]:
    """Return waits for the last member, and the instance that each belongs to.

    With `end_s` a wait ends with the span of the waiter at the latest: a reduction that overlaps with a pass can be
    over before the record of the last member begins, which is made after that pass.
    """
    size = np.diff(groups.begin)
    instance = np.repeat(np.arange(len(groups)), size)
    whole = groups.complete[instance]
    member, instance = groups.record[whole], instance[whole]
    rank = spans["rank"][member].astype(np.int64)
    order = np.lexsort((start_s[member], instance))
    member, instance, rank = member[order], instance[order], rank[order]
    final = np.flatnonzero(np.diff(instance, append=-1))
    last = np.zeros(len(groups), np.int64)
    last[instance[final]] = final
    begin = start_s[member[last[instance]]] if len(member) else np.empty(0)
    late = (begin if end_s is None else np.minimum(begin, end_s[member])) - start_s[member]
    cause = rank[last[instance]] if len(member) else rank
    return _kept(rank, cause, late, member), instance[_real(rank, cause, late)]


def _overlapped(graph: StepGraph) -> Waits:
    """Return waits for the last member of a reduction inside passes with which it overlaps."""
    found = graph.overlapped
    rank = graph.spans["rank"][found.last_pass].astype(np.int64)
    order = np.lexsort((found.ready_s, found.instance))
    last = order[np.flatnonzero(np.diff(found.instance[order], append=-1))]
    cause = rank[last][found.instance]
    waits = found.waited_s > 0
    return _kept(rank[waits], cause[waits], found.waited_s[waits], found.last_pass[waits])


def _real(waiter: Index, cause: Index, seconds: Seconds) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (seconds > 0) & (waiter != cause)
    return mask


def _kept(waiter: Index, cause: Index, seconds: Seconds, span: Index) -> Waits:
    real = _real(waiter, cause, seconds)
    return Waits(
        waiter=waiter[real].astype(np.int64),
        cause=cause[real].astype(np.int64),
        seconds=seconds[real],
        span=span[real].astype(np.int64),
    )
