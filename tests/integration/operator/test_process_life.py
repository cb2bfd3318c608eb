"""The process backend with real processes: ends that are in order."""

import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.process


def test_a_job_runs_to_its_end_and_leaves_nothing(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    uid = desk.uid()
    assert len(desk.processes(uid)) == 6, "two launchers with two children each"
    desk.end(0)
    assert backend.wait(60) == 0
    desk.until_nothing_is_left(uid)
    status = desk.status()
    assert status["phase"] == "Succeeded"
    assert status["progress"]["iteration"] == 3
    assert status["rankTable"]["digest"] == "d"
    assert not (desk.job() / "backend.json").exists()


def test_the_first_ctrl_c_asks_for_a_checkpoint(desk: Any) -> None:
    backend = desk.run(desk.manifest(grace_s=3600))  # on a busy machine no process is killed before it could answer
    desk.until_phase("Running")
    uid = desk.uid()
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 130
    desk.until_nothing_is_left(uid)
    record = json.loads((desk.job() / "attempt-0" / "worker-1" / "termination.json").read_text())
    assert record["code"] == 75, "the launcher was asked, not killed"
    conditions = {one["type"]: one for one in desk.status()["conditions"]}
    assert desk.status()["phase"] == "Suspended"
    assert (conditions["Suspended"]["status"], conditions["Suspended"]["reason"]) == ("True", "Interrupted")
    assert "Failed" not in conditions
    assert desk.cli("get").stdout.splitlines()[1].split()[:2] == ["job", "Suspended"]
    waited = desk.cli("wait", "job", "--for=condition=Complete", "--timeout=80s")
    assert (waited.returncode, "has ended as Suspended (Interrupted: stopped by SIGINT)" in waited.stderr) == (1, True)
    again = desk.run(desk.manifest())
    desk.until_phase("Running")
    desk.end(0)
    assert again.wait(60) == 0


def test_a_ctrl_c_whose_checkpoint_fails_says_why(desk: Any) -> None:
    (desk.control / "unsaved").touch()
    backend = desk.run(desk.manifest(grace_s=3600))
    desk.until_phase("Running")
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 130
    status = desk.status()
    assert [(one["worker"], one["exitCode"], one["action"]) for one in status["failures"]] == [(1, 67, "FailJob")]
    failed = next(one for one in status["conditions"] if one["type"] == "Failed")
    said = "rank 1 on worker 1 failed with exit code 67: words"
    assert (status["phase"], failed["reason"], said in failed["message"]) == ("Failed", "Interrupted", True)
    lines = (desk.folder / "backend.out").read_text().splitlines()
    assert any(line.startswith(f"warning: {said}") for line in lines)
    assert lines[-2:] == [
        "job: Failed (Interrupted)",
        "stopped; nothing was saved, as spec.checkpoint.save is not set",
    ]


def test_a_ctrl_c_between_two_attempts_suspends_the_job(desk: Any) -> None:
    manifest = pathlib.Path(desk.manifest())
    manifest.write_text(manifest.read_text().replace("initialSeconds: 0", "initialSeconds: 600"))
    backend = desk.run(str(manifest))
    desk.until_phase("Running")
    desk.end(1, "-1-0")
    desk.until_phase("Restarting", attempt=1)
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 130
    status = desk.status()
    assert (status["phase"], status["attempt"], len(status["failures"])) == ("Suspended", 1, 1)
    lines = (desk.folder / "backend.out").read_text().splitlines()
    assert lines[-2:] == ["job: Suspended (Interrupted)", "stopped before attempt 1 began"]


def test_the_second_ctrl_c_kills(desk: Any) -> None:
    (desk.control / "stubborn").touch()
    backend = desk.run(desk.manifest(grace_s=3600))
    desk.until_phase("Running")
    uid = desk.uid()
    backend.send_signal(signal.SIGINT)
    desk.until(lambda: any(one["reason"] == "Interrupted" for one in desk.status()["conditions"]), "first is seen")
    assert backend.poll() is None
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 130
    desk.until_nothing_is_left(uid)
    assert desk.status()["phase"] == "Failed", "nothing was saved"


def test_a_worker_that_does_not_stop_is_killed_after_its_grace(desk: Any) -> None:
    (desk.control / "stubborn").touch()
    backend = desk.run(desk.manifest(grace_s=1))
    desk.until_phase("Running")
    uid = desk.uid()
    backend.send_signal(signal.SIGTERM)
    assert backend.wait(60) == 130
    desk.until_nothing_is_left(uid)


def test_the_job_ends_with_its_terminal(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    uid = desk.uid()
    backend.send_signal(signal.SIGHUP)
    assert backend.wait(60) == 130
    desk.until_nothing_is_left(uid)


def test_a_detached_job_has_left_the_session_and_ends_by_delete(desk: Any) -> None:
    started = desk.cli("run", desk.manifest(), "--detach")
    assert (started.returncode, started.stdout) == (0, "megatronjob.megatronapp.io/job created\n")
    desk.until_phase("Running")
    uid, pid = desk.uid(), json.loads((desk.job() / "backend.json").read_text())["pid"]
    assert os.getsid(pid) not in {os.getsid(0), pid}, "no session of ours, and it cannot get a terminal again"
    deleted = desk.cli("delete", "job")
    assert deleted.returncode == 0, deleted.stderr
    stopping, done = deleted.stdout.splitlines()
    assert re.fullmatch(r"stopping; .*, at most \d+ s", stopping) or "nothing is saved" in stopping
    assert done == 'megatronjob.megatronapp.io "job" deleted'
    desk.until_nothing_is_left(uid)
    assert not desk.job().exists()


def test_a_detached_job_keeps_no_descriptor_of_its_caller(desk: Any) -> None:
    """Check that a script's lock and a pipe that is read to its end are free as soon as the command returns."""
    lock = desk.folder / "lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reading, writing = os.pipe()
        inherited = (held.fileno(), writing)
        command = [sys.executable, str(desk.folder / "driver.py"), "run", desk.manifest(), "--detach"]
        done = subprocess.run(command, env=desk.environment, pass_fds=inherited, capture_output=True, check=False)
        os.close(writing)
    assert done.returncode == 0, done.stderr
    os.set_blocking(reading, False)
    with lock.open() as wanted, open(reading, "rb", buffering=0) as pipe:
        fcntl.flock(wanted, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert pipe.read() == b"", "the end of the file; None would mean that a writer is left"
    pid = json.loads((desk.job() / "backend.json").read_text())["pid"]
    kept = [os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    assert str(lock) not in kept


def test_a_detached_job_starts_without_standard_streams(desk: Any) -> None:
    words = [sys.executable, str(desk.folder / "driver.py"), "run", desk.manifest(), "--detach"]
    closed = subprocess.run(["sh", "-c", f"{shlex.join(words)} <&- >&- 2>&-"], env=desk.environment, check=False)
    assert closed.returncode == 0
    desk.until_phase("Running")


def test_a_running_job_keeps_its_checkpoints_for_itself(desk: Any) -> None:
    manifest = pathlib.Path(desk.manifest())
    manifest.write_text(manifest.read_text() + "  checkpoint: {save: kept}\n")
    backend = desk.run(str(manifest))
    desk.until_phase("Running")
    for words in ((), ("--detach",)):
        refused = desk.cli("run", str(manifest), "--name", "other", *words)
        assert refused.returncode == 1
        assert 'spec.checkpoint.save: kept belongs to the running job "job"' in refused.stderr
    desk.end(0)
    assert backend.wait(60) == 0
    later = desk.run(str(manifest), "--name", "other")
    assert later.wait(60) == 0


def test_a_running_job_is_not_replaced_and_a_finished_one_is(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    for words in ((), ("--detach",)):
        refused = desk.cli("run", desk.manifest(), *words)
        assert refused.returncode == 1
        assert 'is running; stop it with "megatronapp delete job"' in refused.stderr
    beside = desk.run(desk.manifest(), "--name", "other")
    desk.until_phase("Running", name="other")
    first = desk.uid()
    desk.end(0)
    assert (backend.wait(60), beside.wait(60)) == (0, 0)
    again = desk.run(desk.manifest())
    assert again.wait(60) == 0
    assert first not in (desk.job() / "job.yaml").read_text()


def test_a_failing_worker_restarts_the_gang(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    uid = desk.uid()
    desk.end(1, "-1-0")
    desk.until_phase("Running", attempt=1)
    assert not [name for name in desk.shared_memory() if "-a0-" in name]
    failure = desk.status()["failures"][0]
    assert (failure["worker"], failure["rank"], failure["exitCode"], failure["action"]) == (1, 1, 1, "RestartJob")
    desk.end(0)
    assert backend.wait(60) == 0
    assert desk.status()["restarts"] == 1
    desk.until_nothing_is_left(uid)


def test_a_usage_error_fails_the_job_at_once(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    uid = desk.uid()
    desk.end(64, "-0")
    assert backend.wait(60) == 1
    desk.until_nothing_is_left(uid)
    assert (desk.status()["phase"], desk.status()["restarts"]) == ("Failed", 0)


def test_the_budget_of_restarts_ends(desk: Any) -> None:
    desk.end(67, "-1")
    backend = desk.run(desk.manifest())
    assert backend.wait(90) == 1
    status = desk.status()
    assert (status["restarts"], len(status["failures"])) == (2, 3)
    assert status["failures"][-1]["action"] == "FailJob"


def test_a_state_that_cannot_be_written_does_not_end_the_training(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    events = desk.job() / "events.jsonl"
    events.unlink()
    events.mkdir()
    desk.end(0)
    said = (desk.folder / "backend.out").read_text
    desk.until(lambda: "Ctrl-C ends the wait" in said(), "it waits for room")
    assert "the state cannot be written" in said()
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 0, "sooner than it would give up by itself"
    assert "the last state was not written" in said()
    assert desk.status()["phase"] == "Succeeded"


def test_the_end_is_written_when_there_is_room(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    taken = desk.job() / f".status.json.{backend.pid}"  # the status is written there and renamed
    taken.mkdir()
    desk.end(0)
    desk.until(lambda: "Ctrl-C ends the wait" in (desk.folder / "backend.out").read_text(), "it waits for room")
    assert desk.status()["phase"] == "Running"
    taken.rmdir()
    assert backend.wait(60) == 0
    assert desk.status()["phase"] == "Succeeded"
    assert desk.cli("get").stdout.splitlines()[1].split()[:2] == ["job", "Succeeded"]


def test_a_worker_that_cannot_be_started_is_tried_again_as_any_that_failed(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    uid = desk.uid()
    (desk.job() / "attempt-1").touch()
    desk.end(1, "-1-0")
    desk.until_phase("Running", attempt=2)
    failure = desk.status()["failures"][-1]
    assert (failure["attempt"], failure["reason"], failure["action"]) == (1, "WorkerNotStarted", "RestartJob")
    assert "worker 0 could not be started: Not a directory" in failure["message"]
    assert "WorkerNotStarted" in desk.cli("describe", "job").stdout
    desk.end(0)
    assert backend.wait(60) == 0
    assert desk.status()["restarts"] == 2
    desk.until_nothing_is_left(uid)


def test_what_a_full_disk_held_back_is_told_when_there_is_room(desk: Any) -> None:
    backend = desk.run(desk.manifest())
    desk.until_phase("Running")
    events = desk.job() / "events.jsonl"
    events.rename(desk.folder / "kept")
    events.symlink_to("/dev/full")
    desk.end(1, "-1-0")
    desk.until_phase("Running", attempt=1)
    assert "No space left on device" in (desk.folder / "backend.out").read_text()
    (desk.folder / "kept").rename(events)
    told = events.read_text
    desk.until(lambda: "attempt 1 starts in" in told() and "of attempt 1 train" in told(), "held events are told")
    desk.end(0)
    assert backend.wait(60) == 0


def test_on_a_terminal_the_pages_stay_open_until_ctrl_c(desk: Any) -> None:
    terminal, backend = desk.run_on_terminal(desk.manifest(analyzer=True, retain_s=3600))
    desk.until_phase("Running")
    desk.end(0)
    desk.until_phase("Succeeded")
    desk.until(lambda: "Ctrl-C closes them" in terminal.read(), "it says that the pages stay")
    uid = desk.uid()
    assert desk.processes(uid, word="hub.py")
    backend.send_signal(signal.SIGINT)
    assert backend.wait(60) == 0
    desk.until_nothing_is_left(uid)
    assert "hubUrl" not in desk.status()


def test_a_terminal_that_is_gone_silences_the_job_and_does_not_end_it(desk: Any) -> None:
    terminal, backend = desk.run_on_terminal(desk.manifest(), "--follow")
    desk.until_phase("Running")
    terminal.close()
    desk.end(1, "-0-0")
    desk.until_phase("Running", attempt=1)
    desk.end(0)
    assert backend.wait(60) == 0


def test_follow_prints_the_log_of_the_reporting_rank(desk: Any) -> None:
    backend = desk.run(desk.manifest(), "--follow")
    desk.until_phase("Running")
    desk.end(0)
    assert backend.wait(60) == 0
    lines = (desk.folder / "backend.out").read_text().splitlines()
    assert "line of rank 1, attempt 0" in lines
    assert "step 3/5  loss 1.5000" in lines
    assert lines[-1] == "job: Succeeded"


def test_a_bad_manifest_is_refused_with_code_2(desk: Any) -> None:
    path = desk.folder / "bad.yaml"
    path.write_text("kind: MegatronJob\n")
    done = desk.cli("run", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    missing = desk.cli("run", str(desk.folder / "absent.yaml"))
    assert (missing.returncode, "cannot read the manifest" in missing.stderr) == (2, True)
