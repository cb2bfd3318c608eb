"""Faults of a simulated job, and the text in which they are written.

A text has one fault per line or semicolon: a kind, a subject, and options `name=value`.

    compute rank=5 factor=1.05 from=40              all passes of rank 5 take 1.05 times as long, from step 40 on
    compute node=2 factor=1.3 from=40 steps=60      of all ranks of a node, for 60 steps; also worker=, stage=
    compute job=0 factor=1.2 from=40                of all ranks: a regression of the whole job
    compute rank=5 slope=0.0005 factor=1.3 from=0   0.05 % more in each step, until the factor is reached
    compute rank=5 factor=1.2 from=30 period=20 on=7  active in the first 7 of every 20 steps
    compute rank=5 factor=1.3 optimizer=1.3 from=40  its optimizer, too, as where processes take turns on a device
    memory rank=5 factor=2 from=40                  what waits for its memory takes twice as long: its optimizer, and
                                                    a third of each pass
    tokens replica=1 factor=1.4 from=40             a replica gets 1.4 times as many tokens; its work grows with them
    collective rank=3 tensor=2 from=40              transfers inside the passes of its tensor-parallel unit take twice
                                                    as long; data=2: those between replicas, of gradients and weights
    host rank=3 stall=0.4 from=40                   before each forward pass a stall of 0.4 forward passes
    data rank=3 wait=0.5 from=40                    its loader is late with each batch, by half of a forward pass
    stop rank=3 duty=0.5 cycle=0.1 from=40          stopped for half of every 0.1 s, then continued
    collect rank=3 duty=0.5 cycle=0.3 from=40       collects garbage for half of every 0.3 s
    hang rank=3 stopped=1 from=40                   no progress from step 40 on: stopped, or (=0) inside a pass
    link source=3 target=7 delay=0.5 from=40        each message arrives later by half a forward pass; target= or
                                                    source= alone: all messages to, or from, that rank

`from=0` is a subject that is slow from the start. Several faults may be active at once.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from detect.layout import DATA_SLOT, Grid
from detect.protocol import NamedSubject

Floats = NDArray[np.float64]
FOREVER = 1 << 30
NOTICEABLE = 1.03
"""Factor at which a ramp begins to matter: delays are counted from there."""
CAUSES = {
    "compute": "compute",
    "memory": "memory",
    "tokens": "data-imbalance",
    "host": "host",
    "data": "data",
    "stop": "host",
    "collect": "host",
    "hang": "hang",
    "link": "link",
    "collective": "link",
}
"""Right cause of each kind; links within a node have another one."""
MEMORY_PART = 1 / 3
"""Part of a pass that waits for memory."""
_SUBJECTS = ("rank", "worker", "node", "stage", "job")
_OPTIONS = {
    "compute": {"factor", "slope", "optimizer"},
    "memory": {"factor"},
    "tokens": {"replica", "factor"},
    "collective": {"tensor", "data"},
    "host": {"stall"},
    "data": {"wait"},
    "stop": {"duty", "cycle"},
    "collect": {"duty", "cycle"},
    "hang": {"stopped"},
    "link": {"source", "target", "delay"},
}
_REQUIRED = {
    "compute": ("factor",),
    "memory": ("factor",),
    "tokens": ("factor",),
    "collective": ("tensor", "data"),
    "host": ("stall",),
    "data": ("wait",),
    "stop": ("duty",),
    "collect": ("duty",),
    "hang": ("stopped",),
    "link": ("delay",),
}
_COMMON = {"from", "steps", "period", "on"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """One fault. Which sizes matter depends on its kind."""

    kind: str
    ranks: tuple[int, ...]
    """Ranks at fault; of a link source and destination, or the one that is at fault alone."""
    sends: bool = False
    """True if all messages from the rank are late, and not those to it."""
    begin: int = 0
    steps: int = FOREVER
    factor: float = 1.0
    slope: float = 0.0
    stall: float = 0.0
    wait: float = 0.0
    duty: float = 0.0
    cycle_s: float = 0.1
    delay: float = 0.0
    optimizer: float = 1.0
    """Factor on the optimizer."""
    tensor: float = 1.0
    data: float = 1.0
    """Factors on the transfers of a tensor-parallel unit, and between replicas."""
    within_node: bool = False
    """True for links between ranks of one node."""
    stopped: bool = False
    """True if the process of a rank that hangs is stopped."""
    period: int = 0
    on: int = 0

    @property
    def subject(self) -> NamedSubject:
        return NamedSubject(self.ranks, is_link=self.kind == "link" and len(self.ranks) == 2)

    is_job: bool = False
    """True if all ranks become slow together."""

    @property
    def cause(self) -> str:
        if self.is_job:
            return "regression"
        return "nvlink-pcie" if self.within_node else CAUSES[self.kind]

    @property
    def noticeable_from(self) -> int:
        """First step in which the fault has a size worth naming: of a ramp not its first."""
        if not self.slope:
            return self.begin
        return self.begin + int(np.ceil((min(NOTICEABLE, self.factor) - 1.0) / self.slope - 1e-6)) - 1

    def active(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each step whether the fault is active in it."""
        since = steps - self.begin
        on: NDArray[np.bool_] = (since >= 0) & (since < self.steps)
        return on & (since % self.period < self.on) if self.period else on

    def size(self, steps: NDArray[np.int64]) -> Floats:
        """Return the factor on compute in each step; 1 where the fault is not active."""
        grown = 1.0 + self.slope * (steps - self.begin + 1) if self.slope else np.full(len(steps), self.factor)
        out: Floats = np.where(self.active(steps), np.minimum(grown, self.factor), 1.0)
        return out


def parse(text: str, grid: Grid) -> tuple[SimulatedFault, ...]:
    """Read faults written as described above. Raises ValueError that names the part of the text that is wrong."""
    lines = [line.strip() for line in text.replace(";", "\n").splitlines()]
    return tuple(_parse_line(line, grid) for line in lines if line)


def _parse_line(line: str, grid: Grid) -> SimulatedFault:
    kind, *options = line.split()
    if kind not in _OPTIONS:
        raise ValueError(f"'{kind}' in '{line}' is no kind of fault; write one of {', '.join(_OPTIONS)}")
    values: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        known = _COMMON | _OPTIONS[kind] | (set() if kind in {"link", "tokens"} else set(_SUBJECTS))
        if not equals or name not in known:
            raise ValueError(f"'{option}' in '{line}' is no option of {kind}; write {', '.join(sorted(known))}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"'{option}' in '{line}': {value} is not a number") from None
    if not any(name in values for name in _REQUIRED[kind]):
        raise ValueError(f"'{line}' has no {'= or '.join(_REQUIRED[kind])}=; say how large the fault is")
    ranks = _ranks(line, kind, values, grid)
    return SimulatedFault(
        kind=kind,
        ranks=ranks,
        within_node=kind in {"link", "collective"} and _is_within_node(grid, ranks),
        optimizer=values.get("optimizer", 1.0),
        tensor=values.get("tensor", 1.0),
        data=values.get("data", 1.0),
        is_job="job" in values,
        sends=kind == "link" and "target" not in values,
        begin=int(values.get("from", 0)),
        steps=int(values.get("steps", FOREVER)),
        factor=values.get("factor", 1.0),
        slope=values.get("slope", 0.0),
        stall=values.get("stall", 0.0),
        wait=values.get("wait", 0.0),
        duty=values.get("duty", 0.0),
        cycle_s=values.get("cycle", 0.1),
        delay=values.get("delay", 0.0),
        stopped=bool(values.get("stopped", 0)),
        period=int(values.get("period", 0)),
        on=int(values.get("on", 0)),
    )


def _ranks(line: str, kind: str, values: dict[str, float], grid: Grid) -> tuple[int, ...]:
    if kind == "link":
        ends = [int(values[name]) for name in ("source", "target") if name in values]
        if not ends or any(not 0 <= rank < grid.world for rank in ends):
            raise ValueError(f"'{line}' needs target=, source= or both, ranks of a job of {grid.world}")
        if len(ends) == 2 and not _exchange(grid, *ends):
            raise ValueError(f"'{line}': ranks {ends[0]} and {ends[1]} exchange no messages; write neighbour stages")
        return tuple(ends)
    if kind == "tokens":
        return _replica(line, values, grid)
    named = [name for name in _SUBJECTS if name in values]
    if len(named) != 1:
        raise ValueError(f"'{line}' names {len(named)} subjects; write exactly one of {', '.join(_SUBJECTS)}")
    ranks = grid.ranks_of(named[0], int(values[named[0]]))
    if kind == "data" and any(grid.stage_of(rank) for rank in ranks):
        raise ValueError(f"'{line}': only the first stage loads data; write one of the ranks below {grid.stage_size}")
    if kind == "collective":
        return grid.unit(ranks[0]) if "tensor" in values else grid.comms[ranks[0]][DATA_SLOT][1]
    return ranks


def _replica(line: str, values: dict[str, float], grid: Grid) -> tuple[int, ...]:
    replica = int(values.get("replica", -1))
    if not 0 <= replica < grid.dp:
        raise ValueError(f"'{line}' needs replica=, one of the {grid.dp} replicas of the job, from 0 on")
    return tuple(grid.rank(stage, replica, tensor) for stage in range(grid.pp) for tensor in range(grid.tp))


def _is_within_node(grid: Grid, ranks: tuple[int, ...]) -> bool:
    """Return whether links between ranks, or all those of one rank, are within a node."""
    ends = [*ranks, *(rank for rank in range(grid.world) if len(ranks) == 1 and _exchange(grid, ranks[0], rank))]
    return len({int(grid.node_of[rank]) for rank in ends}) == 1


def _exchange(grid: Grid, source: int, target: int) -> bool:
    apart = abs(grid.stage_of(source) - grid.stage_of(target))
    around = grid.vpp > 1 and apart == grid.pp - 1
    return source % grid.stage_size == target % grid.stage_size and (apart == 1 or around)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effects:
    """All faults of a job in a block of steps: arrays [step, rank]; delays in forward passes."""

    factor: Floats
    optimizer: Floats
    """Factor on the optimizer."""
    tokens: Floats
    tensor: Floats
    data: Floats
    """Factors on tokens, and on transfers of tensor-parallel units and between replicas."""
    stall: Floats
    wait: Floats
    duty: Floats
    cycle_s: Floats
    collects: NDArray[np.bool_]
    """True for ranks that collect garbage in this part of a cycle; the others are stopped."""
    delays: tuple[tuple[int | None, int | None, Floats], ...]
    """(source or None for every one, destination or None for every one, delay in each step)."""

    @property
    def stops(self) -> bool:
        return bool(self.duty.any())


def effects(faults: tuple[SimulatedFault, ...], steps: NDArray[np.int64], world: int) -> Effects:
    """Add up faults: factors multiply, stalls add, of several duties the largest counts."""
    shape = (len(steps), world)
    stall, wait, duty = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    factor, optimizer, tokens, tensor, data = (np.ones(shape) for _ in range(5))
    cycle, collects = np.full(shape, 0.1), np.zeros(shape, np.bool_)
    delays: list[tuple[int | None, int | None, Floats]] = []
    for fault in faults:
        on, where = fault.active(steps)[:, None], list(fault.ranks)
        if fault.kind == "compute":
            factor[:, where] *= fault.size(steps)[:, None]
            optimizer[:, where] *= np.where(on, fault.optimizer, 1.0)
        elif fault.kind == "memory":
            factor[:, where] *= 1.0 + MEMORY_PART * (fault.size(steps)[:, None] - 1.0)
            optimizer[:, where] *= fault.size(steps)[:, None]
        elif fault.kind == "tokens":
            tokens[:, where] *= fault.size(steps)[:, None]
        elif fault.kind == "collective":
            tensor[:, where] *= np.where(on, fault.tensor, 1.0)
            data[:, where] *= np.where(on, fault.data, 1.0)
        elif fault.kind == "host":
            stall[:, where] += np.where(on, fault.stall, 0.0)
        elif fault.kind == "data":
            wait[:, where] += np.where(on, fault.wait, 0.0)
        elif fault.kind in {"stop", "collect"}:
            duty[:, where] = np.maximum(duty[:, where], np.where(on, fault.duty, 0.0))
            cycle[:, where] = fault.cycle_s
            collects[:, where] = fault.kind == "collect"
        elif fault.kind == "link":
            source = fault.ranks[0] if len(fault.ranks) == 2 or fault.sends else None
            destination = None if fault.sends else fault.ranks[-1]
            delays.append((source, destination, np.where(on[:, 0], fault.delay, 0.0)))
    return Effects(
        factor=factor,
        optimizer=optimizer,
        tokens=tokens,
        tensor=tensor,
        data=data,
        stall=stall,
        wait=wait,
        duty=duty,
        cycle_s=cycle,
        collects=collects,
        delays=tuple(delays),
    )
