"""Event simulation of a pipeline training job, all steps of a block and all replicas at a time.

Every stage is a coroutine that computes, posts and waits; its clock is an array [step, replica, tensor rank]. Steps of
a block can be simulated together because the gradient norm synchronises all ranks once per step: times are counted from
there, and how far a rank is ahead of the others when a step begins follows from draws alone. Nothing here knows how the
analyzer sees a step; the record format is all they have in common.
"""

import collections
import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detect import noise as nz
from detect import schedule as sched
from detect.faults import Effects, SimulatedFault, effects
from detect.layout import DATA_SLOT, WORLD_SLOT, Grid
from detect.protocol import StepTrace
from detect.spans import Recorder, SpanColumn
from detect.stops import Stops
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind, pass_ordinal

Floats = NDArray[np.float64]
Key = tuple[object, ...]
Program = Generator[Key, Floats, None]
BLOCK_VALUES = 6_000_000
"""Most span times in memory at once."""
USUAL_TOKENS = 4096
"""Tokens of a usual microbatch."""
REDUCED_LAST = 0.02
"""Part of a pass whose gradients the last reduction has."""
MEETINGS = 8
"""How often the members of a tensor-parallel unit meet inside a pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Events:
    """Healthy events: what makes steps of a job differ without any fault."""

    first_step: float = 3.0
    """Factor on the first step (allocation, autotuning)."""
    warmup_steps: int = 0
    warmup_drift: float = 0.0
    """Devices heat up: all ranks become slower by this share, each by its own amount around it."""
    evaluate_every: int = 0
    evaluate_s: float = 2.0
    checkpoint_every: int = 0
    checkpoint_s: float = 3.0
    ramp_up: tuple[tuple[int, int], ...] = ()
    """(step, microbatches) from which on the batch is larger."""
    uneven: float = 0.0
    """Sigma of the logarithm of the work of microbatches; the same in all stages of a replica."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job: its layout, work, noise, faults, healthy events, and what happens to its records."""

    grid: Grid
    noise: nz.NoiseModel = nz.QUIET
    microbatches: int = 8
    forward_s: float = 20e-3
    backward_ratio: float = 2.0
    stage_weight: tuple[float, ...] = ()
    """Relative work of each stage; empty: equal."""
    faults: tuple[SimulatedFault, ...] = ()
    events: Events = Events()
    lost_fraction: float = 0.0
    clock_offset_s: float = 0.0
    clock_drift_ppm: float = 0.0
    """Spread of the clocks of nodes: sigma of offset and drift; 0: all nodes have one clock."""
    stop_records: bool = True
    """True if ranks record when their process was stopped."""
    stops_devices: bool = False
    """True for devices that do nothing while their process is stopped, and whose spans have no leads."""
    reports_work: bool = False
    """True if ranks that read data record the tokens of each microbatch."""
    work_part: float = 1.0
    """Part of a pass that grows with its tokens."""
    transfer_part: float = 0.0
    """Part of a pass in which members of a tensor-parallel unit transfer; the first collective is recorded then."""
    overlaps_reductions: bool = False
    """True if replicas reduce their gradients during the last pass, and wait for each other inside of it."""

    def microbatches_at(self, step: int) -> int:
        return max([(self.microbatches)] + [count for first, count in self.events.ramp_up if first <= step], default=0)


class JobSimulation:
    """Steps of one job, from 0 to `steps`. The same seed gives the same draws, with and without faults."""

    def __init__(self, job: SimulatedJob, seed: int, steps: int) -> None:
        self.job, self.seed, self.steps = job, seed, steps
        grid, rng = job.grid, np.random.default_rng((seed, 1))
        self._paces = nz.paces(job.noise, rng, steps, grid.node_of) * _warmup(job, rng, steps)
        self._offset_s = rng.normal(0.0, 1.0, grid.world)[grid.node_of] * job.clock_offset_s
        self._drift = rng.normal(0.0, 1.0, grid.world)[grid.node_of] * job.clock_drift_ppm * 1e-6
        self._lengths_s = np.empty(0)

    def traces(self) -> Iterator[StepTrace]:
        """Simulate and record all steps."""
        grid = self.job.grid
        separate = self.job.clock_offset_s > 0 or self.job.clock_drift_ppm > 0
        boot_ids = tuple(f"boot-{node if separate else 0}" for node in grid.node_of)
        for block in self._blocks():
            recorder = Recorder(grid, self._offset_s, self._drift)
            lost = np.random.default_rng((self.seed, 3, int(block.steps[0])))
            for place, records in enumerate(recorder.steps(block.columns, block.steps, block.origin_s)):
                keep = lost.random(len(records)) >= self.job.lost_fraction
                remaining = records[keep] if self.job.lost_fraction else records
                end_s = float(block.origin_s[place] + block.sync_s[place])
                yield StepTrace(
                    grid=grid,
                    step=int(block.steps[place]),
                    records=remaining,
                    boot_ids=boot_ids,
                    real_time_s=1.7e9 + end_s,
                    lost=len(records) - len(remaining),
                )

    def step_lengths_s(self) -> Floats:
        """Return the length of every step; those of a simulation whose traces have been read are known."""
        if len(self._lengths_s) < self.steps:
            collections.deque(self._blocks(), maxlen=0)
        return self._lengths_s

    def _blocks(self) -> Iterator["_Block"]:
        now_s, begin = 1000.0, np.zeros((1, self.job.grid.world))
        self._lengths_s = np.empty(0)
        first = 0
        while first < self.steps:
            microbatches = self.job.microbatches_at(first)
            spans = self.job.grid.world * microbatches * self.job.grid.vpp * 10
            count = max(min(BLOCK_VALUES // spans, 128, self.steps - first), 1)
            same = [self.job.microbatches_at(step) == microbatches for step in range(first, first + count)]
            steps = np.arange(first, first + (same.index(False) if False in same else count))
            block = _Block(self.job, steps, self._paces[steps], begin=begin, seed=self.seed)
            block.run(now_s)
            begin = block.after[-1:]
            now_s = float(block.origin_s[-1] + block.sync_s[-1])
            self._lengths_s = np.concatenate([self._lengths_s, block.sync_s])
            yield block
            first += len(steps)


def _warmup(job: SimulatedJob, rng: np.random.Generator, steps: int) -> Floats:
    """Return the factor of each rank in each step by which it is slower since it has become warm."""
    events = job.events
    each = rng.normal(1.0, 0.2, job.grid.world)
    warm = 1.0 - np.exp(-np.arange(steps) / max(events.warmup_steps, 1e-9)) if events.warmup_steps else np.zeros(steps)
    factor: Floats = 1.0 + events.warmup_drift * warm[:, None] * each[None, :]
    factor[:1] *= events.first_step
    return factor


class _Block:
    """Consecutive steps with the same number of microbatches."""

    def __init__(self, job: SimulatedJob, steps: NDArray[np.int64], paces: Floats, *, begin: Floats, seed: int) -> None:
        self.job, self.grid, self.noise = job, job.grid, job.noise
        self.steps, self.microbatches = steps, job.microbatches_at(int(steps[0]))
        self.rng = np.random.default_rng((seed, 2, int(steps[0])))
        self.extra_rng = np.random.default_rng((seed, 4, int(steps[0])))
        self.shape = (len(steps), self.grid.dp, self.grid.tp)
        self.paces = paces
        self.effects: Effects = effects(job.faults, steps, self.grid.world)
        self.columns: list[list[SpanColumn]] = [[] for _ in range(self.grid.pp)]
        self.published: dict[Key, Floats] = {}
        self.ordinals: dict[Key, int] = {}
        shape = (len(steps), self.microbatches, self.grid.dp, 1)
        uneven = job.events.uneven
        self.work: Floats = np.exp(self.rng.normal(-uneven * uneven, uneven, shape)) if uneven else np.ones(shape)
        self.tails = [_Tail(self, stage) for stage in range(self.grid.pp)]
        self.after = np.concatenate([tail.end.reshape(len(steps), -1) for tail in self.tails], axis=1)
        self.begin = np.concatenate([begin, self.after[:-1]])
        self.sync_s = np.empty(0)
        self.origin_s = np.empty(0)

    def of_stage(self, values: NDArray[Any], stage: int) -> NDArray[Any]:
        """Return the part of an array [step, rank] that belongs to a stage, [step, replica, tensor rank]."""
        first = stage * self.grid.stage_size
        return values[:, first : first + self.grid.stage_size].reshape(len(values), self.grid.dp, self.grid.tp)

    def stops(self, stage: int) -> Stops:
        """Draw when the processes of a stage are stopped, or collect garbage."""
        whole = (self.effects.duty, self.effects.cycle_s, self.effects.collects)
        duty, cycle_s, collects = (self.of_stage(values, stage) for values in whole)
        return Stops(duty, cycle_s, collects, self.extra_rng)

    def run(self, now_s: float) -> None:
        """Run all stages; `now_s` is when the ranks synchronised before the first step."""
        stages = [StageRun(self, stage) for stage in range(self.grid.pp)]
        _drive([stage.program() for stage in stages], self.published)
        self.sync_s = np.max([self.published["norm", stage] for stage in range(self.grid.pp)], axis=0)
        self.origin_s = now_s + np.concatenate([[0.0], np.cumsum(self.sync_s)[:-1]])
        for stage, tail in zip(stages, self.tails, strict=True):
            stage.finish(tail, self.sync_s[:, None, None])


def _drive(programs: list[Program], published: dict[Key, Floats]) -> None:
    """Run coroutines until all have ended; each yields the key that it needs next."""
    ready: collections.deque[tuple[Program, Floats | None]] = collections.deque((task, None) for task in programs)
    parked: dict[Key, list[Program]] = collections.defaultdict(list)
    while ready or parked:
        if not ready:
            woken = [key for key in parked if key in published]
            if not woken:
                raise RuntimeError("the stages of the simulated job wait for each other; check its schedule")
            for key in woken:
                ready.extend((program, published[key]) for program in parked.pop(key))
        program, value = ready.popleft()
        try:
            parked[program.send(value)].append(program)  # type: ignore[arg-type]
        except StopIteration:
            continue


class _Tail:
    """Spans of a stage after the synchronisation of a step, with times from there."""

    def __init__(self, block: _Block, stage: int) -> None:
        job, rng, shape = block.job, block.rng, block.shape
        self.columns: list[SpanColumn] = []
        pace = block.of_stage(block.paces, stage)
        stops = block.stops(stage)
        zero = np.zeros(shape)
        self.norm_end = stops.end(zero, 0.02 * job.forward_s * rng.uniform(0.9, 1.1, shape))
        begin = self.norm_end + job.noise.gap_s * rng.uniform(0.5, 1.5, shape)
        slower = pace * block.of_stage(block.effects.optimizer, stage)
        end = stops.end(begin, 0.3 * job.forward_s * slower * nz.span_factors(job.noise, rng, shape))
        self.columns.append(SpanColumn(RecordKind.OPTIMIZER, begin, end))
        self.end = end
        if block.grid.dp > 1:
            begin = end + job.noise.gap_s * rng.uniform(0.5, 1.5, shape)
            last = begin.max(axis=1, keepdims=True)
            length = 0.2 * job.forward_s * block.of_stage(block.effects.data, stage)
            end = stops.end(last + zero, length * rng.uniform(0.95, 1.1, shape))
            flags = int(Flag.DEVICE_CLOCK) if job.noise.device else 0
            self.columns.append(SpanColumn(RecordKind.PARAM_GATHER, begin, end, slot=DATA_SLOT, flags=flags))
            self.end = end
        self.step_end = self.end
        if job.stop_records:
            self.columns += stops.records(zero, self.step_end)
        for kind, every, seconds in (
            (RecordKind.EVALUATE, job.events.evaluate_every, job.events.evaluate_s),
            (RecordKind.CHECKPOINT, job.events.checkpoint_every, job.events.checkpoint_s),
        ):
            if every and (due := (block.steps + 1) % every == 0).any():
                length = np.where(due[:, None, None], seconds * rng.uniform(0.9, 1.2, shape), 0.0)
                self.columns.append(SpanColumn(kind, self.end, self.end + length, steps=due))
                self.end = self.end + length


class StageRun:
    """One stage in a block of steps."""

    def __init__(self, block: _Block, stage: int) -> None:
        self.block, self.job, self.grid, self.noise, self.rng = block, block.job, block.grid, block.noise, block.rng
        self.stage = stage
        self.now = self.begin = block.of_stage(block.begin, stage)
        self.columns = block.columns[stage]
        self.slots = block.grid.neighbour_slots(stage)
        self.pace = block.of_stage(block.paces, stage)
        self.factor = block.of_stage(block.effects.factor, stage)
        self.tokens = block.of_stage(block.effects.tokens, stage)
        self.stall = block.of_stage(block.effects.stall, stage)
        self.stops = block.stops(stage)
        self.lead = np.zeros(block.shape)
        self.queued = np.zeros(block.shape)
        self.sent: list[tuple[Key, int, int, int]] = []
        self.numbers: dict[int, int] = collections.defaultdict(int)
        weight = self.job.stage_weight[stage] if self.job.stage_weight else 1.0
        self.forward_s = self.job.forward_s * weight / self.grid.vpp
        self.hiccups = self._hiccups()

    def _hiccups(self) -> tuple[Floats, NDArray[np.int64]]:
        """Return the delay of each rank's disturbance in each step, and the forward pass before which it happens."""
        delay = nz.rare(self.rng, self.block.shape, self.noise.hiccup_fraction, self.noise.hiccup_s)
        return delay, self.rng.integers(self.block.microbatches * self.grid.vpp, size=self.block.shape)

    def program(self) -> Program:
        """Run all passes, then the reduction of the gradients, up to the gradient norm."""
        grid, forwards = self.grid, 0
        tasks = list(sched.passes(self.stage, grid.pp, grid.vpp, self.block.microbatches))
        for task in tasks:
            sender = sched.source(task, self.stage, grid.pp, grid.vpp)
            if sender is not None:
                self._post(RecordKind.RECV_POST, (sender, self.stage), ("post", sender, self.stage, task), task)
            yield from self._wait_sent()
            if sender is not None:
                yield from self._receive(sender, task)
            elif task.is_forward:
                late = self.block.of_stage(self.block.effects.wait, self.stage) * self.forward_s * grid.vpp
                self._span(RecordKind.DATA, 1e-4 + late, task.microbatch)
                self._report_work(task.microbatch)
            if task.is_forward:
                self._stall(forwards)
                forwards += 1
            self._compute(task, reduces=self.job.overlaps_reductions and task is tasks[-1])
            if (to := sched.target(task, self.stage, grid.pp, grid.vpp)) is not None:
                key = ("sent", self.stage, *to)
                number = self._post(RecordKind.SEND_POST, (self.stage, to[0]), key, task)
                self.sent.append((("post", self.stage, *to), self.slots[self.stage, to[0]], number, task.microbatch))
        yield from self._wait_sent()
        self._reduce()
        self._gap()
        self.norm_begin = self.now
        self.block.published["norm", self.stage] = self.now.max(axis=(1, 2))

    def finish(self, tail: _Tail, sync: Floats) -> None:
        """Append what follows the synchronisation, and the record of the step itself."""
        norm_end = sync + tail.norm_end
        self.columns.append(SpanColumn(RecordKind.GRAD_NORM, self.norm_begin, norm_end, slot=WORLD_SLOT))
        shifted = [column.shifted(sync) for column in tail.columns]
        if self.job.stop_records:
            self.columns += self.stops.records(self.begin, self.norm_begin)
        whole = SpanColumn(
            RecordKind.STEP, self.begin, sync + tail.step_end, aux=self.queued, flags=int(Flag.AUX_RUN_QUEUE)
        )
        self.columns[:] = [whole, *self.columns, *shifted]

    def _gap(self) -> None:
        self.now = self.stops.end(self.now, self.noise.gap_s * self.rng.uniform(0.5, 1.5, self.block.shape))

    def _queue(self) -> Floats:
        """Let a run-queue delay pass; return what the record shows of it."""
        if not self.noise.queue_fraction:
            return np.zeros(self.block.shape)
        delay = nz.rare(self.rng, self.block.shape, self.noise.queue_fraction, self.noise.queue_s)
        seen = delay * self.rng.uniform(0.8, 1.0, self.block.shape)
        self.now = self.now + delay
        self.queued = self.queued + seen
        return seen

    def _span(self, kind: RecordKind, seconds: Floats, microbatch: int) -> None:
        self._gap()
        begin = self.now
        self.now = self.stops.end(begin, seconds)
        seen = self._queue()
        self.columns.append(SpanColumn(kind, begin, self.now, microbatch, aux=seen, flags=int(Flag.AUX_RUN_QUEUE)))

    def _post(self, kind: RecordKind, pair: tuple[int, int], key: Key, task: sched.Pass) -> int:
        self._gap()
        begin = self.now
        self.now = self.stops.end(begin, np.full(self.block.shape, 2e-5))
        slot = self.slots[pair]
        number = self.numbers[slot]
        self.numbers[slot] += 1
        self.block.published[key] = self.now
        self.block.ordinals[key] = number
        size = 4096 * 16 / 2**29
        self.columns.append(
            SpanColumn(kind, begin, self.now, task.microbatch, task.chunk, slot, number, size, int(Flag.AUX_BYTES))
        )
        return number

    def _wait_sent(self) -> Program:
        for key, slot, number, microbatch in self.sent:
            begin = self.now
            if self.grid.vpp == 1:
                self.now = np.maximum(self.now, (yield key))
            self.now = self.stops.end(self.now, np.full(self.block.shape, 3e-5))
            self._waited(RecordKind.SEND_WAIT, begin, slot, number, microbatch)
        self.sent.clear()

    def _waited(self, kind: RecordKind, begin: Floats, slot: int, number: int, microbatch: int) -> None:
        seen = self._queue()
        flags = int(Flag.AUX_RUN_QUEUE)
        self.columns.append(
            SpanColumn(kind, begin, self.now, microbatch, slot=slot, ordinal=number, aux=seen, flags=flags)
        )

    def _receive(self, sender: int, task: sched.Pass) -> Program:
        begin = self.now
        key = ("sent", sender, self.stage, task)
        sent = yield key
        noise, shape = self.noise, self.block.shape
        delay = noise.delivery_s * self.rng.uniform(0.7, 1.3, shape)
        delay += nz.rare(self.rng, shape, noise.delivery_fraction, noise.delivery_tail_s)
        arrived = np.maximum(np.maximum(begin, sent) + delay, begin)
        self.now = self.stops.end(arrived + self._late(sender), np.zeros(shape))
        number = self.block.ordinals[key]
        posted = next(
            place for place in range(len(self.columns) - 1, -1, -1) if self.columns[place].kind == RecordKind.RECV_POST
        )
        self.columns[posted] = dataclasses.replace(self.columns[posted], ordinal=number)
        self._waited(RecordKind.RECV_WAIT, begin, self.slots[sender, self.stage], number, task.microbatch)

    def _late(self, sender: int) -> Floats:
        """Return by how much links at fault delay the messages from a stage."""
        late, size = np.zeros(self.block.shape), self.grid.stage_size
        flat = late.reshape(len(late), -1)
        for source, destination, delay in self.block.effects.delays:
            here = destination is None or destination // size == self.stage
            if here and (source is None or source // size == sender):
                place = destination if destination is not None else source
                flat[:, (place or 0) % size] += delay * self.forward_s * self.grid.vpp
        return late

    def _stall(self, forwards: int) -> None:
        """Delay the host before a forward pass; a device continues with what has been launched."""
        delay, where = self.hiccups
        seconds = self.stall * self.forward_s * self.grid.vpp + np.where(where == forwards, delay, 0.0)
        if self.noise.device:
            ahead = np.minimum(self.lead, seconds)
            self.lead, seconds = self.lead - ahead, seconds - ahead
        self.now = self.now + seconds

    def _compute(self, task: sched.Pass, *, reduces: bool) -> None:
        begin = self.now
        base = self.forward_s * (1.0 if task.is_forward else self.job.backward_ratio)
        tokens = self.block.work[:, task.microbatch] * self.tokens
        grown = tokens if self.job.work_part == 1.0 else 1.0 + self.job.work_part * (tokens - 1.0)
        work = base * grown * self.pace * self.factor
        work = work * nz.span_factors(self.noise, self.rng, self.block.shape)
        launch = self.noise.launch * base
        if self.noise.device and not self.job.stops_devices:
            launched = self.stops.end(begin, np.full(self.block.shape, launch)) - begin
            work = np.maximum(work, launched - self.lead)
        else:
            work = self.stops.end(begin, work) - begin
            launched = work
        first_s = self._transfer_s(base) / MEETINGS
        self.now = begin + work if self.grid.tp == 1 else _met(begin, work) + MEETINGS * first_s
        if reduces:  # the last kernels of the pass run after those of the reductions, for which all replicas are needed
            self.now = np.maximum(self.now, self.now.max(axis=1, keepdims=True) - REDUCED_LAST * base)
        kind = RecordKind.FORWARD if task.is_forward else RecordKind.BACKWARD
        if self.noise.device:
            self.lead = np.maximum(self.lead + self.now - begin - launched, 0.0)
            aux, flags = self.lead, int(Flag.DEVICE_CLOCK)
            flags |= 0 if self.job.stops_devices else int(Flag.AUX_LEAD)
        else:
            aux, flags = self._queue(), int(Flag.AUX_RUN_QUEUE)
        self.columns.append(SpanColumn(kind, begin, self.now, task.microbatch, task.chunk, aux=aux, flags=flags))
        if self.job.transfer_part:
            arrive = begin + work / MEETINGS
            end = arrive.max(axis=2, keepdims=True) + first_s
            number = pass_ordinal(kind, task.chunk, task.microbatch, 0)
            self.columns.append(
                SpanColumn(
                    RecordKind.TP_REDUCE,
                    arrive,
                    end,
                    task.microbatch,
                    task.chunk,
                    ordinal=number,
                    flags=Flag.DEVICE_CLOCK,
                )
            )

    def _report_work(self, microbatch: int) -> None:
        if not self.job.reports_work:
            return
        tokens = np.rint(USUAL_TOKENS * self.block.work[:, microbatch] * self.tokens) + np.zeros(self.block.shape)
        aux, flags = tokens * DURATION_UNIT_NS * 1e-9, int(Flag.AUX_WORK)
        self.columns.append(SpanColumn(RecordKind.WORK, self.now, self.now, microbatch, aux=aux, flags=flags))

    def _transfer_s(self, base: float) -> Floats:
        """Return how long the members of each unit transfer inside a pass of `base` seconds."""
        if not self.job.transfer_part:
            return np.zeros(self.block.shape)
        longer = self.block.of_stage(self.block.effects.tensor, self.stage)
        drawn = self.block.extra_rng.lognormal(0.0, 0.1, (*self.block.shape[:2], 1))
        return self.job.transfer_part * base * longer * drawn

    def _reduce(self) -> None:
        if self.grid.dp == 1:
            return
        self._gap()
        begin, shape = self.now, self.block.shape
        last = begin.max(axis=1, keepdims=True) + np.zeros(shape)
        length = 0.2 * self.job.forward_s * self.block.of_stage(self.block.effects.data, self.stage)
        self.now = self.stops.end(last, length * self.rng.uniform(0.9, 1.3, shape))
        seen = self._queue()
        flags = int(Flag.DEVICE_CLOCK if self.noise.device else Flag.AUX_RUN_QUEUE)
        self.columns.append(SpanColumn(RecordKind.GRAD_REDUCE, begin, self.now, slot=DATA_SLOT, aux=seen, flags=flags))


def _met(begin: Floats, work: Floats) -> Floats:
    """Return when members leave a pass inside which they meet, so that each part lasts as long as on the slowest."""
    part = work / MEETINGS
    first = (begin + part).max(axis=2, keepdims=True)
    end: Floats = first + (MEETINGS - 2) * part.max(axis=2, keepdims=True) + part
    return end
