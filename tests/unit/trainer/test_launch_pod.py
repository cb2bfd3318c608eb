"""Real launchers in the ways of a cluster: one stop for all, orders of ranks, status, echo, preflight, process 1."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from launchers import DEADLINE_S, Gang, wait_until

from megatronapp_common.names import ExitCode
from megatronapp_common.shared_documents import DocumentWriter
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

pytestmark = pytest.mark.process
BOTH = {0: [0, 1], 1: [2, 3]}


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path)
    yield gang
    gang.close()


@pytest.mark.parametrize(
    ("stopped", "actions", "checkpointed"),
    [
        pytest.param(1, dict.fromkeys(range(4), "polite"), [0, 1, 2, 3], id="all answer"),
        pytest.param(1, {0: "polite", 1: "polite", 2: "wait", 3: "wait"}, [0, 1], id="before ranks can answer"),
        pytest.param(0, {0: "wait", 1: "wait", 2: "victim", 3: "victim"}, [], id="ranks that lose those"),
        pytest.param(0, {0: "last", 1: "last", 2: "victim", 3: "victim"}, [], id="ranks that lose those end first"),
    ],
)
def test_a_stop_of_a_single_launcher_reaches_all(
    gang: Gang, stopped: int, actions: dict[int, str], checkpointed: list[int]
) -> None:
    gang.start(actions, grace_s=DEADLINE_S)
    gang.running(BOTH)
    gang.go()
    gang.workers[stopped].process.terminate()
    assert [worker.end() for worker in gang.workers] == [ExitCode.PREEMPTED] * 2
    assert [worker.record()["reason"] for worker in gang.workers] == ["Preempted"] * 2
    states = {rank: gang.workers[index].run_dir / f"state-{rank}" for index, ranks in BOTH.items() for rank in ranks}
    assert [rank for rank, path in states.items() if path.read_text() == "checkpointed"] == checkpointed


def test_the_cause_of_lost_peers_is_awaited_for_a_time_only(gang: Gang) -> None:
    lost = f"exit{ExitCode.PEER_LOST}"
    gang.start({0: "wait", 1: "wait", 2: lost, 3: lost}, grace_s=0.3)
    gang.running(BOTH)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.PEER_LOST] * 2
    assert gang.workers[1].record()["rank"] in {2, 3}, "one of its own: no other is identified"


def environment_of(gang: Gang, worker: int, rank: int) -> dict[str, str]:
    lines = (gang.workers[worker].run_dir / f"rank-{rank}.log").read_text().splitlines()
    found: dict[str, str] = json.loads(next(line for line in lines if line.startswith("environment "))[12:])
    return found


def test_uneven_workers_in_the_order_of_their_racks(tmp_path: pathlib.Path) -> None:
    """Run with a preflight that finds nothing, too."""
    gang = Gang(tmp_path, "1,2,1")
    racks = [{"TOPOLOGY": "zone,rack-3"}, {"TOPOLOGY": "zone,rack-1"}, {"TOPOLOGY": "zone,rack-2"}]
    try:
        requirements = json.dumps({"enabled": True, "timeoutSeconds": 60, "shmBytes": 1, "gpus": 0})
        gang.start(dict.fromkeys(range(4), "finish"), each=racks, RANK_ORDER="topology", PREFLIGHT=requirements)
        gang.running({1: [0, 1], 2: [2], 0: [3]})
        gang.go()
        assert [worker.end() for worker in gang.workers] == [ExitCode.OK] * 3
    finally:
        gang.close()
    made = environment_of(gang, 0, 3)
    assert (made["NODE_RANK"], made["LOCAL_RANK"], made["WORLD_SIZE"], made["NNODES"]) == ("2", "0", "4", "3")
    assert made["NODE_IPS"] == "127.0.0.3,127.0.0.4,127.0.0.2"
    assert made["MEGATRON_NODE_IPS"] == "127.0.0.3,127.0.0.3,127.0.0.4,127.0.0.2"
    assert made["MASTER_ADDR"] == "127.0.0.3"
    assert environment_of(gang, 1, 1)["LOCAL_RANK"] == "1"
    table = json.loads((gang.workers[0].run_dir / "rank-table.json").read_text())
    assert [(worker["index"], worker["ranks"]) for worker in table["workers"]] == [(1, [0, 1]), (2, [2]), (0, [3])]


def request_status(port: int, token: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.2", port, timeout=120)
    try:
        connection.request("GET", "/api/v1/launcher", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except ConnectionRefusedError:
        return 0, {}
    finally:
        connection.close()


def test_worker_0_serves_table_and_progress_of_the_gang(gang: Gang) -> None:
    port = gang.reserve("127.0.0.2")
    token = derive_token(read_secret(gang.tmp / "secret"), TokenRole.VIEWER)
    gang.start(dict.fromkeys(range(4), "polite"), only=0, STATUS_PORT=str(port))
    wait_until(lambda: request_status(port, token)[0] == 200)
    wait_until(lambda: request_status(port, token)[1]["missing"] == [1])  # once worker 0 itself is there
    answer = request_status(port, token)[1]
    assert (answer["phase"], answer["rankTable"]) == ("Gathering", None)
    gang.start(dict.fromkeys(range(4), "polite"), only=1)  # has no port for a status, and reports all the same
    gang.running(BOTH)
    page = DocumentWriter(gang.shm / "demo-w1.progress")
    page.write({"iteration": 7, "state": "training"})
    wait_until(lambda: request_status(port, token)[1]["progress"] == {"iteration": 7, "state": "training"})
    answer = request_status(port, token)[1]
    assert (answer["attempt"], answer["phase"], answer["missing"]) == (0, "Running", [])
    assert answer["rankTable"] == json.loads((gang.workers[1].run_dir / "rank-table.json").read_text())
    assert request_status(port, derive_token(read_secret(gang.tmp / "secret"), TokenRole.AGENT))[0] == 401
    gang.workers[1].process.terminate()
    assert [worker.end() for worker in gang.workers] == [ExitCode.PREEMPTED] * 2
    page.close()


def test_a_worker_that_fails_preflight_is_named_by_all(gang: Gang) -> None:
    settings = [{}, {"PREFLIGHT": json.dumps({"enabled": True, "shmBytes": 1 << 62})}]
    gang.start({}, each=settings)
    assert [worker.end() for worker in gang.workers] == [ExitCode.PEER_LOST, ExitCode.OWN_FAILURE]
    record = gang.workers[1].record()
    assert record["reason"] == "PreflightFailed"
    assert record["message"].startswith(f"worker 1 on node node-1: {gang.shm} holds ")
    assert record["message"] in gang.workers[0].record()["message"]


def test_rank_lines_reach_stdout_with_the_final_lines_of_the_killed_rank(gang: Gang) -> None:
    gang.start({0: "kill"}, LOG_TO_STDOUT="1")
    gang.running(BOTH)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OWN_FAILURE, ExitCode.PEER_LOST]
    first, second = (worker.output().splitlines() for worker in gang.workers)
    assert "[rank 0] last words" in first
    assert "[rank 1] arguments ['--num-layers', '4']" in first
    assert "[rank 2] arguments ['--num-layers', '4']" in second


def test_a_stdout_that_is_never_read_delays_no_rank(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, "1")
    environment = gang.environment(0, LOG_TO_STDOUT="1") | {"ACTIONS": json.dumps({0: "chatter"})}
    with subprocess.Popen(gang.command(0.3), env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        gang.go()
        state = tmp_path / "worker-0" / "state-0"
        wait_until(lambda: state.exists() and state.read_text() == "has said it all")
        output, _ = launcher.communicate(timeout=180)
    lines = [line for line in output.splitlines() if line.startswith("[rank 0] line ")]
    assert lines == [f"[rank 0] line {number}" for number in range(100_000)]
    assert launcher.returncode == ExitCode.OK


def namespace() -> list[str]:
    """Command that makes what follows process 1. Skips where that is not allowed."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no program unshare")
    done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"process namespaces are not allowed here: {done.stderr.strip()}")
    return command


def signals(pid: int, field: str) -> set[int]:
    found = re.search(rf"^{field}:\s*([0-9a-f]+)$", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return {number for number in range(1, 65) if int(found[1], 16) >> (number - 1) & 1}


def first_process(gang: Gang) -> psutil.Process:
    """The launcher inside of the namespace, once its program has begun.

    Before, the process is a copy of `unshare`, in which SIGTERM is blocked for a moment, too.
    """
    outer = psutil.Process(gang.workers[0].process.pid)
    wait_until(lambda: [child for child in outer.children() if child.cmdline()[:1] == [sys.executable]])
    launcher = outer.children()[0]
    assert "\t1\n" in re.findall(r"NSpid:.*\n", pathlib.Path(f"/proc/{launcher.pid}/status").read_text())[0]
    return launcher


def states_below(process: psutil.Process) -> list[str]:
    """Return the states of all processes that a process has started."""
    found: list[str] = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(child.status())
    return found


def test_the_launcher_as_process_1_reaps_orphans_and_passes_signals_on(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, "2")
    try:
        gang.start({0: "abandon", 1: "polite"}, prefix=namespace())
        launcher = first_process(gang)
        gang.running({0: [0, 1]})
        gang.go()
        wait_until((tmp_path / "worker-0" / "abandoned").exists)
        wait_until(lambda: psutil.STATUS_ZOMBIE not in states_below(launcher))
        launcher.terminate()
        assert gang.workers[0].end() == ExitCode.PREEMPTED
    finally:
        gang.close()
    assert gang.workers[0].record()["reason"] == "Preempted"
    assert (tmp_path / "worker-0" / "state-1").read_text() == "checkpointed"
    assert not list(gang.shm.iterdir())


def test_process_1_honours_a_signal_sent_before_its_handlers_exist(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, "2")
    try:
        gang.start({}, prefix=namespace())
        launcher = first_process(gang)
        wait_until(lambda: signal.SIGTERM in signals(launcher.pid, "SigBlk") | signals(launcher.pid, "SigCgt"))
        launcher.terminate()
        assert gang.workers[0].end() == ExitCode.PREEMPTED
    finally:
        gang.close()
    assert gang.workers[0].record()["message"].startswith("stopped")


def test_an_early_signal_ends_a_launcher_with_a_record_before_it_gathers(gang: Gang) -> None:
    gang.start({}, only=1)
    launcher = gang.workers[0].process
    wait_until(lambda: signal.SIGTERM in signals(launcher.pid, "SigBlk") | signals(launcher.pid, "SigCgt"))
    os.kill(launcher.pid, signal.SIGTERM)
    assert gang.workers[0].end() == ExitCode.PREEMPTED
    assert gang.workers[0].record()["reason"] == "Preempted"
