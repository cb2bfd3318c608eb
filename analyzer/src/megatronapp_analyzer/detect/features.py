"""Features of each rank and each directed pair in one step. Pure NumPy; waits are never part of a rank's own time.

passes    seconds per microbatch in FORWARD, BACKWARD and WEIGHT, without run-queue delay and without the wait for
          members of the same unit that enter later: the sum over (kind, chunk) of the median over microbatches, so
          that a few disturbed spans do not matter
compute   the same of those spans whose length the device decides, not the host that launches their kernels
bound     whether the host decides the length of most of these spans, or enough of them to make compute unknown
stall     seconds before each FORWARD in which the rank was in no span (median over microbatches), without the wait for
          data that another member of its unit reads
idle      seconds per microbatch of the whole step outside any span, posts included, without run-queue delay and this
          wait
data      seconds of DATA per microbatch, without run-queue delay
queue     run-queue delay per microbatch inside the same spans as compute, the same way
crowded   run-queue delay of the whole step per microbatch
work      reported work of the microbatches; where there is any, the lengths of passes are those of usual work
optimizer seconds of OPTIMIZER on a device's clock, which multiplies no matrices and waits for memory
stopped   seconds per microbatch of the whole step in which the process was stopped, or collected garbage; they are in
          none of the others, where a few long ones would not move a median.
          On a device's clock, by which its stops lengthened passes, norm, optimizer and the wait for data: a device
          continues with what was launched while its host is stopped
delivery  seconds from "sent, and the receiver was waiting" to the end of the receive, without run-queue delay
          (median over the messages of a directed pair; where ranks run other passes meanwhile, the mean: a late link
          then costs the few waits that no pass could fill, often one in a step)
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.work import StepWork, WorkModel
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.build import CLOCK_TOLERANCE_S
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Collectives, Messages, handovers_of, meetings_of
from megatronapp_analyzer.graph.overlapped_reductions import find_overlapped
from megatronapp_analyzer.graph.part_threads import ALONE, PartThreads
from megatronapp_analyzer.graph.stops import STOP_KINDS, Stops, launched_s, lengthened_by_stops_s
from megatronapp_analyzer.model import JobLayout, RankRecords, StepRecords, select_rows
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import DURATION_UNIT_NS, PASS_KINDS, Flag, RecordKind
from megatronapp_native import segment_medians as native_segment_medians

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
POSTS = frozenset({RecordKind.SEND_POST, RecordKind.RECV_POST})
STEP, WORK = (frozenset({kind}) for kind in (RecordKind.STEP, RecordKind.WORK))
LEAD_PART = 0.25
"""A device waited for launches if it ends a span less than this part of its length after the host's last launch."""
FIRST_PASS_ORDINAL = int(RecordKind.FORWARD) << 24
"""Least ordinal of a transfer in any order, which is that of a pass (docs/contracts.md, section 5)."""
_MAIN_PASSES = (RecordKind.FORWARD, RecordKind.BACKWARD)
FREE_SHARE = 0.25
"""Share of the spans of one (kind, chunk) that must not have waited for launches, so that the device's time is known.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFeatures:
    """Arrays over ranks, NaN where the rank did not report enough; arrays over directed pairs."""

    passes_s: Floats
    compute_s: Floats
    bound: Mask
    queue_s: Floats
    stall_s: Floats
    idle_s: Floats
    data_s: Floats
    crowded_s: Floats
    stopped_s: Floats
    optimizer_s: Floats
    work: StepWork | None
    step_s: Floats
    forwards: Ints
    """FORWARD spans of each rank, all chunks; of a rank that runs none, BACKWARD spans."""
    on_device: bool
    pairs: Ints
    """[n, 2] source and destination."""
    delivery_s: Floats
    messages: Ints
    """Messages of each pair."""

    def with_delivery(self, delivery_s: Floats) -> "StepFeatures":
        """Return the same features with other deliveries."""
        return dataclasses.replace(self, delivery_s=delivery_s)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _StepSpans:
    spans: RankRecords
    columns: rec.SpanColumns
    on_device: bool
    clean: Floats
    stops: Stops
    """Stops that no span may contain: none on a device, which continues meanwhile."""
    process_stops: Stops
    lengthened: Floats
    """Seconds by which stops lengthened each span of a device."""
    awaited: Floats
    """Seconds after each span in which its rank waits for data that another one reads."""
    work: StepWork | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """FORWARD, BACKWARD and WEIGHT spans; arrays over them, but for `there` and `used`, which are over groups."""

    where: Ints
    """Indices of the passes among the spans."""
    rank: Ints
    group: Ints
    """Number of (rank, kind, chunk)."""
    there: Ints
    used: Mask

    @classmethod
    def of(cls, spans: RankRecords, columns: rec.SpanColumns, layout: JobLayout) -> "_Passes":
        """Find and group the passes."""
        where = np.flatnonzero(rec.is_kind(columns.kind, PASS_KINDS))
        chunk = spans["chunk"][where].astype(np.int64)
        chunks = int(chunk.max(initial=0)) + 1
        place = np.zeros(256, np.int64)
        place[sorted(PASS_KINDS)] = np.arange(len(PASS_KINDS))
        rank = columns.rank[where]
        group = (rank * len(PASS_KINDS) + place[columns.kind[where]]) * chunks + chunk
        there = _count(group, layout.world * len(PASS_KINDS) * chunks)
        used = _used_groups(there.reshape(layout.world, -1) > 0, layout)
        return cls(where=where, rank=rank, group=group, there=there, used=used)

    def seconds(self, values_s: Floats, counted: Mask) -> Floats:
        """Return seconds per microbatch of each rank, of the `counted` passes only; `values_s` are of all spans.

        NaN for ranks that lack one of the (kind, chunk) groups that others of their role have, or of which too few are
        counted.
        """
        if not len(self.where):
            return np.full(len(self.used), np.nan)
        values = values_s[self.where]
        chosen = np.isfinite(values) & counted
        medians = segment_medians(self.group[chosen], values[chosen], len(self.there))
        medians[_count(self.group[chosen], len(self.there)) < FREE_SHARE * self.there] = np.nan
        total: Floats = np.where(self.used, medians.reshape(self.used.shape), 0.0).sum(axis=1)
        return total


def extract(view: StepRecords, layout: JobLayout, model: WorkModel | None = None) -> StepFeatures:
    """Compute the features of one step on aligned clocks.

    `model`: how passes of the job grow with their work, if it is reported; it learns from the step.
    """
    return extract_matched(MatchedStep(view), layout, model)


def extract_matched(
    step: MatchedStep,
    layout: JobLayout,
    model: WorkModel | None = None,
    threads: PartThreads = ALONE,
    *,
    tolerance_s: float = CLOCK_TOLERANCE_S,
) -> StepFeatures:
    """Compute the features of one step as `extract` does, with several threads if it is large.

    The aligned clocks of two ranks may differ by `tolerance_s`.
    """
    step = _of_known_ranks(step, layout.world)
    laid = _laid_out(step, layout, model, tolerance_s)
    columns, world, size = laid.columns, layout.world, len(laid.spans)
    steps = step.of_kinds(STEP)
    step_s, step_queue_s = _step_spans(steps, world)
    forwards = _passes(columns, world)
    idle_s = threads.begin(size, lambda: _idle(laid, world, step_s, step_queue_s, forwards))
    stall_s = threads.begin(size, lambda: _stalls(laid, world))
    deliveries = threads.begin(size, lambda: _deliveries(laid, step.messages, world))
    late = launched_late(step)
    own = _own_times(laid, layout, late)
    stopped_s = _sums(columns.rank, laid.lengthened, step_s) if laid.on_device else _stopped(laid, steps, step, world)
    nothing = np.full(world, np.nan)
    pairs, delivery, count = deliveries()
    return StepFeatures(
        passes_s=own.passes_s,
        compute_s=own.compute_s,
        bound=own.bound,
        queue_s=own.queue_s,
        stall_s=stall_s(),
        idle_s=idle_s(),
        data_s=_data(laid, world, forwards),
        crowded_s=_over(np.where(np.isfinite(step_s), step_queue_s, np.nan), forwards),
        stopped_s=_over(stopped_s, forwards),
        work=laid.work,
        optimizer_s=_optimizer(laid.spans, columns, late, laid.process_stops, world) if laid.on_device else nothing,
        step_s=step_s,
        forwards=forwards,
        on_device=laid.on_device,
        pairs=pairs,
        delivery_s=delivery,
        messages=count,
    )


def _laid_out(step: MatchedStep, layout: JobLayout, model: WorkModel | None, tolerance_s: float) -> _StepSpans:
    """Return the spans with their own times, without stops, run-queue delays and waits inside units."""
    spans, columns = step.spans, step.columns
    start, end = step.times_s
    on_device = _has_flag(step, Flag.DEVICE_CLOCK)
    stops = Stops(step.of_kinds(STOP_KINDS), step.start_ns)
    worked = stops if not on_device else Stops(step.view.records[:0], step.start_ns)
    lengthened = lengthened_by_stops_s(spans, start, end, stops) if on_device else np.zeros(len(spans))
    off_cpu = columns.queue_s
    if stops.any:
        off_cpu = off_cpu + worked.within(columns.rank, start, end) + lengthened
    clean = np.maximum(columns.duration_s - off_cpu, 0.0)
    awaited = np.zeros(len(spans))
    if layout.tp * layout.cp * layout.ep > 1:
        meetings = meetings_of(spans, _unit_of_rank(layout))
        met = meetings.record
        clean[met] = np.maximum(clean[met] - _shared_waits(meetings, start, off_cpu), 0.0)
        reader, waiter = handovers_of(spans, meetings, end)
        awaited[waiter - 1] = np.maximum(np.minimum(end[reader], start[waiter]) - end[waiter - 1], 0.0)
        _hide_incomplete(clean, columns.rank, layout)
    if on_device and layout.dp > 1:
        reductions = find_overlapped(spans, end, step.collectives, clean, tolerance_s)
        clean[reductions.last_pass] -= reductions.waited_s
    work = None
    if model is not None:
        clean, work = model.normalise(step.of_kinds(WORK), spans, clean)
    return _StepSpans(
        spans=spans,
        columns=columns,
        on_device=on_device,
        clean=clean,
        stops=worked,
        process_stops=stops,
        lengthened=lengthened,
        awaited=awaited,
        work=work,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _OwnTimes:
    """Features of the passes of each rank."""

    passes_s: Floats
    compute_s: Floats
    bound: Mask
    queue_s: Floats


def _own_times(laid: _StepSpans, layout: JobLayout, late_spans: Mask) -> _OwnTimes:
    columns = laid.columns
    passes = _Passes.of(laid.spans, columns, layout)
    late = late_spans[passes.where]
    every = np.ones(len(passes.where), np.bool_)
    calm = every
    if laid.on_device:  # how long a device waited for a stopped process is not known exactly enough to compare passes
        start, end = columns.start_s[passes.where], columns.end_s[passes.where]
        launched = launched_s(laid.spans[passes.where], start, end)
        calm = laid.process_stops.within(passes.rank, start, launched) <= 0
    passes_s = _positive(passes.seconds(laid.clean, calm))
    waited = _may_have_waited(late, passes)
    compute_s = _positive(passes.seconds(laid.clean, calm & ~waited)) if waited.any() else passes_s
    return _OwnTimes(
        passes_s=passes_s,
        compute_s=compute_s,
        bound=_mostly(late, passes, layout.world) | (np.isfinite(passes_s) & np.isnan(compute_s)),
        queue_s=passes.seconds(columns.queue_s, every),
    )


def _of_known_ranks(step: MatchedStep, world: int) -> MatchedStep:
    """Return the step without the records of ranks that its layout lacks."""
    if step.record_columns.greatest_rank < world:
        return step
    known = step.view.records["rank"] < world
    return MatchedStep(dataclasses.replace(step.view, records=select_rows(step.view.records, known)))


def segment_medians(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the median of each group's values, the lower one of two middles; NaN where a group is empty."""
    return native_segment_medians(group, values, groups)


def _unit_of_rank(layout: JobLayout) -> Ints:
    places = zip(layout.stages, layout.coordinates, strict=True)
    return np.array([stage * layout.dp + at.dp // layout.ep for stage, at in places], np.int64)


def _hide_incomplete(clean: Floats, rank: Ints, layout: JobLayout) -> None:
    """Write NaN for spans of units of which a member did not report: what they wait for inside is unknown."""
    silent = np.bincount(rank, minlength=layout.world) == 0
    if silent.any():
        unit = _unit_of_rank(layout)
        clean[np.isin(unit[rank], unit[silent])] = np.nan


def _shared_waits(meetings: Collectives, start: Floats, off_cpu: Floats) -> Floats:
    """Return seconds that each span of `meetings.record` waits inside for other members of its unit.

    Members meet inside the span (tensor, context, expert parallel): who enters early waits there for who enters late,
    and time `off_cpu` of one (in its run queue, or stopped) costs all of them. Neither is a rank's own time.
    """
    where = np.repeat(np.arange(len(meetings)), np.diff(meetings.begin))
    last = np.full(len(meetings), -np.inf)
    entered, own = start[meetings.record], off_cpu[meetings.record]
    np.maximum.at(last, where, entered)
    longest = np.zeros(len(meetings))
    np.maximum.at(longest, where, own)
    waits: Floats = last[where] - entered + longest[where] - own
    return waits


def _has_flag(step: MatchedStep, flag: Flag) -> bool:
    """Return whether a span has a flag."""
    return bool(step.record_columns.flags & flag) and bool((step.columns.flags & flag).any())


def launched_late(step: MatchedStep) -> Mask:
    """Return spans that a device ended right after the host's last launch; none where the lead is not recorded."""
    spans = step.spans
    if not _has_flag(step, Flag.AUX_LEAD):
        return np.zeros(len(spans), np.bool_)
    mask: Mask = (step.columns.flags & Flag.AUX_LEAD) != 0
    mask &= spans["aux"] < LEAD_PART * spans["duration"]
    return mask


def _may_have_waited(late: Mask, passes: _Passes) -> Mask:
    """Return passes that were launched late, and the pass after each, which began without a lead.

    On GPUs with crowded processors the other passes last as long as before, and these several times as long.
    """
    follows = np.flatnonzero(passes.rank[1:] == passes.rank[:-1]) + 1
    mask = late.copy()
    mask[follows] |= late[follows - 1]
    return mask


def _mostly(late: Mask, passes: _Passes, world: int) -> Mask:
    """Return ranks of which more than half of the passes are in `late`."""
    share: Mask = 2 * _count(passes.rank[late], world) > _count(passes.rank, world)
    return share


def _count(numbers: NDArray[np.integer], size: int) -> Ints:
    return np.bincount(numbers, minlength=size)


def _passes(columns: rec.SpanColumns, world: int) -> Ints:
    """Return the FORWARD spans of each rank, or its BACKWARD spans where it has no others."""
    forwards, backwards = (_count(columns.rank[columns.kind == kind], world) for kind in _MAIN_PASSES)
    return np.where(forwards > 0, forwards, backwards)


def _used_groups(there: Mask, layout: JobLayout) -> Mask:
    """Return for each rank the groups that any rank of its role has."""
    used = np.zeros_like(there)
    roles = np.array(layout.roles or (RankRole.ALL,) * layout.world)
    for role in set(roles.tolist()):
        used[roles == role] = there[roles == role].any(axis=0)
    return used


def _positive(values: Floats) -> Floats:
    return np.where(values > 0, values, np.nan)


def _stalls(laid: _StepSpans, world: int) -> Floats:
    """Return the gap between each FORWARD and the span before it on its rank; of ranks without, each BACKWARD."""
    rank, kind = laid.columns.rank, laid.columns.kind
    has_forwards = _count(rank[kind == RecordKind.FORWARD], world) > 0
    main = np.flatnonzero(rec.is_kind(kind, frozenset(_MAIN_PASSES)))
    main = main[(main > 0) & (kind[main] == np.where(has_forwards[rank[main]], *_MAIN_PASSES))]
    forward = main[rank[main] == rank[main - 1]]
    begin, end = laid.columns.end_s[forward - 1], laid.columns.start_s[forward]
    own = end - begin - laid.awaited[forward - 1]
    gap = np.maximum(own - laid.stops.within(rank[forward], begin, end), 0.0)
    return segment_medians(rank[forward], gap, world)


def _idle(laid: _StepSpans, world: int, step_s: Floats, step_queue_s: Floats, forwards: Ints) -> Floats:
    """Return idle seconds; run-queue delays and stops outside all spans are in gaps and posts: subtracted here."""
    columns = laid.columns
    posts = rec.is_kind(columns.kind, POSTS)
    covered = _sums_without(posts, columns.rank, columns.end_s - columns.start_s, world)
    queued = _sums_without(posts, columns.rank, columns.queue_s, world)
    awaited = _sums_without(None, columns.rank, laid.awaited, world)
    idle = step_s - covered - awaited - np.maximum(step_queue_s - queued, 0.0)
    if laid.stops.any:
        first, last = np.full(world, np.inf), np.full(world, -np.inf)
        np.minimum.at(first, columns.rank, columns.start_s)
        np.maximum.at(last, columns.rank, columns.end_s)
        inside = laid.stops.within(columns.rank, columns.start_s, columns.end_s)
        total = laid.stops.within(np.arange(world), np.minimum(first, last), last)
        idle -= np.maximum(total - _sums_without(posts, columns.rank, inside, world), 0.0)
    return _over(np.maximum(idle, 0.0), forwards)


def _sums_without(others: Mask | None, rank: Ints, seconds: Floats, world: int) -> Floats:
    """Return the sum of each rank's values, without those of `others`."""
    if not seconds.any():  # as the delays of most devices: the sums of zeros take longer than to see that they are
        return np.zeros(world)
    chosen = seconds if others is None else np.where(others, 0.0, seconds)
    return np.bincount(rank, weights=chosen, minlength=world).astype(np.float64, copy=False)


def _over(seconds: Floats, forwards: Ints) -> Floats:
    out: Floats = seconds / np.where(forwards > 0, forwards, np.nan)
    return out


def _sums(rank: NDArray[np.integer], seconds: Floats, step_s: Floats) -> Floats:
    """Return the sum of each rank's values; NaN without its STEP record."""
    return np.where(np.isfinite(step_s), np.bincount(rank, seconds, minlength=len(step_s)), np.nan)


def _stopped(laid: _StepSpans, steps: RankRecords, step: MatchedStep, world: int) -> Floats:
    """Return seconds in which each rank was stopped during its step; NaN without its STEP record."""
    out = np.full(world, np.nan)
    own = steps[steps["rank"] < world]
    start = rec.starts_s(own, step.start_ns)
    out[own["rank"]] = laid.process_stops.within(own["rank"], start, start + rec.durations_s(own))
    return out


def _data(laid: _StepSpans, world: int, forwards: Ints) -> Floats:
    chosen = laid.columns.kind == RecordKind.DATA
    total = np.bincount(laid.columns.rank[chosen], weights=laid.clean[chosen], minlength=world)
    out: Floats = total / np.where(forwards > 0, forwards, np.nan)
    return out


def _optimizer(spans: RankRecords, columns: rec.SpanColumns, late: Mask, stops: Stops, world: int) -> Floats:
    """Return the seconds of the optimizer's arithmetic of each rank; NaN where its device's own time is not known."""
    own = np.flatnonzero(columns.kind == RecordKind.OPTIMIZER)
    rank = columns.rank[own]
    start, end = columns.start_s[own], columns.end_s[own]
    doubtful = late[own] | (stops.within(rank, start, launched_s(spans[own], start, end)) > 0)
    total = np.zeros(world)
    np.add.at(total, rank, columns.duration_s[own])
    return np.where(np.bincount(rank[doubtful], minlength=world) > 0, np.nan, _positive(total))


def _step_spans(records: RankRecords, world: int) -> tuple[Floats, Floats]:
    """Return length and run-queue delay of each rank's STEP span; NaN where it is missing."""
    steps = records[(records["kind"] == RecordKind.STEP) & (records["rank"] < world)]
    length, queued = np.full(world, np.nan), np.zeros(world)
    length[steps["rank"]] = steps["duration"].astype(np.float64) * (DURATION_UNIT_NS * rec.NS)
    queued[steps["rank"]] = rec.run_queue_s(steps)
    return length, queued


def _deliveries(laid: _StepSpans, messages: Messages, world: int) -> tuple[Ints, Floats, Ints]:
    """Return directed pairs, their usual delivery, and how many messages they carried."""
    columns, whole = laid.columns, messages.matched_only()
    send, recv = whole.send_post, whole.recv_wait
    pair = whole.source * world + whole.destination
    ready = np.maximum(columns.start_s[recv], columns.end_s[send])
    end_s = columns.end_s[recv]
    stopped = laid.stops.within(columns.rank[recv], ready, end_s)
    late = np.maximum(end_s - ready - columns.queue_s[recv] - stopped, 0.0)
    # Messages are sorted by pair, so that few runs of equal pairs remain to be sorted.
    begin = np.flatnonzero(np.diff(pair, prepend=-1))
    names, of_run = np.unique(pair[begin], return_inverse=True)
    where = np.repeat(of_run, np.diff(begin, append=len(pair)))
    count = np.bincount(where, minlength=len(names))
    in_any_order = np.bincount(where, whole.ordinal >= FIRST_PASS_ORDINAL, minlength=len(names)) > 0
    mean = np.bincount(where, late, minlength=len(names)) / count
    delivery = np.where(in_any_order, mean, segment_medians(where, late, len(names)))
    return np.stack([names // world, names % world], axis=1), delivery, count
