"""A pipeline training job in simulation, written as the detector's opponent.

It knows nothing of the analyzer's graph or detector: every rank is a coroutine that computes, posts and waits, and time
follows from what it waits for. Durations, run-queue delays, delivery delays, clocks and lost records are drawn from the
models below. Output is what a hub would assemble: StepViews of real trace records.
"""

import collections
import dataclasses
from collections.abc import Callable, Generator, Iterator

import numpy as np

from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, Flag, RecordKind

Key = tuple[object, ...]
Program = Generator[Key, float, None]
EPOCH_S = 1000.0
CROWD_STEPS = 8
UPTIME_NS = 10**15
"""Every clock has run for long, so that no offset makes it negative."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How a machine disturbs a rank. Times in seconds, sigmas of log-normal factors."""

    body: float = 0.0
    """Deviation of each span."""
    rank_step: float = 0.0
    """Deviation of all spans of a rank in one step (cache and hyperthread neighbours)."""
    host_step: float = 0.0
    """Deviation of all spans of all ranks in one step."""
    tail_fraction: float = 0.0
    tail_factor: float = 0.0
    """Mean of the exponential by which a share of the spans is longer."""
    queue_fraction: float = 0.0
    queue_s: float = 0.0
    """Run-queue delay: share of spans, mean of the exponential."""
    queue_seen: float = 1.0
    """Lowest share of a run-queue delay that the record attributes."""
    delivery_s: float = 20e-6
    delivery_fraction: float = 0.0
    delivery_tail_s: float = 0.0
    """Delays of delivery that no record explains (network threads waiting for a processor)."""
    gap_s: float = 50e-6
    gap_fraction: float = 0.0
    gap_tail_s: float = 0.0
    device: bool = False
    crowd_fraction: float = 0.0
    """Share of the stretches of CROWD_STEPS in which other processes crowd a rank off its processor."""
    crowd_queue_s: float = 0.0
    """Mean run-queue delay of each span then; half of it hits deliveries, where no record shows it."""
    crowd_factor: float = 1.0
    """Slowdown that remains after the delay is subtracted: caches that other processes have emptied."""

    def crowded(self) -> "Noise":
        queue_s = self.crowd_queue_s
        return dataclasses.replace(
            self, queue_fraction=1.0, queue_s=queue_s, delivery_fraction=1.0, delivery_tail_s=queue_s / 2
        )


QUIET = Noise()
# Where four ranks share two busy cores, compute per microbatch varies by 4 % from step to step; this is twice that.
SHARED_CPU = Noise(
    body=0.15, rank_step=0.05, host_step=0.10, tail_fraction=0.08, tail_factor=0.8, queue_fraction=0.5, queue_s=8e-3,
    queue_seen=0.8, delivery_s=2e-4, delivery_fraction=0.3, delivery_tail_s=4e-3, gap_s=3e-4, gap_fraction=0.05,
    gap_tail_s=5e-3,
)  # fmt: skip
GPU = Noise(body=0.01, rank_step=0.004, delivery_fraction=0.05, delivery_tail_s=2e-4, device=True)

# A machine with many more runnable processes than cores, some of the time.
CROWDED_CPU = dataclasses.replace(SHARED_CPU, crowd_fraction=0.25, crowd_queue_s=60e-3, crowd_factor=1.6)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An injected slowness, as the contracts define the kinds; "launch": a host that takes longer to launch kernels."""

    rank: int
    kind: str
    factor: float
    from_step: int = 0
    steps: int = 1 << 30
    peer: int | None = None

    def active(self, step: int) -> bool:
        return self.from_step <= step < self.from_step + self.steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Layout, model and placement of a job."""

    layout: JobLayout
    microbatches: int = 4
    forward_s: float = 20e-3
    backward_ratio: float = 2.0
    stage_weight: tuple[float, ...] = ()
    """Relative work of each stage; empty: equal."""
    noise: Noise = QUIET
    faults: tuple[Fault, ...] = ()
    rendezvous: bool = True
    tp_sleep_at_end: bool = True
    warmup_factor: float = 3.0
    """The first step is this many times slower."""
    lost_fraction: float = 0.0
    clock_offset_s: float = 0.0
    clock_drift_ppm: float = 0.0
    boot_per_node: bool = False
    healthy_launch: float = 0.3
    """Host time to launch a span's kernels over their device time, where nothing disturbs the host."""
    backward_launch: float = 1.0
    """How many times as long as of a forward pass, for its length, launching a backward pass takes."""
    launch_jitter: float = 0.0
    launch_ratio: float = 0.0
    """The same on a rank whose host stalls."""
    global_slowdown: Callable[[int], float] = lambda step: 1.0


def schedule(stage: int, stages: int, chunks: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """(is forward, microbatch, chunk) in the order of 1F1B, interleaved where there are several chunks."""
    total = microbatches * chunks
    if chunks == 1:
        warmup = min(total, stages - stage - 1)
    else:
        warmup = min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages)

    def unit(k: int, forward: bool) -> tuple[bool, int, int]:
        if chunks == 1:
            return forward, k, 0
        chunk = k % (stages * chunks) // stages
        return forward, k // (stages * chunks) * stages + k % stages, chunk if forward else chunks - 1 - chunk

    order = [unit(k, True) for k in range(warmup)]
    for k in range(total - warmup):
        order += [unit(warmup + k, True), unit(k, False)]
    return order + [unit(k, False) for k in range(total - warmup, total)]


class Simulator:
    """Steps of one job, in order. The same seed gives the same records."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.now = np.full(job.layout.world, EPOCH_S)
        self.comms, self._slots = _tables(job.layout)
        nodes = sorted(set(job.layout.nodes))
        self._boot = {node: f"boot-{i}" if job.boot_per_node else "boot" for i, node in enumerate(nodes)}
        boots = sorted(set(self._boot.values()))
        offsets = self.rng.uniform(-1, 1, len(boots)) * job.clock_offset_s
        drifts = self.rng.uniform(-1, 1, len(boots)) * job.clock_drift_ppm * 1e-6
        self.offset = dict(zip(boots, offsets, strict=True))
        self.drift = dict(zip(boots, drifts, strict=True))

    def boot_ids(self) -> dict[int, str]:
        return {rank: self._boot[node] for rank, node in enumerate(self.job.layout.nodes)}

    def steps(self, first: int, count: int) -> Iterator[StepRecords]:
        for step in range(first, first + count):
            yield self.step(step)

    def step(self, step: int) -> StepRecords:
        """Run all ranks through one step."""
        world = self.job.layout.world
        published = _PublishedTimes()
        runs = [_Rank(self, published, rank, step) for rank in range(world)]
        _drive([run.program() for run in runs], published)
        rows = [row for run in runs for row in run.rows]
        records = np.array(rows, RANK_RECORD)
        keep = self.rng.random(len(records)) >= self.job.lost_fraction
        records = records[keep]
        self.now = np.array([run.time for run in runs])
        return StepRecords(
            attempt=0,
            step=step,
            records=records[np.lexsort((records["start_ns"], records["rank"]))],
            comms=self.comms,
            boot_ids=self.boot_ids(),
            real_time_s=1.7e9 + float(self.now.max()),
            lost=int((~keep).sum()),
        )

    def local_ns(self, rank: int, time: float) -> int:
        boot = self._boot[self.job.layout.nodes[rank]]
        return int((time + self.offset[boot] + self.drift[boot] * (time - EPOCH_S)) * 1e9) + UPTIME_NS

    def crowded(self, rank: int, step: int) -> bool:
        stretch = np.random.default_rng((self.seed, rank, step // CROWD_STEPS))
        return bool(stretch.random() < self.job.noise.crowd_fraction)

    def slot(self, rank: int, comm: Communicator) -> int:
        return self._slots[rank][comm]


class _PublishedTimes:
    """Keys that ranks have published, with times; a waiting rank is resumed with the time of its key."""

    def __init__(self) -> None:
        self.times: dict[Key, float] = {}
        self.arrived: dict[Key, list[float]] = collections.defaultdict(list)


def _drive(programs: list[Program], published: _PublishedTimes) -> None:
    ready: collections.deque[tuple[Program, float | None]] = collections.deque((p, None) for p in programs)
    parked: dict[Key, list[Program]] = collections.defaultdict(list)
    running = len(programs)
    while running:
        if not ready:
            woken = [key for key in parked if key in published.times]
            if not woken:
                raise RuntimeError("the simulated job is in a deadlock")
            for key in woken:
                ready.extend((program, published.times[key]) for program in parked.pop(key))
        program, value = ready.popleft()
        try:
            key = program.send(value)  # type: ignore[arg-type]
        except StopIteration:
            running -= 1
            continue
        parked[key].append(program)


class _Neighbours:
    """Communicators between a rank and the stages next to its own."""

    def __init__(self, layout: JobLayout, rank: int) -> None:
        self.layout, self.rank, self.at = layout, rank, layout.coordinates[rank]

    def source(self, forward: bool, chunk: int) -> Communicator | None:
        """Return the communicator over which this unit receives its input."""
        layout, stage = self.layout, self.at.pp
        if forward:
            return None if stage == 0 and chunk == 0 else self.pair((stage - 1) % layout.pp, to_me=True)
        if stage == layout.pp - 1 and chunk == layout.vpp - 1:
            return None
        return self.pair((stage + 1) % layout.pp, to_me=True)

    def target(self, forward: bool, chunk: int) -> tuple[Communicator, int] | None:
        """Communicator that this unit's output leaves over, and the chunk at the other end."""
        layout, stage = self.layout, self.at.pp
        last = layout.pp - 1
        if forward:
            if stage == last and chunk == layout.vpp - 1:
                return None
            return self.pair((stage + 1) % layout.pp, to_me=False), chunk + (stage == last)
        if stage == 0 and chunk == 0:
            return None
        return self.pair((stage - 1) % layout.pp, to_me=False), chunk - (stage == 0)

    def pair(self, stage: int, *, to_me: bool) -> Communicator:
        peer = self.layout.coordinates.index(dataclasses.replace(self.at, pp=stage))
        return Communicator("p2p", (peer, self.rank) if to_me else (self.rank, peer))


class _Durations:
    """Durations of computing and launching on one rank in one step, drawn from the job's noise."""

    def __init__(
        self, job: Job, stage: int, step: int, faults: list[Fault], rng: np.random.Generator, *, crowded: bool
    ) -> None:
        noise = job.noise
        self.job, self.noise, self.faults, self.rng = job, noise, faults, rng
        self.weight = job.stage_weight[stage] if job.stage_weight else 1.0
        host_noise = np.random.default_rng((step, 77)).normal(0, noise.host_step) if noise.host_step else 0.0
        self.pace = float(np.exp(rng.normal(0, noise.rank_step) + host_noise)) if noise.rank_step else 1.0
        self.pace *= job.global_slowdown(step) * (job.warmup_factor if step == 0 else 1.0)
        self.pace *= noise.crowd_factor if crowded else 1.0

    def base_s(self, forward: bool) -> float:
        return self.job.forward_s * self.weight * (1.0 if forward else self.job.backward_ratio) / self.job.layout.vpp

    def work_s(self, forward: bool) -> float:
        """Clean time of one forward or backward of one chunk."""
        factor = float(np.exp(self.rng.normal(0, self.noise.body))) * self.pace
        if self.rng.random() < self.noise.tail_fraction:
            factor *= 1 + self.rng.exponential(self.noise.tail_factor)
        return self.base_s(forward) * factor

    def launch_s(self, forward: bool) -> float:
        """Host time to launch one span's kernels."""
        if any(fault.kind == "host" for fault in self.faults):
            return self.base_s(forward) * self.job.launch_ratio * float(np.exp(self.rng.normal(0, 5 * self.noise.body)))
        ratio = self.job.healthy_launch * (1.0 if forward else self.job.backward_launch)
        crowded = max([f.factor for f in self.faults if f.kind == "launch"], default=1.0)
        return ratio * crowded * float(np.exp(self.rng.normal(0, self.job.launch_jitter))) * self.base_s(forward)


class _Rank:
    """One rank in one step."""

    def __init__(self, simulator: Simulator, published: _PublishedTimes, rank: int, step: int) -> None:
        self.sim, self.published, self.rank, self.step = simulator, published, rank, step
        self.job, self.rng = simulator.job, simulator.rng
        self.at = self.job.layout.coordinates[rank]
        self.neighbours = _Neighbours(self.job.layout, rank)
        self.time = float(simulator.now[rank])
        self.rows: list[tuple[int, ...]] = []
        self.faults = [f for f in self.job.faults if f.rank == rank and f.active(step)]
        crowded = simulator.crowded(rank, step)
        self.durations = _Durations(self.job, self.at.pp, step, self.faults, self.rng, crowded=crowded)
        self.noise = self.job.noise.crowded() if crowded else self.job.noise
        self.ordinals: dict[Communicator, int] = collections.defaultdict(int)
        self.queued = 0.0
        self.lead_s = 0.0

    def program(self) -> Program:
        """The whole step of this rank."""
        layout, begin = self.job.layout, self.time
        order = schedule(self.at.pp, layout.pp, layout.vpp, self.job.microbatches)
        sent: list[tuple[Communicator, int, int]] = []
        for position, (forward, microbatch, chunk) in enumerate(order):
            incoming = self.neighbours.source(forward, chunk)
            if incoming is not None:
                self.post(RecordKind.RECV_POST, incoming, (microbatch, chunk, forward), microbatch)
            yield from self.wait_sent(sent)
            if incoming is not None:
                yield from self.receive(incoming, (microbatch, chunk, forward), microbatch)
            elif forward:
                self.span(RecordKind.DATA, 1e-4, microbatch=microbatch)
            if forward:
                self.stall("host", 1.0)
            yield from self.compute(forward, microbatch, chunk, position)
            target = self.neighbours.target(forward, chunk)
            if target is not None:
                comm, other_chunk = target
                key = (microbatch, other_chunk, forward)
                sent.append((comm, self.post(RecordKind.SEND_POST, comm, key, microbatch), microbatch))
        yield from self.wait_sent(sent)
        yield from self.finish()
        self.rows.append(
            self.row(RecordKind.STEP, begin, self.time, aux=self.units(self.queued), flags=Flag.AUX_RUN_QUEUE)
        )

    def finish(self) -> Program:
        """Gradients, norm, optimizer, parameters."""
        layout, work = self.job.layout, self.job.forward_s
        data = _group(layout, self.rank, lambda c: (c.tp, c.pp), "dp")
        if len(data.members) > 1:
            yield from self.collective(RecordKind.GRAD_REDUCE, data, 0.2 * work)
        yield from self.collective(RecordKind.GRAD_NORM, Communicator("world", tuple(range(layout.world))), 0.02 * work)
        self.span(RecordKind.OPTIMIZER, 0.3 * work * self.durations.pace)
        if len(data.members) > 1:
            yield from self.collective(RecordKind.PARAM_GATHER, data, 0.2 * work)

    def stall(self, kind: str, scale: float) -> None:
        """The time an active fault of this kind adds, as a FAULT span."""
        for fault in self.faults:
            if fault.kind == kind:
                self.lead_s = 0.0 if kind == "host" else self.lead_s
                self.extra((fault.factor - 1) * self.job.forward_s * self.durations.weight * scale)

    def extra(self, seconds: float) -> None:
        self.rows.append(self.row(RecordKind.FAULT, self.time, self.time + seconds, flags=Flag.INJECTED))
        self.time += seconds

    def compute(self, forward: bool, microbatch: int, chunk: int, position: int) -> Program:
        """One compute span; with TP its members meet inside it after each quarter."""
        kind = RecordKind.FORWARD if forward else RecordKind.BACKWARD
        begin, work = self.time, self.durations.work_s(forward)
        factor = max([f.factor for f in self.faults if f.kind == "compute"], default=1.0)
        launch = self.durations.launch_s(forward) if self.noise.device else 0.0
        work = max(work, (launch - self.lead_s) / factor)
        if self.job.layout.tp > 1:
            at_end = self.job.tp_sleep_at_end
            for part in range(4):
                self.time += work / 4 * (1.0 if at_end else factor)
                if part < 3:
                    yield from self.meet(("tp", position, part))
            self.time += (self.time - begin) * (factor - 1) if at_end else 0.0
        else:
            self.time += work * factor
        self.lead_s = max(self.lead_s + self.time - begin - launch, 0.0)
        aux, flags = self.queue(), int(Flag.AUX_RUN_QUEUE)
        if self.noise.device:
            aux, flags = self.lead_s, Flag.DEVICE_CLOCK | Flag.AUX_LEAD
        self.rows.append(
            self.row(kind, begin, self.time, microbatch=microbatch, chunk=chunk, aux=self.units(aux), flags=flags)
        )

    def meet(self, what: Key) -> Program:
        """Wait for the tensor-parallel mates, without a record."""
        mates = tuple(r for r, c in enumerate(self.job.layout.coordinates) if (c.dp, c.pp) == (self.at.dp, self.at.pp))
        self.time = yield from self.gather((*what, mates), len(mates))

    def gather(self, key: Key, members: int) -> Generator[Key, float, float]:
        self.published.arrived[key].append(self.time)
        if len(self.published.arrived[key]) == members:
            self.published.times[key] = max(self.published.arrived[key])
        return (yield key)

    def queue(self) -> float:
        """A run-queue delay passes; returns what the record will attribute."""
        if self.rng.random() >= self.noise.queue_fraction:
            return 0.0
        delay = float(self.rng.exponential(self.noise.queue_s))
        self.time += delay
        seen = delay * float(self.rng.uniform(self.noise.queue_seen, 1.0))
        self.queued += seen
        return seen

    def gap(self) -> None:
        self.time += self.noise.gap_s * float(self.rng.uniform(0.5, 1.5))
        if self.rng.random() < self.noise.gap_fraction:
            self.time += float(self.rng.exponential(self.noise.gap_tail_s))

    def span(self, kind: RecordKind, seconds: float, microbatch: int = NO_MICROBATCH) -> None:
        self.gap()
        begin = self.time
        self.time += seconds
        queue = self.queue()
        self.rows.append(
            self.row(kind, begin, self.time, microbatch=microbatch, aux=self.units(queue), flags=Flag.AUX_RUN_QUEUE)
        )

    def post(self, kind: RecordKind, comm: Communicator, what: Key, microbatch: int) -> int:
        """Post a send or a receive; a send chooses the ordinal, its receiver looks it up when the data is there."""
        self.gap()
        begin = self.time
        self.time += 2e-5
        ordinal = self.ordinals[comm]
        self.ordinals[comm] += 1
        side = "send" if kind == RecordKind.SEND_POST else "recv"
        self.published.times[(side, comm, what)] = self.time
        self.published.times[(side + "-number", comm, ordinal)] = self.time
        self.published.arrived[("ordinal", comm, what)].append(ordinal)
        fields = {"comm": comm, "ordinal": ordinal, "microbatch": microbatch}
        self.rows.append(self.row(kind, begin, self.time, aux=4096, flags=Flag.AUX_BYTES, **fields))  # type: ignore[arg-type]
        return ordinal

    def wait_sent(self, sent: list[tuple[Communicator, int, int]]) -> Program:
        for comm, ordinal, microbatch in sent:
            begin = self.time
            if self.job.rendezvous and self.job.layout.vpp == 1:
                self.time = max(self.time, (yield ("recv-number", comm, ordinal)))
            self.time += 3e-5
            self.waited(RecordKind.SEND_WAIT, begin, comm, ordinal, microbatch)
        sent.clear()

    def waited(self, kind: RecordKind, begin: float, comm: Communicator, ordinal: int, microbatch: int) -> None:
        queue = self.units(self.queue())
        row = self.row(
            kind, begin, self.time, comm=comm, ordinal=ordinal, microbatch=microbatch, aux=queue,
            flags=Flag.AUX_RUN_QUEUE,
        )  # fmt: skip
        self.rows.append(row)

    def receive(self, comm: Communicator, what: Key, microbatch: int) -> Program:
        begin = self.time
        ready = yield ("send", comm, what)
        ordinal = int(self.published.arrived[("ordinal", comm, what)][0])
        self.time = max(self.time, ready + self.noise.delivery_s * float(self.rng.uniform(0.7, 1.3)))
        if self.rng.random() < self.noise.delivery_fraction:
            self.time += float(self.rng.exponential(self.noise.delivery_tail_s))
        for fault in self.faults:
            if fault.kind == "link" and fault.peer in (None, comm.members[0]):
                self.extra((fault.factor - 1) * self.job.forward_s * self.durations.weight)
        self.waited(RecordKind.RECV_WAIT, begin, comm, ordinal, microbatch)

    def collective(self, kind: RecordKind, comm: Communicator, seconds: float) -> Program:
        self.gap()
        begin = self.time
        last = yield from self.gather((kind, comm), len(comm.members))
        self.time = last + seconds * float(self.rng.uniform(0.9, 1.3))
        queue = self.queue()
        self.rows.append(self.row(kind, begin, self.time, comm=comm, aux=self.units(queue), flags=Flag.AUX_RUN_QUEUE))

    @staticmethod
    def units(seconds: float) -> int:
        return int(seconds * 1e9) // 8

    def row(
        self, kind: RecordKind, begin: float, end: float, *, comm: Communicator | None = None, ordinal: int = 0,
        aux: int = 0, microbatch: int = NO_MICROBATCH, chunk: int = 0, flags: int = 0,
    ) -> tuple[int, ...]:  # fmt: skip
        slot = NO_COMM if comm is None else self.sim.slot(self.rank, comm)
        return (self.sim.local_ns(self.rank, begin), int((end - begin) * 1e9) // 8, self.step, ordinal, aux, slot,
                microbatch, int(kind), chunk, 0, int(flags), self.rank)  # fmt: skip


def _group(layout: JobLayout, rank: int, same: Callable[..., object], kind: str) -> Communicator:
    mine = same(layout.coordinates[rank])
    return Communicator(kind, tuple(r for r, c in enumerate(layout.coordinates) if same(c) == mine))


def _tables(layout: JobLayout) -> tuple[dict[int, dict[int, Communicator]], dict[int, dict[Communicator, int]]]:
    """Communicator tables of all ranks: slots differ between ranks on purpose."""
    tables: dict[int, dict[int, Communicator]] = {}
    world = Communicator("world", tuple(range(layout.world)))
    for rank, at in enumerate(layout.coordinates):
        comms = [world, _group(layout, rank, lambda c: (c.tp, c.pp), "dp")]
        neighbours = {(at.pp + 1) % layout.pp, (at.pp - 1) % layout.pp} if layout.pp > 1 else set()
        for stage in sorted(neighbours):
            peer = layout.coordinates.index(dataclasses.replace(at, pp=stage))
            comms += [Communicator("p2p", (rank, peer)), Communicator("p2p", (peer, rank))]
        tables[rank] = {slot + rank % 3: comm for slot, comm in enumerate(comms)}
    return tables, {rank: {comm: slot for slot, comm in table.items()} for rank, table in tables.items()}
