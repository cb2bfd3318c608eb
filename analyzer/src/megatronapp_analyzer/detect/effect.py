"""Cost of a slowness: the step replayed with the subject's spans at their expected length."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from megatronapp_analyzer.detect.causes.collective_transfers import REPLICA_KINDS
from megatronapp_analyzer.detect.features import Floats, Ints, Mask
from megatronapp_analyzer.graph.build import StepGraph
from megatronapp_analyzer.graph.edges import GAP_KINDS, EdgeKind
from megatronapp_analyzer.graph.records import is_kind, run_queue_s
from megatronapp_analyzer.graph.replay import Replayer, replay
from megatronapp_analyzer.graph.stops import Stops, lengthened_by_stops_s
from megatronapp_analyzer.model import LINK_CAUSES, Cause, StepRecords, SubjectType, VerdictSubject
from megatronapp_common.trace import PASS_KINDS, Flag, RecordKind

HIDDEN_SHARE = 0.05
"""A gap longer than this part of the step is taken for an unrecorded wait, unless gaps are what is judged."""
BEFORE_INPUT = frozenset({RecordKind.RECV_POST, RecordKind.DATA})
"""Spans of a rank that may precede its wait for the first input of a step."""
REMEDIES_AT_ONCE = 16
"""Remedies replayed together; bounds the memory of a replay, which holds two rows of all edges for each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffCpuParts:
    """Parts of the time in which a process did not run, 0 to 1."""

    stopped: float = 0.0
    """Part of the time in which it was stopped, or collected garbage."""
    queued: float = 0.0
    """Part of the time in which it waited for a processor."""


NO_PARTS = OffCpuParts()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffCpuTimes:
    """Seconds within each edge of a step's graph in which its rank did not run; on a device, by which it was longer."""

    stopped_s: Floats
    queued_s: Floats

    def removed_s(self, parts: OffCpuParts) -> Floats:
        """Return the seconds of each edge that `parts` make up."""
        out: Floats = parts.stopped * self.stopped_s + parts.queued * self.queued_s
        return out


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A subject's slowness of one cause, to be removed in a replay."""

    subject: VerdictSubject
    cause: Cause
    ratio: float
    """Recorded over expected length, for compute."""
    excess_s: float
    """Seconds beyond the expected length, per microbatch (host, data) or message (link)."""
    off_cpu_parts: OffCpuParts = NO_PARTS
    """For a host, the parts of the time in which its process did not run that are to be removed."""
    pairs: tuple[tuple[int, int], ...] = ()
    """For a link, source and destination of the messages that are late."""
    late: tuple[tuple[int, float], ...] = ()
    """Ranks whose kernels a stalling host launched late: recorded over expected length of their spans."""


def off_cpu_times(graph: StepGraph, view: StepRecords) -> OffCpuTimes:
    """Return the seconds within each edge in which the rank was stopped, and in which it waited for a processor.

    On a device's clock, by which stops lengthened the spans that its host drives. Together they are at most as long as
    the edge.
    """
    edges, spans = graph.edges, graph.spans
    is_gap = np.isin(edges.kind, GAP_KINDS)
    if (spans["flags"] & Flag.DEVICE_CLOCK).any():
        stops = Stops(view.records, int(spans["start_ns"].min()))
        longer = lengthened_by_stops_s(spans, graph.start_s, graph.end_s, stops)
        by_stops: Floats = np.minimum(np.where(is_gap, 0.0, longer[edges.span]), edges.weight)
        return OffCpuTimes(stopped_s=by_stops, queued_s=np.zeros(len(by_stops)))
    end = np.where(is_gap, graph.start_s[edges.span], graph.end_s[edges.span])
    origin_ns = int(spans["start_ns"].min()) if len(spans) else 0
    within = Stops(view.records, origin_ns).within(spans["rank"][edges.span], end - edges.weight, end)
    stopped = np.minimum(within, edges.weight)
    queued = np.minimum(np.where(is_gap, 0.0, run_queue_s(spans)[edges.span]), edges.weight - stopped)
    return OffCpuTimes(stopped_s=stopped, queued_s=queued)


def seconds_lost(
    graph: StepGraph, remedies: Sequence[Remedy], replayer: Replayer = replay, *, off_cpu: OffCpuTimes | None = None
) -> Floats:
    """Seconds by which the step would be shorter without each of them; `off_cpu` is `off_cpu_times` of the graph.

    The mean of what a remedy saves alone and what it saves after all others. Two ranks that are equally slow hide each
    other: alone, neither remedy saves anything. Of two remedies the mean is the Shapley value, so that the costs add up
    to what both save together. Where remedies shorten the same edge, what they take off it is added up.
    """
    if off_cpu is None:
        nothing = np.zeros(len(graph.edges.weight))
        off_cpu = OffCpuTimes(stopped_s=nothing, queued_s=nothing)
    lost: Floats = np.zeros(len(remedies))
    between_spans = np.array([remedy.cause is Cause.HOST for remedy in remedies], np.bool_)
    inputs_s = _first_inputs_s(graph)

    def ends_s(weights: Floats) -> Floats:
        return _until_next_s(graph, inputs_s, replayer(graph, weights))

    for judged in (np.flatnonzero(between_spans), np.flatnonzero(~between_spans)):
        if len(judged):
            recorded = graph.edges.weight if between_spans[judged[0]] else _without_hidden_waits(graph)
            change = functools.partial(_weights, graph, recorded, off_cpu)
            lost[judged] = _saved_s(recorded, remedies, judged, change, ends_s)
    return lost


def _first_inputs_s(graph: StepGraph) -> Floats:
    """Return for each rank of the graph, in order, how long after the begin of a step it may begin without delaying it.

    That is when its first input is ready, less what it does before, such as to read its own data. The begin of the step
    is that of the rank at the start of the chain of messages that ends with this input, such as one of the first stage;
    0 for a rank that waits for no input. A rank's own begin is no reference: what it did at the end of the step before
    has made it later.
    """
    spans, messages = graph.spans, graph.messages
    begin = np.flatnonzero(np.diff(spans["rank"], prepend=-1))
    place = np.searchsorted(begin, np.arange(len(spans)), side="right") - 1  # number of each span's rank
    post = np.full(len(spans) + 1, -1)  # one more, for a last rank without any of these spans
    post[messages.recv_wait[messages.matched]] = messages.send_post[messages.matched]
    active = np.flatnonzero(~is_kind(spans["kind"], BEFORE_INPUT))
    first = np.append(active, len(spans))[np.searchsorted(active, begin)]
    until_s = np.append(0.0, np.cumsum(graph.end_s - graph.start_s))
    prepared_s = until_s[first] - until_s[begin]
    number = np.arange(len(begin))
    sent = np.where(np.append(place, -1)[first] == number, post[first], -1)
    waits = sent >= 0
    origin = np.where(waits, place[sent], number)
    for _ in range(len(begin).bit_length()):  # follows twice as many messages each time
        origin = origin[origin]
    ready_s = np.where(waits, graph.end_s[sent], 0.0) - graph.start_s[begin[origin]] - prepared_s
    out: Floats = np.where(waits, np.maximum(ready_s, 0.0), 0.0)
    return out


def _until_next_s(graph: StepGraph, inputs_s: Floats, times: Floats) -> Floats:
    """Return for each scenario how long after this step the next one, which is like it, can follow, in seconds.

    What a rank does at the end of a step, such as its optimizer, delays the next one only if the rank ends after its
    first input there is ready: a later stage of a pipeline waits until the stages before it have passed on the first
    microbatch. `inputs_s` is `_first_inputs_s` of the graph, `times` those of events, [events, scenarios].
    """
    if graph.events == 0:
        return np.zeros(times.shape[1:])
    begin = np.flatnonzero(np.diff(graph.spans["rank"], prepend=-1))
    last_s = np.maximum.reduceat(times[1 : 2 * len(graph.spans) : 2], begin, axis=0)
    out: Floats = (last_s - inputs_s[:, None]).max(axis=0) - float(graph.start_s.min())
    return out


def _saved_s(
    recorded: Floats,
    remedies: Sequence[Remedy],
    judged: Ints,
    change: Callable[[Remedy], Floats],
    ends_s: Callable[[Floats], Floats],
) -> Floats:
    """Return the seconds that each judged remedy saves: the mean of alone and after all others.

    `change` gives the edge weights with a remedy, `ends_s` the length of the step with each column of weights.
    """
    healed = recorded.copy()
    for remedy in remedies:
        healed -= recorded - change(remedy)
    healed = np.maximum(healed, 0.0)
    saved_s: list[Floats] = []
    for first in range(0, len(judged), REMEDIES_AT_ONCE):
        columns = [recorded, healed]
        for place in judged[first : first + REMEDIES_AT_ONCE]:
            alone = change(remedies[place])
            columns += [alone, np.minimum(healed + (recorded - alone), recorded)]
        lengths_s = ends_s(np.stack(columns, axis=1))
        saved = np.maximum(lengths_s[0] - lengths_s[2::2], 0.0) + np.maximum(lengths_s[3::2] - lengths_s[1], 0.0)
        saved_s.append(saved)
    mean: Floats = np.concatenate(saved_s) / 2
    return mean


def _without_hidden_waits(graph: StepGraph) -> Floats:
    """Return edge weights with gaps limited to what may be a rank's own time."""
    limit_s = HIDDEN_SHARE * float(graph.end_s.max() - graph.start_s.min())
    weight = graph.edges.weight
    return np.where(np.isin(graph.edges.kind, GAP_KINDS), np.minimum(weight, limit_s), weight)


def _weights(graph: StepGraph, recorded: Floats, off_cpu: OffCpuTimes, remedy: Remedy) -> Floats:
    """Return edge weights with the subject at its expected speed."""
    edges, spans, subject = graph.edges, graph.spans, remedy.subject
    kind, rank = spans["kind"][edges.span], spans["rank"][edges.span]
    weight = recorded.copy()
    own = (edges.kind == EdgeKind.SPAN) | (edges.kind == EdgeKind.TRANSFER)
    passes = own & is_kind(kind, PASS_KINDS)
    if subject.type is SubjectType.GROUP:
        transfers = (edges.kind == EdgeKind.TRANSFER) & is_kind(kind, REPLICA_KINDS)
        for member in subject.ranks:
            of_member = transfers & (rank == member)
            weight[of_member] = np.minimum(weight[of_member], level(weight[of_member], remedy.excess_s))
    elif remedy.cause in LINK_CAUSES:
        chosen = (kind == RecordKind.RECV_WAIT) & _received(graph, remedy.pairs)[edges.span]
        weight[chosen] = np.maximum(weight[chosen] - remedy.excess_s, 0.0)
    elif remedy.cause is Cause.HOST:
        delayed_s = _delayed_s(graph, subject.ranks, off_cpu.removed_s(remedy.off_cpu_parts))
        weight -= np.minimum(delayed_s, weight)
        _shorten(weight, np.isin(edges.kind, GAP_KINDS), remedy, graph)
        for member, ratio in remedy.late:
            weight[passes & (rank == member)] /= max(ratio, 1.0)
    elif remedy.cause is Cause.DATA:
        _shorten(weight, own & (kind == RecordKind.DATA), remedy, graph)
    else:
        weight[passes & np.isin(rank, _met_ranks(graph, subject.ranks))] /= max(remedy.ratio, 1.0)
    return weight


def _shorten(weight: Floats, idle: Mask, remedy: Remedy, graph: StepGraph) -> None:
    """Take a remedy's excess off the longest of the `idle` edges of each of its ranks."""
    spans = graph.spans
    rank = spans["rank"][graph.edges.span]
    for member in remedy.subject.ranks:
        chosen = idle & (rank == member)
        own = spans["kind"][spans["rank"] == member]
        forwards = int((own == RecordKind.FORWARD).sum()) or int((own == RecordKind.BACKWARD).sum())
        once = chosen & (graph.edges.kind != EdgeKind.HANDOVER)
        weight[chosen] = np.minimum(weight[chosen], level(weight[once], remedy.excess_s * forwards))


def _met_ranks(graph: StepGraph, ranks: tuple[int, ...]) -> Ints:
    """Return `ranks` and those that meet them inside compute spans: all leave a span with the slowest of them."""
    meetings, rank = graph.meetings, graph.spans["rank"].astype(np.int64)
    met = np.isin(rank[meetings.record], ranks)
    instance = np.repeat(np.arange(len(meetings)), np.diff(meetings.begin))
    return np.union1d(ranks, rank[meetings.record[np.isin(instance, instance[met])]])


def _delayed_s(graph: StepGraph, ranks: tuple[int, ...], off_cpu_s: Floats) -> Floats:
    """Return the seconds within each edge in which one of `ranks` did not run, or others waited for it in a meeting.

    `off_cpu_s`: seconds within each edge in which its own rank did not run.
    """
    edges, meetings = graph.edges, graph.meetings
    own: Floats = np.where(np.isin(graph.spans["rank"][edges.span], ranks), off_cpu_s, 0.0)
    if not len(meetings):
        return own
    inside = (edges.kind == EdgeKind.SPAN) | (edges.kind == EdgeKind.TRANSFER)
    of_span = np.zeros(len(graph.spans))
    np.maximum.at(of_span, edges.span[inside], own[inside])
    instance = np.repeat(np.arange(len(meetings)), np.diff(meetings.begin))
    longest = np.zeros(len(meetings))
    np.maximum.at(longest, instance, of_span[meetings.record])
    of_span[meetings.record] = longest[instance]
    return np.where(inside, of_span[edges.span], own)


def _received(graph: StepGraph, pairs: tuple[tuple[int, int], ...]) -> Mask:
    """Return a mask of the RECV_WAIT spans of messages of `pairs`."""
    messages = graph.messages
    chosen = np.zeros(len(messages.source), np.bool_)
    for source, destination in pairs:
        chosen |= (messages.source == source) & (messages.destination == destination)
    mask = np.zeros(len(graph.spans), np.bool_)
    mask[messages.recv_wait[chosen & messages.matched]] = True
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
