"""The simulation of the detector benchmark: its grammar of faults, its times, and that it is independent."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

import detect
import numpy as np
import pytest
from detect import schedule
from detect.faults import parse
from detect.layout import Grid
from detect.noise import CPU, GPU, QUIET, Recording, autocorrelated, paces, resampled, span_factors
from detect.protocol import NamedSubject
from detect.runner import DETECTORS, run
from detect.score import Window, score
from detect.simulation import Events, JobSimulation, SimulatedJob
from detect.suite import LAYOUTS, ROWS, DetectionCase, draw

from megatronapp_common.trace import RecordKind

PACKAGE = pathlib.Path(next(iter(detect.__path__)))
PIPELINE = Grid(dp=2, pp=4, ranks_per_worker=2, ranks_per_node=2)


def imported_modules(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_hang_ends_the_steps_and_is_named_within_seconds(stopped: int) -> None:
    faults = parse(f"hang rank=3 stopped={stopped} from=12", PIPELINE)
    job = SimulatedJob(grid=PIPELINE, noise=GPU, microbatches=4, faults=faults)
    case = DetectionCase(row="hang", layout="dp2-pp4", job=job, seed=1, steps=60, faults=faults)
    window = run(case, ["ours", "plain MAD"]).windows["ours"]
    assert min(window.named) >= 12
    total = score([window])
    assert (total.hits, total.false, set(total.causes)) == (1, 0, {("hang", "hang")})
    assert total.delays[0] <= 20


def test_only_the_adapter_imports_the_analyzer() -> None:
    users = {
        path.name
        for path in PACKAGE.glob("*.py")
        for name in imported_modules(path)
        if name.startswith(("megatronapp_analyzer", "pipeline_simulator"))
    }
    assert users == {"current.py"}


def test_faults_are_read_from_text() -> None:
    first, second = parse("compute node=1 factor=1.3 from=40 steps=60; link source=0 target=2 delay=0.5", PIPELINE)
    assert (first.subject, first.begin, first.steps, first.factor) == (NamedSubject((2, 3)), 40, 60, 1.3)
    assert second.subject == NamedSubject((0, 2), is_link=True)


@pytest.mark.parametrize(
    ("grid", "cause"),
    [(Grid(dp=2, pp=4, ranks_per_worker=2, ranks_per_node=2), "link"), (Grid(dp=2, pp=4), "nvlink-pcie")],
    ids=["a node of each stage", "a single node"],
)
def test_the_network_of_a_rank_is_within_a_node_if_its_neighbours_are(grid: Grid, cause: str) -> None:
    (fault,) = parse("link source=2 delay=0.5", grid)
    assert fault.ranks == (2,)
    assert fault.cause == cause


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow rank=1", "no kind of fault; write one of compute"),
        ("compute rank=1", "has no factor="),
        ("compute factor=2", "names 0 subjects"),
        ("compute rank=9 factor=2", "not in a job of 8 ranks"),
        ("compute rank=1 factor=2 speed=3", "'speed=3'"),
        ("host rank=1 stall=high", "high is not a number"),
        ("link source=0 target=4 delay=1", "exchange no messages"),
        ("data rank=2 wait=1", "only the first stage loads data; write one of the ranks below 2"),
    ],
)
def test_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text, PIPELINE)


def test_ramps_and_periods() -> None:
    ramp, pulse = parse("compute rank=0 slope=0.01 factor=1.3 from=5; compute rank=0 factor=2 period=4 on=1", PIPELINE)
    assert ramp.size(np.array([4, 5, 6, 100])) == pytest.approx([1.0, 1.01, 1.02, 1.3])
    assert ramp.noticeable_from == 7
    assert pulse.size(np.arange(6)).tolist() == [2.0, 1.0, 1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (4, 2), (2, 3)])
def test_every_pass_runs_once_and_feeds_another(stages: int, chunks: int) -> None:
    orders = {stage: schedule.passes(stage, stages, chunks, 8) for stage in range(stages)}
    sent = {schedule.target(task, stage, stages, chunks) for stage, order in orders.items() for task in order} - {None}
    received = {
        (stage, task)
        for stage, order in orders.items()
        for task in order
        if schedule.source(task, stage, stages, chunks) is not None
    }
    assert all(len(set(order)) == len(order) == 16 * chunks for order in orders.values())
    assert sent == received


def lengths(grid: Grid, faults: str = "", **job: object) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    made = SimulatedJob(grid=grid, microbatches=8, faults=parse(faults, grid), **{"noise": QUIET, **job})  # type: ignore[arg-type]
    return JobSimulation(made, 3, 12).step_lengths_s()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_step_of_1f1b_lasts_as_long_as_its_formula(stages: int) -> None:
    """Without noise: (microbatches + stages - 1) times forward and backward, and what is posted and reduced."""
    expected = (8 + stages - 1) * 3 * 20e-3
    assert lengths(Grid(pp=stages))[1:] == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    ("faults", "added_s"),
    [
        ("compute stage=1 factor=1.5", 8 * 3 * 20e-3 * 0.5),
        ("host rank=2 stall=0.5", 8 * 0.5 * 20e-3),
        ("link source=0 target=2 delay=0.5", 8 * 0.5 * 20e-3),
        ("stop rank=2 duty=0.5 cycle=0.01", 8 * 3 * 20e-3),
    ],
)
def test_costs_of_faults_are_those_of_their_text(faults: str, added_s: float) -> None:
    grid = Grid(dp=2, pp=2)
    added = lengths(grid, faults) - lengths(grid)
    assert added[1:].mean() == pytest.approx(added_s, rel=0.15)


def test_uneven_ends_of_a_step_are_carried_into_the_next() -> None:
    grid = Grid(dp=2)
    once = JobSimulation(SimulatedJob(grid=grid, noise=GPU), 3, 9).step_lengths_s()
    grown = Events(ramp_up=((5, 9),))
    blocks = JobSimulation(SimulatedJob(grid=grid, noise=GPU, events=grown), 3, 9).step_lengths_s()
    assert once[:5] == pytest.approx(blocks[:5], rel=0.05)
    assert (blocks[5:] > once[5:] * 1.05).all()


@pytest.mark.parametrize("name", ["dp4-pp2-tp2", "dp4-pp4-vpp2"])
def test_records_of_a_step_match_each_other(name: str) -> None:
    """Every rank has ordered spans; sends and receives of a directed pair have the same ordinals and microbatches."""
    grid = LAYOUTS[name]
    job = SimulatedJob(grid=grid, noise=GPU, events=Events(evaluate_every=2))
    first, second = JobSimulation(job, 3, 2).traces()
    starts = np.diff(first.records["start_ns"].astype(np.int64))
    assert (starts[np.diff(first.records["rank"]) == 0] >= 0).all()
    assert (np.diff(first.records["rank"]) >= 0).all()
    ends: dict[RecordKind, list[tuple[object, ...]]] = {}
    for kind in (RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT):
        chosen = first.records[first.records["kind"] == kind]
        ends[kind] = sorted(
            (*grid.comms[int(row["rank"])][int(row["comm"])][1], int(row["ordinal"]), int(row["microbatch"]))
            for row in chosen
        )
    assert ends[RecordKind.SEND_POST] == ends[RecordKind.SEND_WAIT] == ends[RecordKind.RECV_POST]
    assert ends[RecordKind.SEND_POST] == ends[RecordKind.RECV_WAIT]
    assert (first.records["kind"] == RecordKind.EVALUATE).sum() == 0
    assert (second.records["kind"] == RecordKind.EVALUATE).sum() == grid.world


def test_noise_remembers_and_recorded_blocks_stay_whole() -> None:
    rng = np.random.default_rng(1)
    slow = autocorrelated(rng, 4000, 1, 0.1, 0.9)[:, 0]
    assert np.corrcoef(slow[1:], slow[:-1])[0, 1] == pytest.approx(0.9, abs=0.03)
    assert slow.std() == pytest.approx(0.1, rel=0.2)
    recorded = np.arange(200.0).reshape(2, 100)
    blocks = resampled(rng, 64, 3, recorded, 16)
    assert np.diff(blocks.reshape(4, 16, 3), axis=1) == pytest.approx(1.0)


def test_recorded_noise_replaces_drawn_noise(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(1)
    recording = Recording(
        pace=np.log(np.linspace(1.0, 1.1, 40))[None, :], job=np.zeros((1, 40)), spans=np.log(np.array([0.9, 1.2]))
    )
    recording.write(tmp_path / "recorded.npz")
    noise = dataclasses.replace(CPU, bias=0.0, recorded=Recording.read(tmp_path / "recorded.npz"), block=40)
    assert paces(noise, rng, 40, np.zeros(2, np.int64)).T.tolist() == [pytest.approx(np.linspace(1.0, 1.1, 40))] * 2
    spans = span_factors(noise, rng, (1000,))
    assert set(np.round(spans, 4).tolist()) == {np.float32(0.9).round(4).item(), np.float32(1.2).round(4).item()}


def test_clocks_and_losses_change_records_only() -> None:
    job = SimulatedJob(grid=PIPELINE, noise=GPU)
    noisy = dataclasses.replace(job, clock_offset_s=0.01, lost_fraction=0.2)
    plain, changed = next(JobSimulation(job, 3, 1).traces()), next(JobSimulation(noisy, 3, 1).traces())
    assert len(set(changed.boot_ids)) == 4
    assert changed.lost == len(plain.records) - len(changed.records) > 0.1 * len(plain.records)
    steps = [trace.records[trace.records["kind"] == RecordKind.STEP] for trace in (plain, changed)]
    together = np.isin(steps[0]["rank"], steps[1]["rank"])
    assert (steps[0]["duration"][together] == steps[1]["duration"]).all()


def test_all_detectors_judge_the_same_window() -> None:
    row = dataclasses.replace(ROWS["compute 10 % to 3x"], layouts=("dp4-pp2",), steps=40)
    grid = LAYOUTS["dp4-pp2"]
    faults = parse("compute rank=5 factor=2 from=12", grid)
    case = DetectionCase(
        row=row.name,
        layout="dp4-pp2",
        job=SimulatedJob(grid=grid, noise=GPU, faults=faults),
        seed=3,
        steps=row.steps,
        faults=faults,
    )
    outcome = run(case, list(DETECTORS))
    (truth,) = outcome.windows["ours"].truths
    assert truth.cost_s == pytest.approx(8 * 3 * 20e-3, rel=0.15)
    ours = score([outcome.windows["ours"]])
    assert (ours.hits, ours.false, ours.cause_f1) == (1, 0, 1.0)
    assert all(NamedSubject((5,)) in subjects(outcome.windows[name]) for name in ("MegatronApp's rule", "plain MAD"))


def subjects(window: Window) -> set[NamedSubject]:
    return {verdict.subject for verdicts in window.named.values() for verdict in verdicts}


def test_every_row_can_be_drawn() -> None:
    for row in ROWS.values():
        case = draw(row, 5)
        assert bool(case.faults) == (row.faults is not None)
        assert draw(row, 5).faults == case.faults
