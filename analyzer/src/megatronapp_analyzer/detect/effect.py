"""Cost of a slowness: the step replayed with the subject's spans at their expected length."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.graph.build import EdgeKind, StepGraph
from megatronapp_analyzer.graph.records import is_kind
from megatronapp_analyzer.graph.replay import Replayer, makespan_s, replay
from megatronapp_analyzer.model import Cause, SubjectType, VerdictSubject
from megatronapp_common.trace import PASS_KINDS, RecordKind

HIDDEN_SHARE = 0.05
"""A gap longer than this part of the step is taken for an unrecorded wait, unless gaps are what is judged."""
REMEDIES_AT_ONCE = 16
"""Remedies replayed together; bounds the memory of a replay, which holds two rows of all edges for each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A subject's slowness of one cause, to be removed in a replay."""

    subject: VerdictSubject
    cause: Cause
    ratio: float
    """Recorded over expected length, for compute."""
    excess_s: float
    """Seconds beyond the expected length, per microbatch (host) or message (link)."""
    late: tuple[tuple[int, float], ...] = ()
    """Ranks whose kernels a stalling host launched late: recorded over expected length of their spans."""


def seconds_lost(graph: StepGraph, remedies: Sequence[Remedy], replayer: Replayer = replay) -> Floats:
    """Seconds by which the step would be shorter without each of them.

    The mean of what a remedy saves alone and what it saves after all others. Two ranks that are equally slow hide each
    other: alone, neither remedy saves anything. Of two remedies the mean is the Shapley value, so that the costs add up
    to what both save together. Where remedies shorten the same edge, what they take off it is added up.
    """
    lost: Floats = np.zeros(len(remedies))
    between_spans = np.array([remedy.cause is Cause.HOST for remedy in remedies], np.bool_)
    for judged in (np.flatnonzero(between_spans), np.flatnonzero(~between_spans)):
        if len(judged):
            recorded = graph.edges.weight if between_spans[judged[0]] else _without_hidden_waits(graph)
            lost[judged] = _saved_s(graph, recorded, remedies, judged, replayer)
    return lost


def _saved_s(
    graph: StepGraph, recorded: Floats, remedies: Sequence[Remedy], judged: Ints, replayer: Replayer
) -> Floats:
    """Return the seconds that each judged remedy saves: the mean of alone and after all others."""
    healed = recorded.copy()
    for remedy in remedies:
        healed -= recorded - _weights(graph, recorded, remedy)
    healed = np.maximum(healed, 0.0)
    saved_s: list[Floats] = []
    for first in range(0, len(judged), REMEDIES_AT_ONCE):
        lanes = [recorded, healed]
        for place in judged[first : first + REMEDIES_AT_ONCE]:
            alone = _weights(graph, recorded, remedies[place])
            lanes += [alone, np.minimum(healed + (recorded - alone), recorded)]
        ends_s = makespan_s(graph, replayer(graph, np.stack(lanes, axis=1)))
        saved_s.append(np.maximum(ends_s[0] - ends_s[2::2], 0.0) + np.maximum(ends_s[3::2] - ends_s[1], 0.0))
    mean: Floats = np.concatenate(saved_s) / 2
    return mean


def _without_hidden_waits(graph: StepGraph) -> Floats:
    """Return edge weights with gaps limited to what may be a rank's own time."""
    limit_s = HIDDEN_SHARE * float(graph.end_s.max() - graph.start_s.min())
    weight = graph.edges.weight
    return np.where(graph.edges.kind == EdgeKind.GAP, np.minimum(weight, limit_s), weight)


def _weights(graph: StepGraph, recorded: Floats, remedy: Remedy) -> Floats:
    """Return edge weights with the subject at its expected speed."""
    edges, spans, subject = graph.edges, graph.spans, remedy.subject
    kind, rank = spans["kind"][edges.span], spans["rank"][edges.span]
    weight = recorded.copy()
    own = (edges.kind == EdgeKind.SPAN) | (edges.kind == EdgeKind.TRANSFER)
    passes = own & is_kind(kind, PASS_KINDS)
    if remedy.cause is Cause.LINK:
        chosen = (kind == RecordKind.RECV_WAIT) & _received_by(graph, subject)[edges.span]
        weight[chosen] = np.maximum(weight[chosen] - remedy.excess_s, 0.0)
    elif remedy.cause is Cause.HOST:
        idle = (edges.kind == EdgeKind.GAP) | ((edges.kind == EdgeKind.SPAN) & (kind == RecordKind.DATA))
        for member in subject.ranks:
            chosen = idle & (rank == member)
            own = spans["kind"][spans["rank"] == member]
            forwards = int((own == RecordKind.FORWARD).sum()) or int((own == RecordKind.BACKWARD).sum())
            weight[chosen] = np.minimum(weight[chosen], level(weight[chosen], remedy.excess_s * forwards))
        for member, ratio in remedy.late:
            weight[passes & (rank == member)] /= max(ratio, 1.0)
    else:
        weight[passes & np.isin(rank, subject.ranks)] /= max(remedy.ratio, 1.0)
    return weight


def _received_by(graph: StepGraph, subject: VerdictSubject) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the RECV_WAIT spans that the subject delays."""
    messages = graph.messages
    destination = subject.ranks[-1]
    chosen = messages.matched & (messages.destination == destination)
    if subject.type is SubjectType.LINK:
        chosen &= messages.source == subject.ranks[0]
    mask = np.zeros(len(graph.spans), np.bool_)
    mask[messages.recv_wait[chosen]] = True
    return mask


def level(values: Floats, excess_s: float) -> float:
    """Return the height at which limiting `values` takes `excess_s` off their sum, from the longest ones first."""
    if not len(values):
        return 0.0
    ordered = np.sort(values)[::-1]
    below = np.append(ordered[1:], 0.0)
    taken = np.cumsum((ordered - below) * np.arange(1, len(ordered) + 1))
    last = int(np.searchsorted(taken, excess_s))
    if last >= len(ordered):
        return 0.0
    return float(below[last] + (taken[last] - excess_s) / (last + 1))
