"""Long runs of the detector benchmark: outcomes in a file, and their sums over rows."""

import dataclasses
import gzip
import os
import pathlib
import pickle
import signal
import subprocess
import sys

import bench_detectors
import pytest
from bench_detectors import chosen_rows, main, parse_options, run_all, run_in_order, seeds_of, totals_table
from detect.layout import Grid
from detect.progress import OutcomeFile, key_of, outcomes_in, version_of
from detect.protocol import NamedSubject, Verdict
from detect.runner import DetectionOutcome, StepLengths
from detect.score import Truth, Window
from detect.simulation import JobSimulation, SimulatedJob
from detect.suite import PUBLISHED, ROWS, DetectionCase, draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GRID = Grid(dp=4)
RANK = NamedSubject((1,))
TRUTH = Truth(subject=RANK, cause="compute", begin=5, end=30, noticeable_from=5, cost_s=0.1, cost_fraction=0.1)


def outcome(row: str, seed: int, *, faulty: bool, named: bool) -> DetectionOutcome:
    verdicts: dict[int, tuple[Verdict, ...]] = (
        {8: (Verdict(subject=RANK, cause="compute", cost_s=0.1),)} if named else {}
    )
    return DetectionOutcome(
        case=DetectionCase(row=row, layout="dp4", job=SimulatedJob(grid=GRID), seed=seed, steps=30, faults=()),
        windows={"ours": Window(grid=GRID, truths=(TRUTH,) * faulty, named=verdicts, steps=30, hours=1.0)},
        seconds_per_step={"ours": 0.001},
    )


def test_an_interrupted_run_continues_with_its_complete_outcomes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    outcomes = [outcome("ramp", seed, faulty=True, named=True) for seed in range(3)]
    stored = OutcomeFile(path, "a")
    for each in outcomes:
        stored.add(each)
    stored.close()
    path.write_bytes(path.read_bytes()[:-10])
    stored = OutcomeFile(path, "a")
    assert list(stored.outcomes) == [key_of(each.case) for each in outcomes[:2]]
    stored.add(outcomes[2])
    stored.close()
    stored = OutcomeFile(path, "a")
    assert list(stored.outcomes.values()) == outcomes
    stored.close()


def test_outcomes_are_compressed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    found = outcome("ramp", 1, faulty=True, named=True)
    verdict = found.windows["ours"].named[8]
    named = {step: tuple(dataclasses.replace(each, cost_s=0.1 + step) for each in verdict) for step in range(8, 400)}
    found = dataclasses.replace(found, windows={"ours": dataclasses.replace(found.windows["ours"], named=named)})
    stored = OutcomeFile(path, "a")
    stored.add(found)
    stored.close()
    assert path.stat().st_size < len(pickle.dumps(found)) / 3
    with gzip.open(path) as stream:
        assert stream.read(1) == b"a"
        assert pickle.load(stream) == found


def test_a_file_of_something_else_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes"
    path.write_text("important")
    with pytest.raises(ValueError, match="notes is not a file of outcomes; write another file"):
        OutcomeFile(path, "a")
    assert path.read_text() == "important"


def test_rows_are_named_alone_or_in_groups() -> None:
    assert chosen_rows("ramp, healthy") == ["ramp", "healthy"]
    every = chosen_rows("@faults,@healthy,@streams,ramp")
    assert every == list(ROWS)
    assert all(ROWS[row].faults is None for row in chosen_rows("@healthy,@streams"))
    with pytest.raises(SystemExit, match="no '@ramps'; write some of: compute 10 % to 3x"):
        chosen_rows("@ramps")


def test_a_limit_of_time_needs_a_file_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_detectors.py", "--minutes", "1"])
    with pytest.raises(SystemExit):
        main()
    assert "--minutes: write --continue FILE, too" in capsys.readouterr().err


def test_outcomes_of_another_version_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    OutcomeFile(path, "a").close()
    with pytest.raises(ValueError, match="has outcomes of version a, and the code is b; write another file"):
        OutcomeFile(path, "b")
    (tmp_path / "x.py").write_text("x = 1")
    before = version_of([tmp_path], "")
    (tmp_path / "x.py").write_text("x = 2")
    assert before != version_of([tmp_path], "") != version_of([tmp_path], "other options")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 2000), st.booleans())
def test_parts_of_a_run_have_each_seed_once(
    monkeypatch: pytest.MonkeyPatch, windows: int, parts: int, seed: int, published: bool
) -> None:
    argv = ["bench", "--windows", str(windows), "--seed", str(seed), *["--published"] * published]
    seeds: list[int] = []
    for part in range(1, parts + 1):
        monkeypatch.setattr("sys.argv", [*argv, "--part", f"{part}/{parts}"])
        seeds += seeds_of(parse_options())
    first = seed + (PUBLISHED - 1 if published else 0)
    assert seeds == list(range(first, first + windows))


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2"])
def test_a_part_that_is_none_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", f"--part={part}"])
    with pytest.raises(SystemExit):
        parse_options()
    assert "is no part; write for example 2/3" in capsys.readouterr().err


def test_parts_are_summed_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "1.outcomes", tmp_path / "2.outcomes"
    argv = ["bench", "--rows", "healthy", "--layouts", "dp4", "--detectors", "late start", "--windows", "2"]

    def bench(*options: str, note: str = "") -> str:
        monkeypatch.setattr("sys.argv", [*argv, *options])
        main()
        found = capsys.readouterr()
        assert note in found.err and ("missing" in note) == ("missing" in found.err)
        return found.out

    bench("--part", "1/2", "--continue", str(first))
    second.write_bytes(first.read_bytes()[:-10])  # a run that has just begun
    assert "| healthy | late start | 2 |" in bench("--continue", str(second), "--also", str(first))
    assert len(outcomes_in(second, _version_in(second))) == 1
    assert "| healthy | late start | 2 |" in bench("--continue", str(first), "--also", str(second), "--minutes", "0")
    bench(
        "--part", "2/2", "--continue", str(second), "--also", str(first), note="1 of the stored outcomes are of other"
    )
    bench("--windows", "3", "--continue", str(first), "--minutes", "0", note="2 of 3 windows are missing below")
    with pytest.raises(SystemExit, match=r"--continue: .* has outcomes of version"):
        bench("--layouts", "dp4,dp8", "--continue", str(first))
    with pytest.raises(SystemExit, match=r"--also: .*no file"):
        bench("--continue", str(first), "--also", str(tmp_path / "no file"))
    with pytest.raises(SystemExit, match="no window has been run; give more --minutes, or"):
        bench("--continue", str(tmp_path / "3.outcomes"), "--minutes", "0")


def _version_in(path: pathlib.Path) -> str:
    with gzip.open(path) as stream:
        return stream.read(12).decode()


def test_outcomes_of_another_part_are_read_while_it_runs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    stored = OutcomeFile(path, "a")
    found = [outcome("ramp", seed, faulty=True, named=True) for seed in (1, 2)]
    for each in found:
        stored.add(each)
    assert list(outcomes_in(path, "a").values()) == found
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size - 10)
    assert list(outcomes_in(path, "a").values()) == found[:1]
    assert path.stat().st_size == size - 10
    with pytest.raises(ValueError, match="has outcomes of version a, and the code is b"):
        outcomes_in(path, "b")
    stored.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_prints_what_is_stored(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    """A terminal and `timeout` send signals to all processes of a run."""
    path = tmp_path / "run.outcomes"
    command = [sys.executable, bench_detectors.__file__, "--rows", "healthy", "--layouts", "dp8-pp8"]
    command += ["--detectors", "late start", "--windows", "2000", "--processes", "2", "--continue", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.read(1)  # the first window is stored
        os.killpg(process.pid, number)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "ends after the windows that have begun; the same command continues" in err
    stored = len(outcomes_in(path, _version_in(path)))
    assert stored > 0
    assert f"\n{2000 - stored} of 2000 windows are missing below" in err
    assert f"| healthy | late start | {stored} |" in out


def test_rows_are_summed_up_by_group() -> None:
    found = [outcome("host stalls", 1, faulty=True, named=True), outcome("slow link", 2, faulty=True, named=False)]
    alarms = [outcome("healthy", seed, faulty=False, named=seed == 1) for seed in (1, 2)]
    lines = totals_table([*found, *alarms]).splitlines()[2:]
    assert lines[0].startswith(
        "| other faults | ours | 2 | 2 | 1/2 (95 %: 0.013 to 0.987) | 1/1 (95 %: 0.025 to 1.000)"
    )
    assert lines[1].endswith("| 1 in 2.0 h (at most 2.372 per hour) |")


def test_cases_of_a_row_differ_by_their_seeds() -> None:
    case = outcome("ramp", 1, faulty=True, named=True).case
    assert key_of(case) != key_of(dataclasses.replace(case, seed=2))


def test_windows_are_the_same_in_several_processes() -> None:
    cases = [draw(ROWS[row], 5, ("dp8",)) for row in ("hang", "host stalls", "healthy")]
    alone = run_in_order(cases, ["late start"], 1)
    spread = run_in_order(cases, ["late start"], 2)
    assert [each.case for each in spread] == cases
    assert [each.windows for each in spread] == [each.windows for each in alone]


def test_no_window_is_begun_after_the_time_given() -> None:
    assert not list(run_all([draw(ROWS["healthy"], 5)], ["late start"], 1, minutes=0.0))


@pytest.mark.parametrize("row", ["2 to 5 faults", "hang", "stopped and continued"])
def test_lengths_of_steps_are_those_of_a_simulation_with_these_faults(row: str) -> None:
    case = draw(ROWS[row], 7, ("dp4-pp2",))
    lengths = StepLengths(case)
    for _ in lengths.traces(min([case.steps, *(fault.begin for fault in case.faults if fault.kind == "hang")])):
        pass
    for faults in (case.faults, case.faults[1:], ()):
        job = dataclasses.replace(case.job, faults=faults)
        assert lengths.of(faults).tolist() == JobSimulation(job, case.seed, case.steps).step_lengths_s().tolist()
    healthy = JobSimulation(dataclasses.replace(case.job, faults=()), case.seed, 30)
    assert lengths.without_faults(30).tolist() == healthy.step_lengths_s().tolist()


def test_a_simulation_may_be_read_twice() -> None:
    case = draw(ROWS["healthy: eventful"], 3, ("dp8",))
    simulation = JobSimulation(case.job, case.seed, case.steps)
    before = simulation.step_lengths_s().tolist()
    first = [trace.records.tobytes() for trace in simulation.traces()]
    assert [trace.records.tobytes() for trace in simulation.traces()] == first
    assert simulation.step_lengths_s().tolist() == before
