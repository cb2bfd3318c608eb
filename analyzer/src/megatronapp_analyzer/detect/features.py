"""Features of each rank and each directed pair in one step. Pure NumPy; waits are never part of a rank's own time.

passes    seconds per microbatch in FORWARD, BACKWARD and WEIGHT, without run-queue delay and without the wait for
          members of the same unit that enter later: the sum over (kind, chunk) of the median over microbatches, so
          that a few disturbed spans do not matter
compute   the same of those spans whose length the device decides, not the host that launches their kernels
bound     whether the host decides the length of most of these spans, or enough of them to make compute unknown
stall     seconds before each FORWARD in which the rank was in no span (median over microbatches)
idle      seconds per microbatch of the whole step outside any span, posts included, without run-queue delay
data      seconds of DATA per microbatch, without run-queue delay
queue     run-queue delay per microbatch inside the same spans as compute, the same way
crowded   run-queue delay of the whole step per microbatch
work      reported work of the microbatches; where there is any, the lengths of passes are those of usual work
optimizer seconds of OPTIMIZER on a device's clock, which multiplies no matrices and waits for memory
stopped   seconds per microbatch of the whole step in which the process was stopped; they are in none of the others.
          On a device's clock, by which its stops lengthened the passes: a device continues while its host is stopped
delivery  seconds from "sent, and the receiver was waiting" to the end of the receive, without run-queue delay
          (median over the messages of a directed pair; where ranks run other passes meanwhile, the mean: a late link
          then costs the few waits that no pass could fill, often one in a step)
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.work import StepWork, WorkModel
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Messages, meetings_of
from megatronapp_analyzer.graph.stops import Stops, lengthened_by_stops_s
from megatronapp_analyzer.model import JobLayout, RankRecords, StepRecords, select_rows
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import DURATION_UNIT_NS, PASS_KINDS, Flag, RecordKind
from megatronapp_native import segment_medians as native_segment_medians

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
POSTS = frozenset({RecordKind.SEND_POST, RecordKind.RECV_POST})
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
    start: Floats
    end: Floats
    clean: Floats
    stops: Stops


def extract(view: StepRecords, layout: JobLayout, model: WorkModel | None = None) -> StepFeatures:
    """Compute the features of one step on aligned clocks.

    `model`: how passes of the job grow with their work, if it is reported; it learns from the step.
    """
    return extract_matched(MatchedStep(view), layout, model)


def extract_matched(step: MatchedStep, layout: JobLayout, model: WorkModel | None = None) -> StepFeatures:
    """Compute the features of one step on aligned clocks, as `extract` does."""
    step = _of_known_ranks(step, layout.world)
    view, spans = step.view, step.spans
    origin_ns = view.start_ns if len(view.records) else 0
    start, end = step.times_s
    on_device = bool((spans["flags"] & Flag.DEVICE_CLOCK).any())
    stops = Stops(view.records, origin_ns)
    worked = stops if not on_device else Stops(view.records[:0], origin_ns)
    lengthened = lengthened_by_stops_s(spans, start, end, stops) if on_device else np.zeros(len(spans))
    off_cpu = rec.run_queue_s(spans) + worked.within(spans["rank"], start, end) + lengthened
    clean = np.maximum(rec.durations_s(spans) - off_cpu, 0.0)
    if layout.tp * layout.cp * layout.ep > 1:
        clean = np.maximum(clean - _shared_waits(spans, start, off_cpu, layout), 0.0)
        clean[_incomplete_spans(spans, layout)] = np.nan
    clean, work = (clean, None) if model is None else model.normalise(view.records, spans, clean)
    laid = _StepSpans(spans=spans, start=start, end=end, clean=clean, stops=worked)
    messages = step.messages
    forwards = _passes(spans, layout.world)
    late = _launched_late(spans)
    calm = np.ones(len(spans), np.bool_)
    if on_device:  # what a device does while its process is stopped is not known exactly enough to compare it
        calm = stops.within(spans["rank"], start, end) <= 0
    passes_s = _positive(_per_microbatch(spans, clean, layout, counted=calm))
    compute_s = _positive(_per_microbatch(spans, clean, layout, counted=calm & ~_may_have_waited(late, spans)))
    step_s, step_queue_s = _step_spans(view.records, layout.world)
    pairs, delivery, count = _deliveries(laid, messages, layout.world)
    return StepFeatures(
        passes_s=passes_s,
        compute_s=compute_s,
        bound=_mostly(late, spans, layout.world) | (np.isfinite(passes_s) & np.isnan(compute_s)),
        queue_s=_per_microbatch(spans, rec.run_queue_s(spans), layout),
        stall_s=_stalls(laid, layout.world),
        idle_s=_idle(laid, layout.world, step_s, step_queue_s, forwards),
        data_s=_data(laid, layout.world, forwards),
        crowded_s=_over(np.where(np.isfinite(step_s), step_queue_s, np.nan), forwards),
        stopped_s=_over(_sums(spans["rank"], lengthened, step_s), forwards)
        if on_device
        else _stopped(stops, view.records, origin_ns, forwards),
        work=work,
        optimizer_s=_optimizer(spans, ~late & calm & on_device, layout.world),
        step_s=step_s,
        forwards=forwards,
        on_device=on_device,
        pairs=pairs,
        delivery_s=delivery,
        messages=count,
    )


def _of_known_ranks(step: MatchedStep, world: int) -> MatchedStep:
    """Return the step without the records of ranks that its layout lacks."""
    known = step.view.records["rank"] < world
    if known.all():
        return step
    return MatchedStep(dataclasses.replace(step.view, records=select_rows(step.view.records, known)))


def segment_medians(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the median of each group's values, the lower one of two middles; NaN where a group is empty."""
    return native_segment_medians(group, values, groups)


def _unit_of_rank(layout: JobLayout) -> Ints:
    places = zip(layout.stages, layout.coordinates, strict=True)
    return np.array([stage * layout.dp + at.dp // layout.ep for stage, at in places], np.int64)


def _incomplete_spans(spans: RankRecords, layout: JobLayout) -> NDArray[np.bool_]:
    """Return spans of units of which a member did not report: what they wait for inside is unknown."""
    unit = _unit_of_rank(layout)
    silent = np.bincount(spans["rank"], minlength=layout.world) == 0
    mask: NDArray[np.bool_] = np.isin(unit[spans["rank"]], unit[silent])
    return mask


def _shared_waits(spans: RankRecords, start: Floats, off_cpu: Floats, layout: JobLayout) -> Floats:
    """Return seconds that each span waits inside for other members of its unit, as far as they are known.

    Members meet inside the span (tensor, context, expert parallel): who enters early waits there for who enters late,
    and time `off_cpu` of one (in its run queue, or stopped) costs all of them. Neither is a rank's own time.
    """
    meetings = meetings_of(spans, _unit_of_rank(layout))
    where = np.repeat(np.arange(len(meetings)), np.diff(meetings.begin))
    last = np.full(len(meetings), -np.inf)
    np.maximum.at(last, where, start[meetings.record])
    waits = np.zeros(len(spans))
    own = off_cpu[meetings.record]
    longest = np.zeros(len(meetings))
    np.maximum.at(longest, where, own)
    waits[meetings.record] = last[where] - start[meetings.record] + longest[where] - own
    return waits


def _launched_late(spans: RankRecords) -> Mask:
    """Return spans that a device ended right after the host's last launch; none where the lead is not recorded."""
    told = (spans["flags"] & Flag.AUX_LEAD) != 0
    mask: Mask = told & (spans["aux"] < LEAD_PART * spans["duration"])
    return mask


def _may_have_waited(late: Mask, spans: RankRecords) -> Mask:
    """Return spans that were launched late, and the pass after each, which began without a lead.

    On GPUs with crowded processors the other passes last as long as before, and these several times as long.
    """
    passes = np.flatnonzero(_is_pass(spans))
    rank = spans["rank"][passes]
    follows = np.flatnonzero(rank[1:] == rank[:-1]) + 1
    mask = late.copy()
    mask[passes[follows]] |= late[passes[follows - 1]]
    return mask


def _is_pass(spans: RankRecords) -> Mask:
    return rec.is_kind(spans["kind"], PASS_KINDS)


def _mostly(late: Mask, spans: RankRecords, world: int) -> Mask:
    """Return ranks of which more than half of the passes are in `late`."""
    passes = _is_pass(spans)
    share: Mask = 2 * _count(spans["rank"][passes & late], world) > _count(spans["rank"][passes], world)
    return share


def _count(numbers: NDArray[np.integer], size: int) -> Ints:
    return np.bincount(numbers, minlength=size)


def _passes(spans: RankRecords, world: int) -> Ints:
    """Return the FORWARD spans of each rank, or its BACKWARD spans where it has no others."""
    forwards, backwards = (_count(spans["rank"][spans["kind"] == kind], world) for kind in _MAIN_PASSES)
    return np.where(forwards > 0, forwards, backwards)


def _per_microbatch(spans: RankRecords, values_s: Floats, layout: JobLayout, *, counted: Mask | None = None) -> Floats:
    """Return seconds of FORWARD, BACKWARD and WEIGHT, of the `counted` spans only.

    NaN for ranks that lack one of the (kind, chunk) groups that others of their role have, or of which too few are
    counted.
    """
    world = layout.world
    passes = _is_pass(spans)
    if not passes.any():
        return np.full(world, np.nan)
    chunks = int(spans["chunk"][passes].max()) + 1
    place = np.zeros(256, np.int64)
    place[sorted(PASS_KINDS)] = np.arange(len(PASS_KINDS))
    group = (spans["rank"].astype(np.int64) * len(PASS_KINDS) + place[spans["kind"]]) * chunks + spans["chunk"]
    chosen = passes & np.isfinite(values_s) & (True if counted is None else counted)
    groups = world * len(PASS_KINDS) * chunks
    medians = segment_medians(group[chosen], values_s[chosen], groups)
    there = _count(group[passes], groups)
    medians[_count(group[chosen], groups) < FREE_SHARE * there] = np.nan
    used = _used_groups(there.reshape(world, -1) > 0, layout)
    total: Floats = np.where(used, medians.reshape(world, -1), 0.0).sum(axis=1)
    return total


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
    rank = laid.spans["rank"].astype(np.int64)
    follows = np.flatnonzero(rank[1:] == rank[:-1]) + 1
    has_forwards = _count(rank[laid.spans["kind"] == RecordKind.FORWARD], world) > 0
    main_pass = np.where(has_forwards[rank], *_MAIN_PASSES)
    forward = follows[laid.spans["kind"][follows] == main_pass[follows]]
    begin, end = laid.end[forward - 1], laid.start[forward]
    gap = np.maximum(end - begin - laid.stops.within(rank[forward], begin, end), 0.0)
    return segment_medians(rank[forward], gap, world)


def _idle(laid: _StepSpans, world: int, step_s: Floats, step_queue_s: Floats, forwards: Ints) -> Floats:
    """Return idle seconds; run-queue delays and stops outside all spans are in gaps and posts: subtracted here."""
    rank = laid.spans["rank"].astype(np.int64)
    work = ~rec.is_kind(laid.spans["kind"], POSTS)
    covered = np.bincount(rank[work], weights=(laid.end - laid.start)[work], minlength=world)
    queued = np.bincount(rank[work], weights=rec.run_queue_s(laid.spans)[work], minlength=world)
    idle = step_s - covered - np.maximum(step_queue_s - queued, 0.0)
    if laid.stops.any:
        first, last = np.full(world, np.inf), np.full(world, -np.inf)
        np.minimum.at(first, rank, laid.start)
        np.maximum.at(last, rank, laid.end)
        inside = laid.stops.within(rank[work], laid.start[work], laid.end[work])
        total = laid.stops.within(np.arange(world), np.minimum(first, last), last)
        idle -= np.maximum(total - np.bincount(rank[work], weights=inside, minlength=world), 0.0)
    return _over(np.maximum(idle, 0.0), forwards)


def _over(seconds: Floats, forwards: Ints) -> Floats:
    out: Floats = seconds / np.where(forwards > 0, forwards, np.nan)
    return out


def _sums(rank: NDArray[np.integer], seconds: Floats, step_s: Floats) -> Floats:
    """Return the sum of each rank's values; NaN without its STEP record."""
    return np.where(np.isfinite(step_s), np.bincount(rank, seconds, minlength=len(step_s)), np.nan)


def _stopped(stops: Stops, records: RankRecords, origin_ns: int, forwards: Ints) -> Floats:
    """Return seconds per microbatch in which each rank was stopped during its step; NaN without its STEP record."""
    out = np.full(len(forwards), np.nan)
    steps = records[(records["kind"] == RecordKind.STEP) & (records["rank"] < len(forwards))]
    start = rec.starts_s(steps, origin_ns)
    out[steps["rank"]] = stops.within(steps["rank"], start, start + rec.durations_s(steps))
    return _over(out, forwards)


def _data(laid: _StepSpans, world: int, forwards: Ints) -> Floats:
    chosen = laid.spans["kind"] == RecordKind.DATA
    total = np.bincount(laid.spans["rank"][chosen], weights=laid.clean[chosen], minlength=world)
    out: Floats = total / np.where(forwards > 0, forwards, np.nan)
    return out


def _optimizer(spans: RankRecords, counted: Mask, world: int) -> Floats:
    """Return the seconds of the optimizer's arithmetic of each rank; NaN where its device's own time is not known."""
    own = spans["kind"] == RecordKind.OPTIMIZER
    doubtful = np.bincount(spans["rank"][own & ~counted], minlength=world) > 0
    total = np.zeros(world)
    np.add.at(total, spans["rank"][own], rec.durations_s(spans[own]))
    return np.where(doubtful, np.nan, _positive(total))


def _step_spans(records: RankRecords, world: int) -> tuple[Floats, Floats]:
    """Return length and run-queue delay of each rank's STEP span; NaN where it is missing."""
    steps = records[(records["kind"] == RecordKind.STEP) & (records["rank"] < world)]
    length, queued = np.full(world, np.nan), np.zeros(world)
    length[steps["rank"]] = steps["duration"].astype(np.float64) * (DURATION_UNIT_NS * rec.NS)
    queued[steps["rank"]] = rec.run_queue_s(steps)
    return length, queued


def _deliveries(laid: _StepSpans, messages: Messages, world: int) -> tuple[Ints, Floats, Ints]:
    """Return directed pairs, their usual delivery, and how many messages they carried."""
    matched = messages.matched
    send, recv = messages.send_post[matched], messages.recv_wait[matched]
    pair = messages.source[matched] * world + messages.destination[matched]
    ready = np.maximum(laid.start[recv], laid.end[send])
    stopped = laid.stops.within(laid.spans["rank"][recv], ready, laid.end[recv])
    late = np.maximum(laid.end[recv] - ready - rec.run_queue_s(laid.spans)[recv] - stopped, 0.0)
    names, where = np.unique(pair, return_inverse=True)
    count = np.bincount(where, minlength=len(names))
    in_any_order = np.bincount(where, messages.ordinal[matched] >= FIRST_PASS_ORDINAL, minlength=len(names)) > 0
    mean = np.bincount(where, late, minlength=len(names)) / count
    delivery = np.where(in_any_order, mean, segment_medians(where, late, len(names)))
    return np.stack([names // world, names % world], axis=1), delivery, count
