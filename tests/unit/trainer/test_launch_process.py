"""Real launchers with real ranks, which are ten lines of Python in place of a training run."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from launchers import DEADLINE_S, Gang, alive, wait_until

from megatronapp_common.names import ExitCode
from megatronapp_common.trace import RECORD, Counter, RecordKind
from megatronapp_native import RingReader
from megatronapp_trainer.launch.config import address
from megatronapp_trainer.launch.ranks import process

pytestmark = pytest.mark.process


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path)
    yield gang
    gang.close()


BOTH = {0: [0, 1], 1: [2, 3]}


def assert_nothing_left(gang: Gang, pids: list[int]) -> None:
    assert list(gang.shm.iterdir()) == []
    wait_until(lambda: not any(map(alive, pids)))


def test_a_gang_runs_to_its_end(gang: Gang) -> None:
    gang.start(dict.fromkeys(range(4), "finish"))
    pids = gang.running(BOTH)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK]
    tables = [json.loads((worker.run_dir / "rank-table.json").read_text()) for worker in gang.workers]
    assert tables[0] == tables[1]
    assert [worker["ranks"] for worker in tables[0]["workers"]] == [[0, 1], [2, 3]]
    for worker, ranks in zip(gang.workers, BOTH.values(), strict=True):
        assert worker.record()["code"] == 0
        for rank in ranks:
            lines = (worker.run_dir / f"rank-{rank}.log").read_text().splitlines()
            assert lines[0] == "arguments ['--num-layers', '4']"
            environment = json.loads(lines[1].removeprefix("environment "))
            assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "4")
            assert environment["MASTER_PORT"] == str(tables[0]["masterPort"])
    assert_nothing_left(gang, pids)


@pytest.mark.full("codes are mapped by a pure function", but=("exit7", "kill"))
@pytest.mark.parametrize(
    ("action", "code", "number", "message"),
    [
        ("exit65", ExitCode.DATA, None, "rank 3 on worker 1 ended with exit code 65: error: this is why"),
        ("exit7", 7, None, "rank 3 on worker 1 ended with exit code 7: error: this is why"),
        ("kill", ExitCode.OWN_FAILURE, 9, "rank 3 on worker 1 ended with signal 9"),
    ],
    ids=["exit65", "exit7", "kill"],
)
def test_the_first_failing_rank_is_the_evidence(
    gang: Gang, action: str, code: int, number: int | None, message: str
) -> None:
    gang.start({3: action})
    pids = gang.running(BOTH)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.PEER_LOST, code]
    victim, culprit = (worker.record() for worker in gang.workers)
    assert (culprit["rank"], culprit["localRank"], culprit["signal"]) == (3, 1, number)
    assert (victim["rank"], victim["reason"]) == (None, "PeerLost")
    assert message in victim["message"]
    if number is None:
        assert culprit["message"].endswith("error: this is why")
    assert_nothing_left(gang, pids)


def test_a_victim_that_ends_first_is_not_taken_for_the_culprit(gang: Gang) -> None:
    gang.start({1: f"exit{ExitCode.PEER_LOST}", 3: "exit66"}, grace_s=20)
    gang.running(BOTH)
    gang.go()
    wait_until(lambda: "ended with exit code 66" in gang.workers[0].output())
    for pid in gang.running({0: [0], 1: [2]}):
        os.kill(pid, signal.SIGKILL)  # what they would do by themselves; spares the test the grace
    assert [worker.end() for worker in gang.workers] == [ExitCode.PEER_LOST, ExitCode.NOT_FINITE]
    assert "rank 3 on worker 1 ended with exit code 66" in gang.workers[0].record()["message"]


def test_hanging_ranks_learn_of_a_lost_peer_and_end_by_themselves(gang: Gang) -> None:
    gang.start({0: "watch", 1: "watch", 2: "watch", 3: "wait"}, grace_s=DEADLINE_S)
    pids = gang.running(BOTH)
    gang.go()
    watching = [gang.workers[0].run_dir / "state-0", gang.workers[0].run_dir / "state-1"]
    watching += [gang.workers[1].run_dir / "state-2"]
    wait_until(lambda: all(path.read_text() == "watches" for path in watching))
    os.kill(pids[3], signal.SIGKILL)
    assert [worker.end() for worker in gang.workers] == [ExitCode.PEER_LOST, ExitCode.OWN_FAILURE]
    for rank, worker in enumerate([gang.workers[0], gang.workers[0], gang.workers[1]]):
        assert f"rank {rank} ended with exit code {ExitCode.PEER_LOST}" in worker.output()
        lines = (worker.run_dir / f"rank-{rank}.log").read_text().splitlines()
        assert lines[-2] == "told of a loss"
        assert "this one would wait for it for ever" in lines[-1]
    assert gang.workers[1].record()["rank"] == 3


def test_who_leaves_by_itself_when_a_peer_is_lost_ends_as_it_likes() -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from megatronapp_trainer.parallel import peer_loss\n"
        "peer_loss.LINGER_S = 600\n"
        "before, heard = signal.getsignal(peer_loss.PEER_LOST), threading.Event()\n"
        "with peer_loss.PeerLossListener(heard.set):\n"
        "    os.kill(os.getpid(), signal.SIGCHLD)\n"
        "    os.kill(os.getpid(), peer_loss.PEER_LOST)\n"
        "    heard.wait()\n"
        "assert signal.getsignal(peer_loss.PEER_LOST) is before and signal.set_wakeup_fd(-1) == -1\n"
        "sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7


def test_a_killed_launcher_takes_its_ranks_along_and_the_others_stop(gang: Gang) -> None:
    gang.start({})
    pids = gang.running(BOTH)
    gang.workers[1].process.kill()
    assert gang.workers[0].end() == ExitCode.PEER_LOST
    assert "the launcher of worker 1 has ended" in gang.workers[0].record()["message"]
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.full("both have one handler", but=("TERM",))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_stop_is_passed_on_and_answered_by_a_checkpoint(gang: Gang, number: signal.Signals) -> None:
    gang.start(dict.fromkeys(range(4), "polite"))
    pids = gang.running(BOTH)
    gang.go()
    for worker in gang.workers:
        worker.process.send_signal(number)
    assert [worker.end() for worker in gang.workers] == [ExitCode.PREEMPTED] * 2
    assert (gang.workers[1].run_dir / "state-3").read_text() == "checkpointed"
    assert gang.workers[0].record()["reason"] == "Preempted"
    assert_nothing_left(gang, pids)


@pytest.mark.full("test_launch_pod stops ranks before they can answer, too")
def test_ranks_without_a_handler_yet_are_stopped_too(gang: Gang) -> None:
    gang.start({0: "wait", 1: "polite", 2: "wait", 3: "wait"})
    pids = gang.running(BOTH)
    for worker in gang.workers:
        worker.process.send_signal(signal.SIGTERM)
    assert [worker.end() for worker in gang.workers] == [ExitCode.PREEMPTED] * 2
    assert_nothing_left(gang, pids)


def test_a_stop_while_gathering_ends_at_once(gang: Gang) -> None:
    gang.start({}, only=0)
    worker = gang.workers[0]
    host, _, port = gang.coordinator.rpartition(":")
    listening = f"{host}:{port}"
    wait_until(
        lambda: any(
            listening == f"{connection.laddr.ip}:{connection.laddr.port}"
            for connection in connections(worker.process.pid)
        )
    )
    worker.process.terminate()
    assert worker.end() == ExitCode.PREEMPTED


def connections(pid: int) -> list[Any]:
    return list(psutil.Process(pid).net_connections("inet"))


def test_orphans_of_a_rank_are_killed(gang: Gang) -> None:
    gang.start({0: "orphan", 1: "finish", 2: "finish", 3: "finish"})
    gang.running(BOTH)
    gang.go()
    assert gang.workers[0].end() == ExitCode.OK
    first_line = (gang.workers[0].run_dir / "rank-0.log").read_text().splitlines()[0]
    assert not alive(int(first_line.removeprefix("orphan ")))


def test_a_process_that_cannot_be_killed_does_not_hold_the_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with subprocess.Popen(["sleep", "600"]) as stuck:
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "children", lambda _self, recursive: [psutil.Process(stuck.pid)])
            patch.setattr(psutil.Process, "kill", lambda _self: None)  # as in state D
            patch.setattr(process, "reap", lambda: iter(()))
            process.kill_descendants(limit_s=0.2)
        assert stuck.poll() is None
        assert f"cannot be killed: process {stuck.pid}" in caplog.text
        stuck.kill()


def test_counters_reach_the_worker_ring_where_a_hub_is(gang: Gang) -> None:
    gang.start(dict.fromkeys(range(4), "finish"), HUB_URL="http://127.0.0.1:1")
    gang.running(BOTH)
    path = gang.shm / "demo-w1.worker.ring"
    wait_until(path.exists)
    reader = RingReader(str(path))
    wait_until(lambda: reader.info().head >= 2)
    gang.go()
    wait_until(lambda: reader.info().closed)
    records = np.frombuffer(reader.read(1000)[0], RECORD)
    assert set(records["kind"]) == {RecordKind.COUNTER}
    assert set(records["comm"]) <= {counter.value for counter in Counter}
    waits = records[records["comm"] == Counter.RANK_RUN_QUEUE]
    assert set(waits["ordinal"]) <= {0, 1}
    values = records["aux"].view("<f4")
    assert np.all((values >= 0) & np.isfinite(values))
    assert json.loads(reader.info().metadata)["worker"] == 1
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK]
    assert list(gang.shm.iterdir()) == []


def test_missing_settings_are_a_usage_error_with_a_record(gang: Gang) -> None:
    gang.start({}, only=0, PROC_PER_NODE="")
    assert gang.workers[0].end() == ExitCode.USAGE
    assert "MEGATRONAPP_PROC_PER_NODE is not set" in gang.workers[0].output()
    assert gang.workers[0].record()["reason"] == "BadSettings"


def test_a_port_in_use_ends_the_gathering(gang: Gang) -> None:
    host, _, port = gang.coordinator.rpartition(":")
    from megatronapp_trainer.launch.config.settings import Endpoint

    with address.listening_socket(Endpoint(host=host, port=int(port)), host):
        gang.start({}, only=0)
        assert gang.workers[0].end() == ExitCode.RENDEZVOUS
    assert f"cannot listen at {gang.coordinator}: Address already in use" in gang.workers[0].record()["message"]


def test_a_launcher_stops_when_its_backend_dies(gang: Gang, tmp_path: pathlib.Path) -> None:
    gang.start(dict.fromkeys(range(4), "polite"), only=1)
    backend = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen({gang.command(0.3)!r}, process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**gang.environment(0), "ACTIONS": json.dumps(dict.fromkeys(range(4), "polite"))}
    log = (tmp_path / "backend.log").open("w")
    with (
        log,
        subprocess.Popen(
            [sys.executable, "-c", backend], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as parent,
    ):
        assert parent.stdout is not None
        launcher = int(parent.stdout.readline())
        state = tmp_path / "worker-0" / "state-0"
        wait_until(state.exists)
        parent.kill()
        wait_until(lambda: not alive(launcher))
    assert state.read_text() == "checkpointed"


def test_the_launcher_imports_no_torch() -> None:
    launch = "megatronapp_trainer.launch"
    modules = ["main", "reporting.counters", "preflight.gpu_counters", "ranks.supervisor", "rendezvous.coordinator"]
    imports = "".join(f"import {launch}.{module}\n" for module in [*modules, "rendezvous.member"])
    code = f"import sys\n{imports}print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
