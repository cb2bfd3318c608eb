"""The process backend with real processes: ends that are in order."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
from typing import Any

import pytest

pytestmark = pytest.mark.process


def test_a_job_runs_to_its_end_and_leaves_nothing(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    process_backend.until_processes(uid, 6)  # two launchers with two children each
    process_backend.end(0)
    assert backend.wait(180) == 0
    process_backend.until_nothing_is_left(uid)
    status = process_backend.status()
    assert status["phase"] == "Succeeded"
    assert status["progress"]["iteration"] == 3
    assert status["rankTable"]["digest"] == "d"
    assert not (process_backend.job() / "backend.json").exists()


def test_the_first_ctrl_c_asks_for_a_checkpoint(process_backend: Any) -> None:
    backend = process_backend.run(
        process_backend.manifest(grace_s=3600)
    )  # on a busy machine no process is killed before it could answer
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 130
    process_backend.until_nothing_is_left(uid)
    record = json.loads((process_backend.job() / "attempt-0" / "worker-1" / "termination.json").read_text())
    assert record["code"] == 75, "the launcher was asked, not killed"
    conditions = {condition["type"]: condition for condition in process_backend.status()["conditions"]}
    assert process_backend.status()["phase"] == "Suspended"
    assert (conditions["Suspended"]["status"], conditions["Suspended"]["reason"]) == ("True", "Interrupted")
    assert "Failed" not in conditions
    assert process_backend.cli("get").stdout.splitlines()[1].split()[:2] == ["job", "Suspended"]
    waited = process_backend.cli("wait", "job", "--for=condition=Complete", "--timeout=200s")
    assert (waited.returncode, "has ended as Suspended (Interrupted: stopped by SIGINT)" in waited.stderr) == (1, True)
    again = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    process_backend.end(0)
    assert again.wait(180) == 0


def test_a_ctrl_c_whose_checkpoint_fails_reports_the_reason(process_backend: Any) -> None:
    (process_backend.control / "unsaved").touch()
    backend = process_backend.run(process_backend.manifest(grace_s=3600))
    process_backend.until_phase("Running")
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 130
    status = process_backend.status()
    assert [(failure["worker"], failure["exitCode"], failure["action"]) for failure in status["failures"]] == [
        (1, 67, "FailJob")
    ]
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    message = "rank 1 on worker 1 failed with exit code 67: words"
    assert (status["phase"], failed["reason"], message in failed["message"]) == ("Failed", "Interrupted", True)
    lines = (process_backend.folder / "backend.out").read_text().splitlines()
    assert any(line.startswith(f"warning: {message}") for line in lines)
    assert lines[-2:] == [
        "job: Failed (Interrupted)",
        "stopped; nothing was saved, as spec.checkpoint.save is not set",
    ]


def test_a_ctrl_c_between_two_attempts_suspends_the_job(process_backend: Any) -> None:
    manifest = pathlib.Path(process_backend.manifest())
    manifest.write_text(manifest.read_text().replace("initialSeconds: 0", "initialSeconds: 600"))
    backend = process_backend.run(str(manifest))
    process_backend.until_phase("Running")
    process_backend.end(1, "-1-0")
    process_backend.until_phase("Restarting", attempt=1)
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 130
    status = process_backend.status()
    assert (status["phase"], status["attempt"], len(status["failures"])) == ("Suspended", 1, 1)
    lines = (process_backend.folder / "backend.out").read_text().splitlines()
    assert lines[-2:] == ["job: Suspended (Interrupted)", "stopped before attempt 1 began"]


def test_the_second_ctrl_c_kills(process_backend: Any) -> None:
    (process_backend.control / "stubborn").touch()
    backend = process_backend.run(process_backend.manifest(grace_s=3600))
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    backend.send_signal(signal.SIGINT)
    process_backend.until(
        lambda: any(condition["reason"] == "Interrupted" for condition in process_backend.status()["conditions"]),
        "first is seen",
    )
    assert backend.poll() is None
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 130
    process_backend.until_nothing_is_left(uid)
    assert process_backend.status()["phase"] == "Failed", "nothing was saved"


def test_a_worker_that_does_not_stop_is_killed_after_its_grace(process_backend: Any) -> None:
    (process_backend.control / "stubborn").touch()
    backend = process_backend.run(process_backend.manifest(grace_s=1))
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    backend.send_signal(signal.SIGTERM)
    assert backend.wait(180) == 130
    process_backend.until_nothing_is_left(uid)


@pytest.mark.full("a third signal with the same handler")
def test_the_job_ends_with_its_terminal(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    backend.send_signal(signal.SIGHUP)
    assert backend.wait(180) == 130
    process_backend.until_nothing_is_left(uid)


def test_a_detached_job_has_left_the_session_and_ends_by_delete(process_backend: Any) -> None:
    command = process_backend.command("run", process_backend.manifest(), "--detach")
    environment, folder = process_backend.environment, process_backend.folder
    started = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert (started.returncode, started.stdout) == (0, "megatronjob.megatronapp.io/job created\n")
    process_backend.until_phase("Running")
    uid, pid = process_backend.uid(), json.loads((process_backend.job() / "backend.json").read_text())["pid"]
    assert os.getsid(pid) not in {os.getsid(0), pid}, "no session of ours, and it cannot get a terminal again"
    deleted = process_backend.cli("delete", "job")
    assert deleted.returncode == 0, deleted.stderr
    stopping, done = deleted.stdout.splitlines()
    assert re.fullmatch(r"stopping; .*, at most \d+ s", stopping) or "nothing is saved" in stopping
    assert done == 'megatronjob.megatronapp.io "job" deleted'
    process_backend.until_nothing_is_left(uid)
    assert not process_backend.job().exists()


def test_a_detached_job_keeps_no_descriptor_of_its_caller(process_backend: Any) -> None:
    """Check that a script's lock and a pipe that is read to its end are free as soon as the command returns."""
    lock = process_backend.folder / "lock"
    with lock.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        reading, writing = os.pipe()
        inherited = (locked.fileno(), writing)
        command = process_backend.command("run", process_backend.manifest(), "--detach")
        done = subprocess.run(
            command,
            env=process_backend.environment,
            cwd=process_backend.folder,
            pass_fds=inherited,
            capture_output=True,
            check=False,
        )
        os.close(writing)
    assert done.returncode == 0, done.stderr
    os.set_blocking(reading, False)
    with lock.open() as lock_file, open(reading, "rb", buffering=0) as pipe:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert pipe.read() == b"", "the end of the file; None would mean that a writer is left"
    pid = json.loads((process_backend.job() / "backend.json").read_text())["pid"]
    descriptors = []
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            descriptors.append(os.readlink(entry))
    assert str(lock) not in descriptors


@pytest.mark.full("a variant of the detached job")
def test_a_detached_job_starts_without_standard_streams(process_backend: Any) -> None:
    command = process_backend.command("run", process_backend.manifest(), "--detach")
    environment, folder = process_backend.environment, process_backend.folder
    closed = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} <&- >&- 2>&-"], env=environment, cwd=folder, check=False
    )
    assert closed.returncode == 0
    process_backend.until_phase("Running")


def test_a_running_job_keeps_its_checkpoints_for_itself(process_backend: Any) -> None:
    manifest = pathlib.Path(process_backend.manifest())
    manifest.write_text(manifest.read_text() + "  checkpoint: {save: kept}\n")
    backend = process_backend.run(str(manifest))
    process_backend.until_phase("Running")
    for options in ((), ("--detach",)):
        refused = process_backend.cli("run", str(manifest), "--name", "other", *options)
        assert refused.returncode == 1
        assert 'spec.checkpoint.save: kept belongs to the running job "job"' in refused.stderr
    process_backend.end(0)
    assert backend.wait(180) == 0
    later = process_backend.run(str(manifest), "--name", "other")
    assert later.wait(180) == 0


def test_a_running_job_is_not_replaced_and_a_finished_job_is(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    for options in ((), ("--detach",)):
        refused = process_backend.cli("run", process_backend.manifest(), *options)
        assert refused.returncode == 1
        assert 'is running; stop it with "megatronapp delete job"' in refused.stderr
    other = process_backend.run(process_backend.manifest(), "--name", "other")
    process_backend.until_phase("Running", name="other")
    first = process_backend.uid()
    process_backend.end(0)
    assert (backend.wait(180), other.wait(180)) == (0, 0)
    again = process_backend.run(process_backend.manifest())
    assert again.wait(180) == 0
    assert first not in (process_backend.job() / "job.yaml").read_text()


def test_a_failing_worker_restarts_the_gang(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    process_backend.end(1, "-1-0")
    process_backend.until_phase("Running", attempt=1)
    assert not [name for name in process_backend.shared_memory() if "-a0-" in name]
    failure = process_backend.status()["failures"][0]
    assert (failure["worker"], failure["rank"], failure["exitCode"], failure["action"]) == (1, 1, 1, "RestartJob")
    process_backend.end(0)
    assert backend.wait(180) == 0
    assert process_backend.status()["restarts"] == 1
    process_backend.until_nothing_is_left(uid)


def test_a_usage_error_fails_the_job_at_once(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    process_backend.end(64, "-0")
    assert backend.wait(180) == 1
    process_backend.until_nothing_is_left(uid)
    assert (process_backend.status()["phase"], process_backend.status()["restarts"]) == ("Failed", 0)


@pytest.mark.full("the plan counts restarts; one is shown above")
def test_the_budget_of_restarts_ends(process_backend: Any) -> None:
    process_backend.end(67, "-1")
    backend = process_backend.run(process_backend.manifest())
    assert backend.wait(180) == 1
    status = process_backend.status()
    assert (status["restarts"], len(status["failures"])) == (2, 3)
    assert status["failures"][-1]["action"] == "FailJob"


def test_a_state_that_cannot_be_written_does_not_end_the_training(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    folder = process_backend.folder / "a-folder"
    folder.mkdir()
    link = process_backend.folder / "a-link"
    link.symlink_to(folder)
    link.replace(process_backend.job() / "events.jsonl")  # in one step: an event may be appended at any moment
    process_backend.end(0)
    output = (process_backend.folder / "backend.out").read_text
    process_backend.until(lambda: "Ctrl-C ends the wait" in output(), "it waits for room")
    assert "the state cannot be written" in output()
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 0
    assert "the last state was not written" in output()
    assert process_backend.status()["phase"] == "Succeeded"


def test_the_final_status_is_written_once_the_disk_has_space(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    taken = process_backend.job() / f".status.json.{backend.pid}"  # the status is written there and renamed
    taken.mkdir()
    process_backend.end(0)
    process_backend.until(
        lambda: "Ctrl-C ends the wait" in (process_backend.folder / "backend.out").read_text(), "it waits for room"
    )
    assert process_backend.status()["phase"] == "Running"
    taken.rmdir()
    assert backend.wait(180) == 0
    assert process_backend.status()["phase"] == "Succeeded"
    assert process_backend.cli("get").stdout.splitlines()[1].split()[:2] == ["job", "Succeeded"]


def test_a_worker_that_cannot_be_started_is_tried_again_as_any_that_failed(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    uid = process_backend.uid()
    (process_backend.job() / "attempt-1").touch()
    process_backend.end(1, "-1-0")
    process_backend.until_phase("Running", attempt=2)
    failure = process_backend.status()["failures"][-1]
    assert (failure["attempt"], failure["reason"], failure["action"]) == (1, "WorkerNotStarted", "RestartJob")
    assert "worker 0 could not be started: Not a directory" in failure["message"]
    assert "WorkerNotStarted" in process_backend.cli("describe", "job").stdout
    process_backend.end(0)
    assert backend.wait(180) == 0
    assert process_backend.status()["restarts"] == 2
    process_backend.until_nothing_is_left(uid)


@pytest.mark.full("a status delayed by a full disk is written in the same way")
def test_events_delayed_by_a_full_disk_are_written_once_it_has_space(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    events = process_backend.job() / "events.jsonl"
    (process_backend.folder / "kept").hardlink_to(events)
    full = process_backend.folder / "full"
    full.symlink_to("/dev/full")
    full.replace(events)  # in one step: an event may be appended at any moment
    process_backend.end(1, "-1-0")
    process_backend.until_phase("Running", attempt=1)
    output = (process_backend.folder / "backend.out").read_text
    process_backend.until(lambda: "No space left on device" in output(), "it reports a full disk")
    (process_backend.folder / "kept").rename(events)
    written = events.read_text
    process_backend.until(
        lambda: "attempt 1 starts in" in written() and "of attempt 1 train" in written(), "held events are told"
    )
    process_backend.end(0)
    assert backend.wait(180) == 0


def test_on_a_terminal_the_pages_stay_open_until_ctrl_c(process_backend: Any) -> None:
    terminal, backend = process_backend.run_on_terminal(process_backend.manifest(analyzer=True, retain_s=3600))
    process_backend.until_phase("Running")
    process_backend.end(0)
    process_backend.until_phase("Succeeded")
    process_backend.until(lambda: "Ctrl-C closes them" in terminal.read(), "it says that the pages stay")
    uid = process_backend.uid()
    process_backend.until_processes(uid, 1, "hub.py")
    backend.send_signal(signal.SIGINT)
    assert backend.wait(180) == 0
    process_backend.until_nothing_is_left(uid)
    assert "hubUrl" not in process_backend.status()


def test_a_closed_terminal_silences_the_job_and_does_not_end_it(process_backend: Any) -> None:
    terminal, backend = process_backend.run_on_terminal(process_backend.manifest(), "--follow")
    process_backend.until_phase("Running")
    terminal.close()
    process_backend.end(1, "-0-0")
    process_backend.until_phase("Running", attempt=1)
    process_backend.end(0)
    assert backend.wait(180) == 0


def test_follow_prints_the_log_of_the_reporting_rank(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest(), "--follow")
    process_backend.until_phase("Running")
    process_backend.end(0)
    assert backend.wait(180) == 0
    lines = (process_backend.folder / "backend.out").read_text().splitlines()
    assert "line of rank 1, attempt 0" in lines
    assert "step 3/5  loss 1.5000" in lines
    assert lines[-1] == "job: Succeeded"


def test_a_bad_manifest_is_refused_with_code_2(process_backend: Any) -> None:
    path = process_backend.folder / "bad.yaml"
    path.write_text("kind: MegatronJob\n")
    done = process_backend.cli("run", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    missing = process_backend.cli("run", str(process_backend.folder / "absent.yaml"))
    assert (missing.returncode, "cannot read the manifest" in missing.stderr) == (2, True)
