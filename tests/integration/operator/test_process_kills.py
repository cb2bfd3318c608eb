"""Process backend when a process is killed or stopped: no process remains, and what is shown is true."""

import json
import os
import signal
import time
from typing import Any

import psutil
import pytest

RETAINED = (
    "test_kill_9_of_the_backend_leaves_no_process_and_is_recorded",
    "test_kill_9_of_a_launcher_takes_its_ranks_and_restarts_the_gang",
)
pytestmark = [pytest.mark.process, pytest.mark.full("kills of the other processes", but=RETAINED)]


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, number)


@pytest.fixture
def running(process_backend: Any) -> Any:
    """Start a job that runs, with its agents and its hub."""
    process_backend.backend = process_backend.run(process_backend.manifest(analyzer=True, grace_s=2))
    process_backend.until_phase("Running")
    process_backend.job_uid = process_backend.uid()
    process_backend.until(
        lambda: len(process_backend.processes(process_backend.job_uid)) == 9,
        "2 x (launcher, 2 children, agent) and the hub",
    )
    process_backend.until_processes(process_backend.job_uid, 1, "hub.py")
    process_backend.until(lambda: len(agents_of(process_backend)) == 2, "both agents")
    process_backend.until(lambda: len(process_backend.guardians(process_backend.job_uid)) == 1, "the guardian")
    return process_backend


def agents_of(process_backend: Any) -> set[int]:
    """Return the children of the backend that only sleep; the substitutes of ranks sleep, too, but below a launcher."""
    return {child.pid for child in psutil.Process(process_backend.backend.pid).children() if sleeps(child)}


def sleeps(process: psutil.Process) -> bool:
    """Return whether it only sleeps; one that ends meanwhile does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "time.sleep" in process.cmdline()[-1]
    except (psutil.NoSuchProcess, IndexError):
        return False


def finish(process_backend: Any) -> None:
    process_backend.end(0)
    assert process_backend.backend.wait(180) == 0
    process_backend.until_nothing_is_left(process_backend.job_uid)


def test_kill_9_of_the_backend_leaves_no_process_and_is_recorded(running: Any) -> None:
    running.backend.kill()
    running.backend.wait(180)
    running.until_nothing_is_left(running.job_uid)
    shown = running.cli("get", "job", "-o", "json")
    status = json.loads(shown.stdout)["status"]
    assert status["phase"] == "Failed"
    assert (
        next(condition for condition in status["conditions"] if condition["type"] == "Failed")["reason"]
        == "BackendLost"
    )
    assert "hubUrl" not in status
    assert running.cli("wait", "job", "--for=condition=Complete", "--timeout=200s").returncode == 1


def test_kill_9_of_the_backend_and_its_guardian_is_cleaned_up_by_the_next_command(running: Any) -> None:
    kill(running.guardians(running.job_uid), signal.SIGSTOP)
    running.backend.kill()
    running.backend.wait(180)
    kill(running.guardians(running.job_uid))
    assert running.shared_memory(), "nobody is there to remove it"
    assert running.cli("get").returncode == 0
    running.until_nothing_is_left(running.job_uid)


def test_kill_9_of_the_guardian_starts_a_new_guardian(running: Any) -> None:
    (old,) = running.guardians(running.job_uid)
    kill([old])
    running.until(lambda: set(running.guardians(running.job_uid)) - {old}, "a new guardian")
    finish(running)


def test_kill_9_of_a_launcher_takes_its_ranks_and_restarts_the_gang(running: Any) -> None:
    old = running.processes(running.job_uid, 1)
    kill(running.processes(running.job_uid, 1, "launcher.py"))
    running.until_phase("Running", attempt=1)
    assert not set(old) & set(running.processes(running.job_uid))
    failure = running.status()["failures"][0]
    assert (failure["worker"], failure["signal"], failure["reason"]) == (1, 9, "LauncherKilled")
    finish(running)


def test_kill_9_of_an_agent_starts_a_new_agent_and_changes_nothing_besides(running: Any) -> None:
    agents = agents_of(running)
    kill(sorted(agents)[:1])
    running.until(lambda: len(agents_of(running) | agents) == 3, "a new agent")
    assert running.status()["attempt"] == 0
    finish(running)


def test_kill_9_of_the_hub_brings_it_back_at_the_same_address(running: Any) -> None:
    url = running.status()["hubUrl"]
    (old,) = running.processes(running.job_uid, argument="hub.py")
    kill([old])
    running.until(lambda: set(running.processes(running.job_uid, argument="hub.py")) - {old}, "a new hub")
    assert running.status()["hubUrl"] == url
    assert running.cli("ui", "job", "--print").stdout.startswith(url)
    finish(running)


def test_stopped_processes_do_not_hold_up_the_end(running: Any) -> None:
    kill(running.processes(running.job_uid), signal.SIGSTOP)
    kill(running.guardians(running.job_uid), signal.SIGSTOP)
    running.backend.send_signal(signal.SIGINT)
    assert running.backend.wait(180) == 130
    running.until(lambda: not running.processes(running.job_uid), "no process is left")
    assert running.shared_memory() == []


def test_delete_ends_a_backend_that_is_stopped(running: Any) -> None:
    running.backend.send_signal(signal.SIGSTOP)
    deleted = running.cli("delete", "job", "--force")
    assert deleted.returncode == 0, deleted.stderr
    running.until_nothing_is_left(running.job_uid)


def test_a_stopped_backend_continues(running: Any) -> None:
    """Stop it for longer than it waits for signals: its wait is over when it is continued."""
    running.backend.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    running.backend.send_signal(signal.SIGCONT)
    finish(running)
