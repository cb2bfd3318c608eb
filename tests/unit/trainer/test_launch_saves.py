"""Requests for a checkpoint: real launchers pass them on to their ranks, which continue."""

import contextlib
import functools
import pathlib

import pytest
from launchers import Gang, wait_until

from megatronapp_common.names import ExitCode
from megatronapp_common.save_request import SaveRequest
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def has_text(path: pathlib.Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def test_each_request_for_this_attempt_reaches_the_ranks_of_its_worker_once(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, proc_per_node="2")
    with contextlib.closing(gang):
        gang.request_checkpoint(0, SaveRequest(attempt=1, time=50))
        gang.start(dict.fromkeys(range(2), "saver"), SAVE_FILE=str(tmp_path / "save-0"))
        gang.running({0: [0, 1]})
        gang.go()
        (worker,) = gang.workers
        counts = [worker.run_dir / f"saves-{rank}" for rank in range(2)]
        for time, saves in ((100, "1"), (100, "1"), (200, "2")):
            gang.request_checkpoint(0, SaveRequest(attempt=0, time=time, nodes=("n1", "n2")))
            for count in counts:
                wait_until(functools.partial(has_text, count, saves))
        worker.process.terminate()
        assert worker.end() == ExitCode.PREEMPTED
        assert [count.read_text() for count in counts] == ["2", "2"]


def test_the_progress_document_has_the_time_of_a_checkpoint_as_others_read_it() -> None:
    report = CheckpointReport(iteration=20, taken_at=1.25)
    assert (report.to_json()["iteration"], report.to_json()["takenAt"]) == (20, "1970-01-01T00:00:01.250000Z")
    assert CheckpointReport().to_json()["takenAt"] is None
