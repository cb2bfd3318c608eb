"""Long runs of the detector benchmark: outcomes in a file, and their sums over rows."""

import dataclasses
import pathlib

import pytest
from bench_detectors import totals_table
from detect.layout import Grid
from detect.progress import OutcomeFile, key_of, version_of
from detect.protocol import NamedSubject, Verdict
from detect.runner import DetectionOutcome
from detect.score import Truth, Window
from detect.simulation import SimulatedJob
from detect.suite import DetectionCase

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


def test_outcomes_of_another_version_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.outcomes"
    OutcomeFile(path, "a").close()
    with pytest.raises(ValueError, match="has outcomes of version a, and the code is b; write another file"):
        OutcomeFile(path, "b")
    (tmp_path / "x.py").write_text("x = 1")
    before = version_of([tmp_path], "")
    (tmp_path / "x.py").write_text("x = 2")
    assert before != version_of([tmp_path], "") != version_of([tmp_path], "other options")


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
