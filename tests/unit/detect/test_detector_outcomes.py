"""Long runs of the detector benchmark: outcomes in a file, and their sums over rows."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import bench_detectors
import pytest
from bench_detectors import cases_of, chosen_rows, main, parse_options, run_all, run_in_order, seeds_of, totals_table
from detect.progress import OutcomeFile, outcome_document, outcome_of, read_outcomes, version_of
from detect.protocol import NamedSubject, Verdict
from detect.runner import DetectionOutcome, StepLengths, WindowKey, key_of, run
from detect.score import Truth, Window, score
from detect.simulation import JobSimulation
from detect.suite import LAYOUTS, PUBLISHED, ROW_GROUPS, ROWS, TABLE_WINDOWS, draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GRID = LAYOUTS["dp4"]
RANK = NamedSubject((1,))
TRUTH = Truth(subject=RANK, cause="compute", begin=5, end=30, noticeable_from=5, cost_s=0.1, cost_fraction=0.1)


def outcome(row: str, seed: int, *, faulty: bool, named: bool) -> DetectionOutcome:
    verdicts: dict[int, tuple[Verdict, ...]] = (
        {8: (Verdict(subject=RANK, cause="compute", cost_s=0.1),)} if named else {}
    )
    return DetectionOutcome(
        key=WindowKey(row, "dp4", seed, 30),
        windows={"ours": Window(grid=GRID, truths=(TRUTH,) * faulty, named=verdicts, steps=30, hours=1.0)},
        seconds_per_step={"ours": 0.001},
    )


def test_an_interrupted_run_continues_with_its_complete_outcomes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    outcomes = [outcome("ramp", seed, faulty=True, named=True) for seed in range(3)]
    stored = OutcomeFile(path, "a", ["ours"])
    for each in outcomes:
        stored.add(each)
    stored.close()
    path.write_bytes(path.read_bytes()[:-10])
    stored = OutcomeFile(path, "a", ["ours"])
    assert list(stored.outcomes) == [each.key for each in outcomes[:2]]
    stored.add(outcomes[2])
    stored.close()
    stored = OutcomeFile(path, "a", ["ours"])
    assert list(stored.outcomes.values()) == outcomes
    stored.close()


def test_outcomes_are_lines_of_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    found = outcome("ramp", 1, faulty=True, named=True)
    stored = OutcomeFile(path, "a", ["ours"])
    stored.add(found)
    stored.close()
    header, window = (json.loads(line) for line in path.read_text().splitlines())
    assert header == {"version": "a", "detectors": ["ours"]}
    assert (window["row"], window["seed"], window["truths"][0]["ranks"]) == ("ramp", 1, [1])
    (named,) = window["named"]["ours"]
    assert named == {"ranks": [1], "isLink": False, "cause": "compute", "spells": [[8, 8, 1.0, 0.1]]}


def test_what_is_read_back_scores_the_same() -> None:
    """A verdict whose cost changes, one that pauses, and a second subject."""
    cases = [draw(ROWS[row], 5, ("dp4-pp2",)) for row in ("periodic", "2 to 5 faults")]
    for case in cases:
        found = run(case, ["ours", "MegatronApp's rule"])
        back = outcome_of(json.loads(json.dumps(outcome_document(found))))
        assert back.key == found.key == key_of(case)
        for name, window in found.windows.items():
            assert window.named
            assert {step: set(some) for step, some in back.windows[name].named.items()} == {
                step: set(some) for step, some in window.named.items()
            }
            assert score([back.windows[name]]) == score([window])


def test_a_file_of_something_else_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes"
    path.write_text("important")
    with pytest.raises(ValueError, match="notes is not a file of outcomes; write another file"):
        OutcomeFile(path, "a", ["ours"])
    assert path.read_text() == "important"


def test_rows_are_named_alone_or_in_groups() -> None:
    assert chosen_rows("ramp, healthy") == ["ramp", "healthy"]
    every = chosen_rows("@faults,@healthy,@large,@streams,ramp")
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
    OutcomeFile(path, "a", ["ours"]).close()
    with pytest.raises(ValueError, match="has outcomes of version a, and the code is b; write another file"):
        OutcomeFile(path, "b", ["ours"])
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
        options = parse_options()
        seeds += seeds_of(options, options.windows)
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
    assert len(read_outcomes(second).outcomes) == 1
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


def test_stored_outcomes_are_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "3.jsonl"]
    for seed, (path, version) in enumerate(zip(paths, ("a", "a", "b"), strict=True)):
        stored = OutcomeFile(path, version, ["ours"])
        stored.add(outcome("ramp", seed, faulty=True, named=seed == 0))
        stored.close()
    monkeypatch.setattr("sys.argv", ["bench", "--show", str(paths[0]), str(paths[1])])
    main()
    assert "| ramp | ours | 2 | 2 | 1.000 (0 false) | 0.500 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["bench", "--show", *map(str, paths)])
    with pytest.raises(SystemExit, match="of several versions"):
        main()


def test_the_published_table_has_enough_windows_for_its_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that the goals are stated for; a run that ends early has begun every row."""
    apart = {*bench_detectors.APART, "ramp"}
    faulty = [TABLE_WINDOWS[row] for row in ROW_GROUPS["@faults"] if row not in apart]
    assert sum(faulty) >= 2_000
    assert sum(TABLE_WINDOWS[row] for row in ROW_GROUPS["@healthy"]) >= 10_000
    assert (TABLE_WINDOWS["compute 3 %"], TABLE_WINDOWS["2 to 5 faults"]) == (120, 200)
    monkeypatch.setattr("sys.argv", ["bench", "--table", "--published", "--seed", "7001", "--part", "1/100"])
    options = parse_options()
    cases = cases_of(list(TABLE_WINDOWS), options)
    assert {case.row for case in cases[: len(TABLE_WINDOWS) // 2]} < set(TABLE_WINDOWS)
    assert min(case.seed for case in cases) == PUBLISHED + 7_000


def test_outcomes_of_another_part_are_read_while_it_runs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    stored = OutcomeFile(path, "a", ["ours"])
    found = [outcome("ramp", seed, faulty=True, named=True) for seed in (1, 2)]
    for each in found:
        stored.add(each)
    assert list(read_outcomes(path, "a").outcomes.values()) == found
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size - 10)
    assert list(read_outcomes(path, "a").outcomes.values()) == found[:1]
    assert path.stat().st_size == size - 10
    with pytest.raises(ValueError, match="has outcomes of version a, and the code is b"):
        read_outcomes(path, "b")
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
    stored = len(read_outcomes(path).outcomes)
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


def test_windows_are_the_same_in_several_processes() -> None:
    cases = [draw(ROWS[row], 5, ("dp8",)) for row in ("hang", "host stalls", "healthy")]
    alone = run_in_order(cases, ["late start"], 1)
    spread = run_in_order(cases, ["late start"], 2)
    assert [each.key for each in spread] == [key_of(case) for case in cases]
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
