"""Messages about failures, about one worker alone, and about a deletion."""

import pathlib
from typing import Any

import pytest
from worker_groups import worker_groups

from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.cli.delete import _stopping
from megatronapp_operator.plan import Phase
from megatronapp_operator.plan.observed import Worker, WorkerOutcome, WorkerPhase
from megatronapp_operator.plan.outcome import describe
from megatronapp_operator.plan.spec import JobSpec

TRACEBACK = '  File "train.py", line 3\n    step()\nValueError: no such column\n\n'


def ended(outcome: WorkerOutcome) -> Worker:
    return Worker(index=1, attempt=2, phase=WorkerPhase.FAILED, outcome=outcome)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            WorkerOutcome(code=1, reason="RankFailed", message=TRACEBACK, rank=3),
            "rank 3 on worker 1 failed with exit code 1: ValueError: no such column "
            "(megatronapp logs demo --rank 3 --attempt 2)",
        ),
        (
            WorkerOutcome(code=1, reason="LauncherFailed", message=" \n"),
            "worker 1 failed with exit code 1 (megatronapp logs demo --worker 1 --attempt 2)",
        ),
    ],
)
def test_a_failure_is_described_by_its_last_lines_and_names_the_log(outcome: WorkerOutcome, expected: str) -> None:
    assert describe(ended(outcome), "demo") == expected


@pytest.mark.parametrize(
    ("count", "expected", "expected_all"), [(1, "1 worker", "the only worker"), (2, "2 workers", "all 2")]
)
def test_a_single_worker_is_described_in_the_singular(count: int, expected: str, expected_all: str) -> None:
    spec = JobSpec(name="demo", uid="u", worker_groups=worker_groups(count))
    assert spec.workers_text == expected
    assert spec.all_workers_text.startswith(expected_all)


@pytest.mark.parametrize(
    ("spec", "force", "expected"),
    [
        ({"mode": "serve"}, False, "stopping; open requests end with an error; at most 30 s"),
        ({"checkpoint": {"save": "ckpt"}}, False, "stopping; a checkpoint is written; at most 30 s"),
        ({}, False, "stopping; nothing is saved, as spec.checkpoint.save is not set; at most 30 s"),
        ({"checkpoint": {"save": "ckpt"}}, True, "stopping at once; no checkpoint is written"),
        ({"mode": "serve"}, True, "stopping at once"),
    ],
)
def test_a_deletion_describes_what_it_waits_for(
    tmp_path: pathlib.Path, spec: dict[str, Any], force: bool, expected: str
) -> None:
    document = {"spec": spec | {"runPolicy": {"terminationGracePeriodSeconds": 30}}, "status": {"phase": "Running"}}
    view = JobView(paths=JobPaths(tmp_path), document=document, alive=True)
    assert _stopping(view, force=force) == expected


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
def test_deletion_names_no_requests_of_a_server_that_takes_none(tmp_path: pathlib.Path, phase: Phase) -> None:
    spec = {"mode": "serve", "runPolicy": {"terminationGracePeriodSeconds": 30}}
    view = JobView(paths=JobPaths(tmp_path), document={"spec": spec, "status": {"phase": phase}}, alive=True)
    assert _stopping(view, force=False) == "stopping; at most 30 s"
