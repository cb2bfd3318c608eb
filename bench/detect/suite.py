"""The cases of the benchmark: rows of windows, drawn from seeds.

Seeds of published tables are PUBLISHED and above; detectors are tuned with lower ones, so that no threshold is
fitted to the windows that judge it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from detect import noise as nz
from detect.faults import SimulatedFault, parse
from detect.layout import Grid
from detect.simulation import Events, SimulatedJob

PUBLISHED = 1_000_000
"""First seed of published tables."""
LAYOUTS = {
    "dp8": Grid(dp=8, ranks_per_worker=4, ranks_per_node=4),
    "dp4-pp2": Grid(dp=4, pp=2, ranks_per_worker=4, ranks_per_node=4),
    "dp4-pp4": Grid(dp=4, pp=4, ranks_per_worker=4, ranks_per_node=4),
    "dp2-pp4": Grid(dp=2, pp=4, ranks_per_worker=2, ranks_per_node=2),
    "dp4-pp2-tp2": Grid(dp=4, pp=2, tp=2, ranks_per_worker=8, ranks_per_node=8),
    "dp8-pp8": Grid(dp=8, pp=8, ranks_per_worker=8, ranks_per_node=8),
    "dp4-pp4-vpp2": Grid(dp=4, pp=4, vpp=2, ranks_per_worker=4, ranks_per_node=4),
    "node: dp2-pp4": Grid(dp=2, pp=4),
    "node: dp2-pp2-tp2": Grid(dp=2, pp=2, tp=2),
    "nodes: dp4-tp4": Grid(dp=4, tp=4),
    "node: dp2": Grid(dp=2),
    "dp4": Grid(dp=4, ranks_per_worker=2, ranks_per_node=2),
    "dp2-pp2": Grid(dp=2, pp=2, ranks_per_worker=2, ranks_per_node=2),
    "1k": Grid(dp=16, pp=8, tp=8),
    "16k": Grid(dp=128, pp=16, tp=8),
}
SMALL = ("dp8", "dp4-pp2", "dp4-pp4", "dp2-pp4", "dp4-pp2-tp2", "dp8-pp8", "dp4-pp4-vpp2")
"""Layouts of the main table."""
STEPS = 120
STREAM_STEPS = 3600
STREAM_FORWARD_S = 1.5
"""Forward pass of long healthy jobs: with 4 microbatches a step takes 18 s, in two stages 22 s."""
Draw = Callable[[Grid, np.random.Generator], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: how its windows are drawn. `faults` returns text in the grammar of faults."""

    name: str
    faults: Draw | None = None
    noise: str = "gpu"
    steps: int = STEPS
    layouts: tuple[str, ...] = SMALL
    events: Callable[[np.random.Generator], Events] = lambda rng: Events()
    forward_s: float = 20e-3
    microbatches: tuple[int, ...] = (8, 16)
    spread: float = 0.03
    """By how much the work of stages differs from their mean, at most."""
    lost: float = 0.0
    clock_offset_s: float = 0.0
    clock_drift_ppm: float = 0.0
    stops_devices: bool = False
    reports_work: bool = False
    work_part: float = 1.0
    transfer_part: float = 0.0
    overlaps_reductions: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionCase:
    """One window: a job, its seed, and the row it belongs to."""

    row: str
    layout: str
    job: SimulatedJob
    seed: int
    steps: int
    faults: tuple[SimulatedFault, ...]


def draw(row: Row, seed: int, layouts: tuple[str, ...] = ()) -> DetectionCase:
    """Draw the window of a row that belongs to a seed, on one of `layouts` if they are given."""
    rng = np.random.default_rng((seed, *row.name.encode()))
    layout = str(rng.choice(layouts or row.layouts))
    grid = LAYOUTS[layout]
    faults = parse(row.faults(grid, rng), grid) if row.faults else ()
    weights = tuple(rng.uniform(1 - row.spread, 1 + row.spread, grid.pp).tolist())
    job = SimulatedJob(
        grid=grid,
        noise=NOISES[row.noise],
        microbatches=int(rng.choice(row.microbatches)),
        forward_s=row.forward_s,
        stage_weight=weights,
        faults=faults,
        events=row.events(rng),
        lost_fraction=row.lost,
        clock_offset_s=row.clock_offset_s,
        clock_drift_ppm=row.clock_drift_ppm,
        stops_devices=row.stops_devices,
        reports_work=row.reports_work,
        work_part=row.work_part,
        transfer_part=row.transfer_part,
        overlaps_reductions=row.overlaps_reductions,
    )
    return DetectionCase(row=row.name, layout=layout, job=job, seed=seed, steps=row.steps, faults=faults)


NOISES = {"gpu": nz.GPU, "cpu": nz.CPU}


def _begin(rng: np.random.Generator) -> int:
    return int(rng.integers(30, 60))


def compute(low: float, high: float, subject: str = "rank") -> Draw:
    """Return a draw of slow compute of one subject, evenly in the logarithm of the factor."""

    def text(grid: Grid, rng: np.random.Generator) -> str:
        factor = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        return f"compute {_subject(subject, grid, rng)} factor={factor:.4f} from={_begin(rng)}"

    return text


def _subject(kind: str, grid: Grid, rng: np.random.Generator) -> str:
    sizes = {"rank": 1, "worker": grid.ranks_per_worker, "node": grid.ranks_per_node, "stage": grid.stage_size}
    return f"{kind}={int(rng.integers(max(grid.world // sizes[kind], 1)))}"


def regression(grid: Grid, rng: np.random.Generator) -> str:
    return f"compute job=0 factor={rng.uniform(1.15, 2.0):.3f} from={_begin(rng)}"


def from_start(grid: Grid, rng: np.random.Generator) -> str:
    return f"compute {_subject('rank', grid, rng)} factor={rng.uniform(1.05, 1.3):.4f} from=0"


def ramp(grid: Grid, rng: np.random.Generator) -> str:
    slope = float(np.exp(rng.uniform(np.log(2e-4), np.log(1e-3))))
    return f"compute {_subject('rank', grid, rng)} slope={slope:.6f} factor=1.3 from={_begin(rng)}"


def periodic(grid: Grid, rng: np.random.Generator) -> str:
    on = int(rng.integers(7, 14))
    return (
        f"compute {_subject('rank', grid, rng)} factor={rng.uniform(1.1, 2):.3f} from={_begin(rng)} period=20 on={on}"
    )


def stall(grid: Grid, rng: np.random.Generator) -> str:
    return f"host {_subject('rank', grid, rng)} stall={rng.uniform(0.6, 2.0):.3f} from={_begin(rng)}"


def data(grid: Grid, rng: np.random.Generator) -> str:
    rank = int(rng.integers(grid.stage_size))
    return f"data rank={rank} wait={rng.uniform(0.3, 1.5):.3f} from={_begin(rng)}"


def stop(grid: Grid, rng: np.random.Generator) -> str:
    duty, cycle = rng.uniform(0.2, 0.6), rng.choice([0.05, 0.1, 0.5])
    return f"stop {_subject('rank', grid, rng)} duty={duty:.3f} cycle={cycle} from={_begin(rng)}"


def collect(grid: Grid, rng: np.random.Generator) -> str:
    duty, cycle = rng.uniform(0.2, 0.6), rng.choice([0.1, 0.3, 1.0])
    return f"collect {_subject('rank', grid, rng)} duty={duty:.3f} cycle={cycle} from={_begin(rng)}"


def stop_worker(grid: Grid, rng: np.random.Generator) -> str:
    return f"stop {_subject('worker', grid, rng)} duty={rng.uniform(0.2, 0.6):.3f} cycle=0.1 from={_begin(rng)}"


def hang(grid: Grid, rng: np.random.Generator) -> str:
    return f"hang {_subject('rank', grid, rng)} stopped={int(rng.integers(2))} from={_begin(rng)}"


def link(grid: Grid, rng: np.random.Generator) -> str:
    place, source = int(rng.integers(grid.stage_size)), int(rng.integers(grid.pp))
    near = [stage for stage in (source - 1, source + 1) if 0 <= stage < grid.pp]
    target = int(rng.choice(near))
    ends = f"source={source * grid.stage_size + place} target={target * grid.stage_size + place}"
    return f"link {ends} delay={rng.uniform(0.3, 1.5):.3f} from={_begin(rng)}"


def network(grid: Grid, rng: np.random.Generator) -> str:
    """Return a rank in the middle of the pipeline, all of whose messages in one direction are late."""
    rank = int(rng.integers(grid.stage_size, grid.world - grid.stage_size))
    return f"link {rng.choice(['source', 'target'])}={rank} delay={rng.uniform(0.3, 1.5):.3f} from={_begin(rng)}"


def memory(grid: Grid, rng: np.random.Generator) -> str:
    return f"memory {_subject('rank', grid, rng)} factor={rng.uniform(1.2, 3.0):.3f} from={_begin(rng)}"


def shared_device(grid: Grid, rng: np.random.Generator) -> str:
    factor = f"{rng.uniform(1.1, 2.0):.3f}"
    return f"compute {_subject('rank', grid, rng)} factor={factor} optimizer={factor} from={_begin(rng)}"


def tokens(grid: Grid, rng: np.random.Generator) -> str:
    return f"tokens replica={rng.integers(grid.dp)} factor={rng.uniform(1.05, 1.6):.3f} from={_begin(rng)}"


def collective(option: str, low: float, high: float) -> Draw:
    """Return a draw of slow transfers of a tensor-parallel unit (`tensor`), or between replicas (`data`)."""

    def text(grid: Grid, rng: np.random.Generator) -> str:
        return f"collective {_subject('rank', grid, rng)} {option}={rng.uniform(low, high):.3f} from={_begin(rng)}"

    return text


def several(grid: Grid, rng: np.random.Generator) -> str:
    """Two to five faults of different ranks, each begun at its own step."""
    count = int(rng.integers(2, 6))
    ranks = rng.permutation(grid.world)[:count].tolist()
    lines = []
    for rank in ranks:
        kind = str(rng.choice(["compute", "host"]))
        size = f"factor={rng.uniform(1.1, 1.6):.3f}" if kind == "compute" else f"stall={rng.uniform(0.8, 2.0):.3f}"
        lines.append(f"{kind} rank={rank} {size} from={_begin(rng)}")
    return "; ".join(lines)


def eventful(rng: np.random.Generator) -> Events:
    """Evaluations, checkpoints, a batch that grows, and devices that become warm."""
    return Events(
        warmup_steps=int(rng.integers(20, 60)),
        warmup_drift=float(rng.uniform(0.0, 0.03)),
        evaluate_every=int(rng.integers(20, 40)),
        checkpoint_every=int(rng.integers(20, 40)),
        ramp_up=((int(rng.integers(30, 60)), 16), (int(rng.integers(60, 90)), 24)),
    )


def uneven(rng: np.random.Generator) -> Events:
    return Events(uneven=float(rng.uniform(0.05, 0.3)))


def stream(name: str, events: Callable[[np.random.Generator], Events]) -> Row:
    """Return a row of long healthy jobs: 4 ranks, 3,600 steps of about 20 s, so that a window is about 20 hours."""
    return Row(
        name=name,
        events=events,
        steps=STREAM_STEPS,
        layouts=("dp4", "dp2-pp2"),
        forward_s=STREAM_FORWARD_S,
        microbatches=(4,),
    )


PIPELINES = tuple(name for name in SMALL if LAYOUTS[name].pp > 1)
DEEP = tuple(name for name in PIPELINES if LAYOUTS[name].pp > 2 and LAYOUTS[name].vpp == 1)
TENSOR = ("node: dp2-pp2-tp2", "dp4-pp2-tp2", "nodes: dp4-tp4")
REPLICAS = ("dp8", "node: dp2-pp4", "node: dp2-pp2-tp2")
OVERLAPPED = ("node: dp2", "dp8", "dp4-pp2", "node: dp2-pp2-tp2", "nodes: dp4-tp4")
CPU_LAYOUTS = ("dp4-pp2", "dp2-pp4")
ROWS = {
    row.name: row
    for row in (
        Row(name="compute 10 % to 3x", faults=compute(1.10, 3.0)),
        Row(name="compute 5 to 10 %", faults=compute(1.05, 1.10)),
        Row(name="compute 3 %", faults=compute(1.03, 1.03)),
        Row(name="compute 2 %", faults=compute(1.02, 1.02), steps=240),
        Row(name="node 5 % to 2x", faults=compute(1.05, 2.0, "node")),
        Row(name="stage 5 % to 2x", faults=compute(1.05, 2.0, "stage"), layouts=PIPELINES),
        Row(name="all ranks 15 % to 2x", faults=regression),
        Row(name="slow from the start", faults=from_start),
        Row(name="ramp", faults=ramp, steps=400),
        Row(name="periodic", faults=periodic),
        Row(name="uneven stages", faults=compute(1.05, 3.0), spread=0.25, layouts=PIPELINES),
        Row(name="host stalls", faults=stall),
        Row(name="slow data loader", faults=data),
        Row(name="stopped and continued", faults=stop),
        Row(name="stopped devices", faults=stop, stops_devices=True),
        Row(name="stopped worker", faults=stop_worker, stops_devices=True, layouts=PIPELINES),
        Row(name="garbage collections", faults=collect),
        Row(name="hang", faults=hang),
        Row(name="slow link", faults=link, layouts=PIPELINES),
        Row(name="slow network of a rank", faults=network, layouts=DEEP),
        Row(name="link in a node", faults=link, layouts=("node: dp2-pp4",)),
        Row(name="tensor-parallel links", faults=collective("tensor", 1.5, 4), layouts=TENSOR, transfer_part=0.2),
        Row(name="links between replicas", faults=collective("data", 5, 15), layouts=REPLICAS),
        Row(name="more tokens", faults=tokens, reports_work=True, work_part=0.8),
        Row(name="more tokens and uneven work", faults=tokens, events=uneven, reports_work=True, work_part=0.8),
        Row(
            name="compute and reported work", faults=compute(1.05, 3.0), events=uneven, reports_work=True, work_part=0.8
        ),
        Row(
            name="overlapped reductions",
            faults=compute(1.05, 3.0),
            layouts=OVERLAPPED,
            microbatches=(1, 2, 4, 8),
            overlaps_reductions=True,
        ),
        Row(name="busy memory", faults=memory),
        Row(name="shared device", faults=shared_device),
        Row(name="2 to 5 faults", faults=several),
        Row(name="20 % lost records", faults=compute(1.05, 3.0), lost=0.2),
        Row(name="clocks 5 ms and 20 ppm", faults=compute(1.05, 3.0), clock_offset_s=5e-3, clock_drift_ppm=20),
        Row(name="uneven work", faults=compute(1.05, 3.0), events=uneven),
        Row(name="cpu: compute 1.5 to 3x", faults=compute(1.5, 3.0), noise="cpu", layouts=CPU_LAYOUTS),
        Row(name="cpu: stopped and continued", faults=stop, noise="cpu", layouts=CPU_LAYOUTS),
        Row(name="cpu: garbage collections", faults=collect, noise="cpu", layouts=CPU_LAYOUTS),
        Row(name="cpu: slow link", faults=link, noise="cpu", layouts=CPU_LAYOUTS),
        Row(name="healthy"),
        Row(name="healthy: uneven stages", spread=0.25, layouts=PIPELINES),
        Row(name="healthy: eventful", events=eventful),
        Row(name="healthy: uneven work", events=uneven),
        Row(
            name="healthy: overlapped reductions",
            layouts=OVERLAPPED,
            microbatches=(1, 2, 4, 8),
            overlaps_reductions=True,
        ),
        Row(name="healthy: transfers", layouts=TENSOR, transfer_part=0.2),
        Row(name="healthy: reported work", events=uneven, reports_work=True, work_part=0.8),
        Row(name="healthy: clocks", clock_offset_s=5e-3, clock_drift_ppm=20),
        Row(name="healthy: 20 % lost records", lost=0.2),
        Row(name="healthy: cpu", noise="cpu", layouts=CPU_LAYOUTS),
        Row(name="1024 ranks", faults=compute(1.05, 2.0), layouts=("1k",), microbatches=(8,)),
        Row(name="1024 ranks: healthy", layouts=("1k",), microbatches=(8,)),
        stream("stream", lambda rng: Events()),
        stream("stream: variable lengths", uneven),
        stream("stream: eventful", lambda rng: dataclasses.replace(eventful(rng), ramp_up=((40, 5), (80, 6)))),
    )
}
LARGE = tuple(name for name, row in ROWS.items() if row.layouts == ("1k",))
ROW_GROUPS = {
    "@faults": tuple(name for name, row in ROWS.items() if row.faults is not None and name not in LARGE),
    "@healthy": tuple(
        name for name, row in ROWS.items() if row.faults is None and row.steps < STREAM_STEPS and name not in LARGE
    ),
    "@large": LARGE,
    "@streams": tuple(name for name, row in ROWS.items() if row.steps == STREAM_STEPS),
}
"""Rows of which all windows have a fault, of which none has, of 1,024 ranks, and long healthy jobs."""
TABLE_WINDOWS = {
    **dict.fromkeys(ROW_GROUPS["@faults"], 70),
    "compute 3 %": 120,
    "2 to 5 faults": 200,
    **dict.fromkeys(ROW_GROUPS["@healthy"], 1000),
    **dict.fromkeys(LARGE, 10),
}
"""Windows of each row of the published table: 2,100 with a fault of 5 % and more, and 10,000 healthy ones."""
