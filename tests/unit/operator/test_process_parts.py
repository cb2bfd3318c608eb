"""The parts of the process backend, one by one."""

import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
import pathlib
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common import child
from megatronapp_common.job import Status, load_job, status_document
from megatronapp_common.names import Env
from megatronapp_common.processes import is_locked
from megatronapp_common.shared_memory_space import LEAST_BYTES, SharedMemorySpace
from megatronapp_common.state import jobs_dir
from megatronapp_common.web import tokens
from megatronapp_operator.backends.process import job_processes, settings, settings_builder, signals
from megatronapp_operator.backends.process.backend import ProcessBackend
from megatronapp_operator.backends.process.state import files, lock, registry
from megatronapp_operator.backends.process.state.paths import JobPaths, shm_prefix
from megatronapp_operator.backends.process.worker import WorkerProcess, read_outcome, worker_not_started
from megatronapp_operator.cli.follower import LogTail
from megatronapp_operator.errors import JobConflictError
from megatronapp_operator.plan import Action, EnsureHub, HubPhase, Progress, RecordEvent
from megatronapp_operator.plan.outcome import describe
from megatronapp_operator.plan_io import hub_summary
from megatronapp_operator.plan_io.spec_reader import process_spec

DEADLINE_S = 120.0
SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
MANIFEST: dict[str, Any] = {
    "apiVersion": "megatronapp.io/v1alpha1",
    "kind": "MegatronJob",
    "metadata": {"name": "job"},
    "spec": {
        "nodes": 2,
        "procPerNode": 2,
        "parallelism": {"pipeline": 2},
        "model": {"numLayers": 2, "hiddenSize": 8, "numAttentionHeads": 1, "seqLength": 8, "vocabSize": 32},
        "training": {"microBatchSize": 1, "globalBatchSize": 2, "trainIters": 5, "lr": 0.001},
        "data": {"mock": True},
        "env": [{"name": "MINE", "value": "1"}],
        "runPolicy": {"maxRestarts": 7, "progressDeadlineSeconds": 60, "terminationGracePeriodSeconds": 20},
    },
}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes that carry a job's environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(uid: str, worker: int = 0) -> subprocess.Popen[bytes]:
        own: dict[str, str] = {Env.JOB_UID: uid, Env.ATTEMPT: "0", Env.WORKER_INDEX: str(worker)}
        process = subprocess.Popen(SLEEP, env=os.environ | own, start_new_session=True)
        started.append(process)
        while not pathlib.Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.001)  # the kernel shows it a moment after Popen returns
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_processes_are_found_by_job_attempt_and_worker(sleeper: Any) -> None:
    uid = registry.new_uid()
    longer = f"{uid}b"
    first, tenth, other = sleeper(uid, 1), sleeper(uid, 10), sleeper(longer, 1)
    assert set(job_processes.find(job_processes.ProcessSelector(uid=uid))) == {first.pid, tenth.pid}
    assert job_processes.find(job_processes.ProcessSelector(uid=uid, attempt=0, worker=1)) == [first.pid]
    assert job_processes.find(job_processes.ProcessSelector(uid=uid, attempt=1)) == []
    assert job_processes.find(job_processes.ProcessSelector(uid=longer)) == [other.pid]


def test_a_sweep_kills_the_processes_of_its_job_also_stopped_ones(sleeper: Any) -> None:
    uid = registry.new_uid()
    mine, stopped, other = sleeper(uid), sleeper(uid), sleeper(registry.new_uid())
    stopped.send_signal(signal.SIGSTOP)
    assert job_processes.sweep(job_processes.ProcessSelector(uid=uid))
    assert (mine.wait(DEADLINE_S), stopped.wait(DEADLINE_S)) == (-9, -9)
    assert other.poll() is None


def test_shared_memory_is_removed_by_prefix(tmp_path: pathlib.Path) -> None:
    for name in ("megatronapp-u-a0-w1.x", "megatronapp-u-a0-w10.x", "megatronapp-u2-a0-w1.x"):
        (tmp_path / name).touch()
    assert job_processes.remove_shared_memory(tmp_path, shm_prefix("u", 0, 1) + ".") == ["megatronapp-u-a0-w1.x"]
    assert job_processes.remove_shared_memory(tmp_path, shm_prefix("u")) == ["megatronapp-u-a0-w10.x"]
    assert [path.name for path in tmp_path.iterdir()] == ["megatronapp-u2-a0-w1.x"]


def test_a_child_dies_with_its_parent() -> None:
    """The parent starts a child through the wrapper and is killed with no chance to say a word."""
    script = (
        "import subprocess, sys, os, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', {child.__file__!r}, str(os.getpid()), *{SLEEP!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    line = pathlib.Path(f"/proc/{pid}/cmdline")
    until(lambda: b"time.sleep(600)" in line.read_bytes() and b"child.py" not in line.read_bytes())
    with os.fdopen(os.pidfd_open(pid), "rb") as process:
        parent.kill()
        parent.wait()
        assert select.select([process], [], [], DEADLINE_S)[0]


def test_a_child_of_another_parent_does_not_even_start() -> None:
    command = [sys.executable, "-I", "-S", child.__file__, "1", "/bin/echo", "hello"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_program_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), "/no/such/program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert done.stderr == "cannot start /no/such/program: No such file or directory\n"


def test_a_lock_is_seen_waited_out_and_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job" / "backend.lock"
    assert not is_locked(path)
    path.parent.mkdir()
    with lock.hold(path):
        assert is_locked(path)
        with pytest.raises(JobConflictError, match="job: another megatronapp process"), lock.hold(path):
            pass
    assert not is_locked(path)


def test_a_shared_lock_of_an_observer_makes_no_backend_fail(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "backend.lock"
    asking = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)  # by a process that does not get a processor to let go
    monkeypatch.setattr(lock, "PATIENCE_S", -1.0)
    monkeypatch.setattr(time, "sleep", lambda _s: os.close(asking))
    with lock.hold(path):
        assert is_locked(path)


def test_the_last_line_is_printed_without_its_end_once_nothing_follows(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("first\nkilled in the mid")
    tail = LogTail(log)
    assert tail.lines() == ["first"]
    assert tail.lines() == []
    assert tail.lines(final=True) == ["killed in the mid"]
    assert tail.lines(final=True) == []


def make_backend(made: settings.ProcessSettings, received: list[Action]) -> ProcessBackend:
    made.paths.root.mkdir(exist_ok=True)
    files.write_text(made.paths.secret, tokens.new_secret())
    spec = process_spec(load_job(MANIFEST), uid=made.uid, retain_hub=True)
    return ProcessBackend(made, spec, facts={}, listener=lambda _status, actions: received.extend(actions))


def test_a_hub_that_cannot_be_started_is_reported_and_retried_later(tmp_path: pathlib.Path) -> None:
    made = make_settings(tmp_path, analyzer=True)
    actions: list[Action] = []
    backend = make_backend(made, actions)
    made.paths.hub_log.mkdir()  # as good as a full disk
    backend._act(EnsureHub(), 5.0)
    seen = backend._observe().hub
    assert seen is not None and (seen.phase, seen.ended_at, seen.starts) == (HubPhase.ENDED, 5.0, 1)
    assert [action.reason for action in actions if isinstance(action, RecordEvent)] == ["HubNotStarted"]
    assert [entry["reason"] for entry in files.read_lines(made.paths.events)] == ["HubNotStarted"]
    assert backend._hub is not None
    backend._hub.close()


def test_an_agent_that_cannot_be_started_leaves_its_worker_alone(tmp_path: pathlib.Path) -> None:
    made = make_settings(tmp_path, analyzer=True, shm=tmp_path)
    made = dataclasses.replace(made, commands=dataclasses.replace(made.commands, launcher=SLEEP))
    environment = settings.worker_environment(made, index=0, attempt=0, coordinator="", hub_url="")
    worker = WorkerProcess(made, index=0, attempt=0, environment=environment, now=0.0)
    try:
        (made.paths.run_dir(0, 0) / "agent.log").mkdir()
        worker.tick(1.0)
        assert worker.trouble is not None and "agent of worker 0 cannot be started" in worker.trouble
        assert worker.observe().live
        worker.trouble = None
        worker.tick(1.5)
        assert worker.trouble is None, "the next try comes later"
    finally:
        worker.delete(0, 2.0)

        def ended() -> bool:
            worker.tick(100.0)
            return worker.gone

        until(ended)


def test_a_backend_does_not_wait_for_disk_space_without_limit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_settings(tmp_path)
    backend = make_backend(made, [])
    made.paths.status.mkdir()
    monkeypatch.setattr("megatronapp_operator.backends.process.backend.FINAL_STATUS_RETRY_S", 0.0)
    with signals.received() as arrived:
        backend._write_to_the_end(arrived)
    assert "the last state was not written" in capsys.readouterr().err


def test_a_warning_on_a_full_disk_breaks_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached backend's standard error is a file on the disk that is full."""
    made = make_settings(tmp_path)
    backend = make_backend(made, [])
    made.paths.status.mkdir()
    full = io.TextIOWrapper(io.FileIO("/dev/full", "wb"), write_through=True)
    monkeypatch.setattr(sys, "stderr", full)
    backend._store()
    monkeypatch.undo()
    with contextlib.suppress(OSError):  # it tries once more
        full.close()
    assert made.paths.status in backend._state.unwritable


def test_shared_memory_is_measured_without_a_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(make_settings(tmp_path, shm=tmp_path), [])
    for free, expected in ((LEAST_BYTES, ()), (0, (f"{tmp_path} (64 MiB) has less than 4 MiB free",))):
        space = SharedMemorySpace(path=str(tmp_path), total=64 << 20, free=free)
        monkeypatch.setattr(SharedMemorySpace, "measure", lambda _folder, space=space: space)
        assert backend._observe().full_shared_memory == expected


def test_processes_that_cannot_be_killed_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_settings(tmp_path)
    backend = make_backend(made, [])
    monkeypatch.setattr(job_processes, "sweep", lambda _selector: False)
    monkeypatch.setattr(job_processes, "find", lambda _selector: [41, 42])
    backend._sweep()
    assert "could not be ended" in (errors := capsys.readouterr().err) and "41, 42" in errors
    assert files.read_lines(made.paths.events)[0]["reason"] == "ProcessesLeft"


def test_a_json_file_is_whole_or_absent(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.json"
    assert files.read_json(path) is None
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text('{"a":')
    assert files.read_json(path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_half_written_event_is_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    files.append_json(path, [{"n": 1}])
    with path.open("a") as file:
        file.write('{"n": 2')
    assert files.read_lines(path) == [{"n": 1}]
    files.append_json(path, [{"n": 3}, {"n": 4}])
    assert files.read_lines(path) == [{"n": 1}, {"n": 4}], "the broken line is lost, and nothing else"


def test_events_are_written_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    files.append_json(path, [{"n": 1}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 12, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            files.append_json(path, [{"n": 2}, {"n": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert files.read_lines(path) == [{"n": 1}]


def test_a_worker_that_cannot_be_started_is_treated_as_failed(tmp_path: pathlib.Path, sleeper: Any) -> None:
    of_another_job = sleeper(make_settings(tmp_path).uid)
    made = make_settings(tmp_path)
    run_dir = made.paths.run_dir(0, 0)
    run_dir.parent.mkdir(parents=True)
    run_dir.touch()
    environment = settings.worker_environment(made, index=0, attempt=0, coordinator="127.0.0.2:1", hub_url="")
    worker = WorkerProcess(made, index=0, attempt=0, environment=environment, now=5.0)
    seen = worker.observe()
    assert seen.outcome is not None
    assert (seen.phase, seen.finished_at, seen.outcome.reason) == ("Failed", 5.0, "WorkerNotStarted")
    assert describe(seen, "job") == f"worker 0 could not be started: File exists ({run_dir})"
    worker.delete(0, 6.0)
    worker.tick(6.0)
    assert (worker.gone, worker.pids) == (True, set())
    assert of_another_job.poll() is None


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 67), (errno.EAGAIN, 1)])
def test_a_full_disk_is_reported_by_its_code(number: int, code: int) -> None:
    assert worker_not_started(OSError(number, os.strerror(number))).code == code


WAITS_FOR_SIGNALS = """
import os, signal, threading
from megatronapp_operator.backends.process import signals
ended = threading.Event()
thread = threading.Thread(target=ended.wait)  # as libraries start some when they are imported
thread.start()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.received() as arrived:
    os.kill(os.getpid(), signal.SIGHUP)
    signal.pthread_kill(thread.ident, signal.SIGTERM)  # the kernel may choose any thread
    os.kill(os.getpid(), signal.SIGINT)
    assert {arrived.wait(120), arrived.wait(120)} == {signal.SIGTERM, signal.SIGINT}
    assert arrived.wait(-1) is None
    assert arrived.wait(0.01) is None
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
ended.set()
"""


def test_signals_are_received_by_any_thread_and_ignored_ones_stay_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS_FOR_SIGNALS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@given(st.integers(0, 100_000))
def test_every_worker_has_a_loopback_address_of_its_own(index: int) -> None:
    address = settings.worker_address(index)
    assert socket.inet_aton(address)[0] == 127
    assert int.from_bytes(socket.inet_aton(address)) - (127 << 24) == index + 2


def make_settings(tmp_path: pathlib.Path, **changes: Any) -> settings.ProcessSettings:
    """Build the settings of a job with a unique uid.

    The process backend kills all processes that have the uid of its job. With a uid that another test uses, it would
    kill the gang of that test.
    """
    job = load_job(MANIFEST)
    commands = settings_builder.build_commands(job)
    made = settings_builder.build_settings(job, uid=registry.new_uid(), paths=JobPaths(tmp_path), commands=commands)
    return dataclasses.replace(made, **changes)


def test_the_environment_of_a_worker_matches_the_contract(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.HUB_URL, "http://another.job")
    made = settings.worker_environment(
        make_settings(tmp_path, uid="u"), index=1, attempt=3, coordinator="127.0.0.2:20000", hub_url=""
    )
    assert {name: made[name] for name in Env if name in made and name is not Env.SHM_DIR} == {
        Env.JOB: "job",
        Env.JOB_UID: "u",
        Env.ATTEMPT: "3",
        Env.WORKER_INDEX: "1",
        Env.NUM_WORKERS: "2",
        Env.PROC_PER_NODE: "2x2",
        Env.COORDINATOR: "127.0.0.2:20000",
        Env.ADDRESS: "127.0.0.3",
        Env.NODE_NAME: "node-1",
        Env.SECRET_FILE: str(tmp_path / "secret"),
        Env.SHM_PREFIX: "megatronapp-u-a3-w1",
        Env.RUN_DIR: str(tmp_path / "attempt-3" / "worker-1"),
        Env.TERMINATION_LOG: str(tmp_path / "attempt-3" / "worker-1" / "termination.json"),
    }
    assert (made["GLOO_SOCKET_IFNAME"], made["MINE"], made["CUDA_VISIBLE_DEVICES"]) == ("lo", "1", "")


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, ["2", "3"]), ("4,5,6,7", ["6", "7"]), ("GPU-a", [])], ids=["all", "some", "too few"]
)
def test_workers_of_a_host_get_separate_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    world = load_job({**MANIFEST, "spec": {**MANIFEST["spec"], "gpusPerNode": 2}}).world
    assert settings.worker_devices(world, 1) == devices


def test_the_commands_are_those_of_the_contract(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "dist"
    page.mkdir()
    (page / "index.html").touch()
    monkeypatch.setenv(settings_builder.FRONTEND_ENV, str(page))
    commands = settings_builder.build_commands(load_job(MANIFEST))
    assert commands.launcher[1:4] == ("-m", "megatronapp_trainer.launch", "--")
    assert "--pipeline-model-parallel-size" in commands.launcher
    assert commands.agent[1:] == ("-m", "megatronapp_analyzer.agent")
    hub = ("-m", "megatronapp_analyzer.hub", "--frontend", str(page))
    assert commands.hub[1:] == (*hub, "--jobs-dir", str(jobs_dir()))
    open_to_others = MANIFEST | {"spec": MANIFEST["spec"] | {"analyzer": {"enabled": True, "host": "0.0.0.0"}}}
    assert settings_builder.build_commands(load_job(open_to_others)).hub[1:] == (*hub, "--allow-remote"), (
        "no list of other jobs"
    )


def test_the_run_policy_reaches_the_plan() -> None:
    spec = process_spec(load_job(MANIFEST), uid="u", retain_hub=True)
    assert (spec.workers, spec.hub, spec.hub_retain_s) == (2, False, 300)
    assert spec.policy.max_restarts == 7
    assert spec.policy.progress_deadline_s == 60
    assert spec.policy.grace_s == 20
    assert process_spec(load_job(MANIFEST), uid="u", retain_hub=False).hub_retain_s == 0


def test_the_progress_that_is_furthest_on_wins() -> None:
    pages = [
        Progress(attempt=0, iteration=9),
        None,
        Progress(attempt=1, iteration=2, updated_at=1.0),
        Progress(attempt=1, iteration=2, updated_at=2.0, loss=1.0),
    ]
    newest = hub_summary.newest(pages)
    assert newest is not None and newest.loss == 1.0
    assert hub_summary.newest([None]) is None
    assert hub_summary.read_progress({"state": "starting"}) is None


def test_the_time_of_a_page_is_text_there_and_in_the_status() -> None:
    page = hub_summary.read_progress({"iteration": 1, "updatedAt": "2026-11-21T10:33:16.500+00:00"})
    assert page is not None and page.updated_at == 1795257196.5
    assert hub_summary.newest([page, hub_summary.read_progress({"iteration": 1})]) == page
    assert status_document(Status(progress=page))["progress"]["updatedAt"] == "2026-11-21T10:33:16Z"


def test_a_loss_that_is_no_number_never_reaches_the_status() -> None:
    text = '{"iteration": 1, "loss": NaN, "gradNorm": Infinity, "tokensPerSecond": 5.5}'
    page = hub_summary.read_progress(json.loads(text))
    assert page is not None
    document = status_document(Status(progress=page))["progress"]
    assert document["tokensPerSecond"] == 5.5
    assert "NaN" not in json.dumps(document) and "Infinity" not in json.dumps(document)


@pytest.mark.parametrize(
    "document",
    [None, [], "text", {}, {"progress": 3, "slowRanks": [], "hungRanks": []}, {"progress": None, "slowRanks": [{}]}],
)
def test_a_summary_of_another_shape_is_none(document: object) -> None:
    assert hub_summary.read_summary(document) is None


def test_of_control_actions_the_newest_are_read_each_once_in_bounds() -> None:
    actions = [{"id": number, "at": "", "who": "jane\n\x1b[1m", "what": "w" * 9_999} for number in range(300)]
    read = hub_summary.read_controls([*actions, actions[-1], {"id": 1 << 60, "at": "", "who": "", "what": ""}])
    assert [action.id for action in read] == list(range(46, 300))
    assert {len(action.text) for action in read} == {len("jane ?[1m ") + hub_summary.MAX_WHAT}
    assert "\x1b" not in read[0].text and "\n" not in read[0].text
    answer: dict[str, Any] = {"attempt": 0, "progress": None, "slowRanks": [], "hungRanks": []}
    odd: list[Any] = [None, 3, "text", {}, [{}], [{"id": "x", "who": 1, "what": 2}], [None]]
    for actions in odd:
        summary = hub_summary.read_summary(answer | {"actions": actions})
        assert summary is not None and summary.controls == (), "what cannot be read takes no verdict away"


def test_an_outcome_is_read_or_made_of_the_exit_status(tmp_path: pathlib.Path) -> None:
    record, log = tmp_path / "termination.json", tmp_path / "launcher.log"
    assert read_outcome(record, 3, log).message == ""
    log.write_text("first\nlast words\n")
    assert read_outcome(record, 3, log).message == "last words"
    record.write_text('{"code": 65, "reason": "BadData", "message": "no tokens", "rank": 2, "signal": null}')
    outcome = read_outcome(record, 65, log)
    assert (outcome.code, outcome.reason, outcome.rank) == (65, "BadData", 2)
    killed = read_outcome(record, -9, log)
    assert (killed.code, killed.signal) == (1, 9), "a record from before it was killed says nothing about that"
