"""Messages of `megatronapp run` about a stop and about a broken manifest."""

import dataclasses
import pathlib

import pytest

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_common.names import UNSAVED_STOP
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.cli.follower import JobFollower, reporting_log
from megatronapp_operator.cli.run import exit_code, read_job
from megatronapp_operator.cli.text.stop_messages import stopped_line, stopping_line
from megatronapp_operator.errors import ManifestError
from megatronapp_operator.plan import (
    Condition,
    ConditionType,
    EventType,
    Failure,
    FailureAction,
    Phase,
    RecordEvent,
    Status,
)

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "demo.yaml"
FAILED = Condition(
    type=ConditionType.FAILED, status=True, reason="Interrupted", message="stopped by SIGINT", since=0, generation=1
)
DISK_FULL = Failure(
    time=0, attempt=0, reason="RankFailed", message="rank 0 failed", action=FailureAction.FAIL_JOB, exit_code=67
)
STOPPED = Status(phase=Phase.FAILED, conditions=(FAILED,), attempt_time=0, failures=(DISK_FULL,))
SUSPENDED = dataclasses.replace(FAILED, type=ConditionType.SUSPENDED)
RESTING = Status(phase=Phase.SUSPENDED, conditions=(SUSPENDED,), attempt_time=0)
BETWEEN = dataclasses.replace(RESTING, attempt=1, attempt_time=None)


def make_job(save: pathlib.Path | None) -> MegatronJob:
    job = read_job(str(EXAMPLE), (), name=None).job.to_dict()
    job["spec"]["checkpoint"] = {} if save is None else {"save": str(save)}
    job["spec"]["analyzer"] = {"enabled": False}
    return load_job(job)


@pytest.mark.parametrize(
    ("status", "without", "having"),
    [
        (
            RESTING,
            "stopped before a first checkpoint was written to SAVE",
            "stopped at step 42, checkpoint in SAVE; run the same command to continue",
        ),
        (
            BETWEEN,
            "stopped before attempt 1 began; SAVE has no checkpoint",
            "stopped before attempt 1 began; the newest checkpoint in SAVE is of step 42; "
            "run the same command to continue",
        ),
        (
            STOPPED,
            "stopped, but not all workers reported a checkpoint; SAVE has no checkpoint",
            "stopped, but not all workers reported a checkpoint; the newest checkpoint in SAVE is of step 42; "
            "run the same command to continue",
        ),
    ],
    ids=["saved", "between two attempts", "not saved"],
)
def test_a_stop_names_the_checkpoint_and_how_to_continue(
    tmp_path: pathlib.Path, status: Status, without: str, having: str
) -> None:
    save = tmp_path / "save"
    job = make_job(save)
    assert stopped_line(job, status) == without.replace("SAVE", str(save))
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("42")
    assert stopped_line(job, status) == having.replace("SAVE", str(save))


def test_no_checkpoint_is_claimed_of_a_job_that_saves_nothing(tmp_path: pathlib.Path) -> None:
    assert stopping_line(make_job(tmp_path)) == "stopping: writing a checkpoint; Ctrl-C again kills"
    job = make_job(None)
    assert "nothing is saved" in stopping_line(job)
    assert stopped_line(job, STOPPED) == "stopped; nothing was saved, as spec.checkpoint.save is not set"
    assert stopped_line(job, BETWEEN) == "stopped before attempt 1 began"


def test_a_stop_that_could_not_save_has_the_reason(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = JobFollower(make_job(tmp_path), JobPaths(tmp_path / "job"), verbose=False, retain_hub=False)
    follower(STOPPED, (RecordEvent(type=EventType.WARNING, reason="RankFailed", message="rank 0 failed"),))
    assert "warning: rank 0 failed\n" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "end"), [(STOPPED, "Failed"), (RESTING, "Suspended")], ids=["failed", "suspended"])
def test_a_stop_is_printed_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], status: Status, end: str
) -> None:
    job = make_job(tmp_path)
    follower = JobFollower(job, JobPaths(tmp_path / "job"), verbose=False, retain_hub=False)
    interrupted = RecordEvent(type=EventType.NORMAL, reason="Interrupted", message="stopped by SIGINT")
    ended = RecordEvent(type=EventType.WARNING, reason=end, message="stopped by SIGINT")
    follower(dataclasses.replace(status, phase=Phase.RUNNING, conditions=()), (interrupted,))
    follower(status, (ended,))
    follower.finish(status)
    output = capsys.readouterr().out
    assert output.count("stopping: ") == 1
    assert "SIGINT" not in output
    assert f"{job.metadata.name}: {end} (Interrupted)\nstopped" in output
    assert exit_code(status) == 130


def test_a_stop_of_a_job_that_saves_nothing_is_no_error(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, paths = make_job(None), JobPaths(tmp_path / "job")
    log = reporting_log(job, paths, 0)
    log.parent.mkdir(parents=True)
    message = f"error (rank 0): stopped after 11 steps, {UNSAVED_STOP}; a restart begins from the start"
    log.write_text(f"step 11\n{message}\n")
    interrupted = RecordEvent(type=EventType.NORMAL, reason="Interrupted", message="stopped by SIGINT")
    failures = [
        RecordEvent(type=EventType.WARNING, reason="RankFailed", message=f"rank {rank} failed: {why}")
        for rank, why in enumerate((message, "the disk is full"))
    ]
    follower = JobFollower(job, paths, verbose=True, retain_hub=False)
    follower(dataclasses.replace(STOPPED, phase=Phase.RUNNING, conditions=()), (interrupted,))
    follower(STOPPED, tuple(failures))
    follower.finish(STOPPED)
    assert capsys.readouterr().out.splitlines() == [
        stopping_line(job),
        "step 11",
        f"{job.metadata.name}: Running",
        "warning: rank 1 failed: the disk is full",
        f"{job.metadata.name}: Failed (Interrupted)",
        "stopped; nothing was saved, as spec.checkpoint.save is not set",
    ]
    JobFollower(job, paths, verbose=False, retain_hub=False)(STOPPED, tuple(failures))
    assert f"warning: rank 0 failed: {message}\n" in capsys.readouterr().out, "not asked from here"


def test_problems_of_the_text_name_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "syn.yaml"
    file.write_text("a: 1\nb: [\n")
    with pytest.raises(ManifestError, match=r"syn\.yaml: line 3, column 1: "):
        read_job(str(file), (), name=None)
    file.write_text("- 1\n")
    with pytest.raises(ManifestError, match=r"syn\.yaml: a list is not a block of fields"):
        read_job(str(file), (), name=None)
    file.write_text("kind: MegatronJob\n")
    with pytest.raises(ManifestError) as missing:
        read_job(str(file), (), name=None)
    assert "syn.yaml" not in str(missing.value), "a field's own path says where"
