"""Real launchers that continue with further attempts in place, with ranks that are a few lines of Python."""

import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from launchers import DEADLINE_S, Gang, alive, wait_until

from megatronapp_common.attempt_order import lock_path
from megatronapp_common.names import ExitCode
from megatronapp_common.processes import is_locked

pytestmark = pytest.mark.process


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, proc_per_node="1,1")
    yield gang
    gang.close()


def start(gang: Gang, actions: dict[int | str, str], port: int, *, only: int | None = None) -> None:
    """Start launchers that take orders; worker 0 serves its status."""
    each = [{"ATTEMPT_FILE": str(gang.order_file(index))} for index in range(2)]
    each[0]["STATUS_PORT"] = str(port)
    gang.start(actions, each=each, only=only)


def status_of(gang: Gang, port: int) -> dict[str, Any]:
    """Answer of the launcher of worker 0."""
    return gang.status(f"127.0.0.2:{port}")


def test_a_gang_continues_in_place_after_a_rank_has_failed(gang: Gang) -> None:
    port = gang.reserve("127.0.0.2")
    start(gang, {"1@0": "exit7", "0@1": "polite", "1@1": "polite"}, port)
    ranks = gang.running({0: [0], 1: [1]})
    gang.go()
    wait_until(lambda: status_of(gang, port)["phase"] == "Standby")
    ends = {end["worker"]: end for end in status_of(gang, port)["ends"]}
    assert (ends[1]["code"], ends[1]["reason"], ends[1]["rank"]) == (7, "RankFailed", 1)
    assert ends[1]["message"].endswith("error: this is why")
    assert (ends[0]["code"], ends[0]["reason"], ends[0]["message"]) == (ExitCode.PEER_LOST, "PeerLost", "")
    assert not any(map(alive, ranks))
    gang.order(1)
    assert gang.ran(0, 1, worker=0) == "demo-w0-a1-w0.rank0.ring"
    assert gang.ran(1, 1, worker=1) == "demo-w1-a1-w1.rank1.ring"
    document = status_of(gang, port)
    assert (document["attempt"], document["phase"], document["ends"]) == (1, "Running", [])
    assert document["rankTable"]["attempt"] == 1
    assert all(is_locked(lock_path(gang.shm, gang.uid, index)) for index in range(2))
    gang.workers[1].process.terminate()
    assert gang.workers[1].end() == ExitCode.PREEMPTED
    assert gang.workers[1].record()["attempt"] == 1
    wait_until(lambda: status_of(gang, port)["phase"] == "Standby")  # it was not asked to stop itself
    gang.workers[0].process.terminate()
    assert gang.workers[0].end() == ExitCode.PREEMPTED
    assert sorted(path.suffix for path in gang.shm.iterdir()) == [".launcher", ".launcher"]
    assert not is_locked(lock_path(gang.shm, gang.uid, 0))


def test_a_worker_that_fails_after_worker_0_has_succeeded_ends(gang: Gang) -> None:
    """Nothing would serve how it ended: the launcher of worker 0 has ended, too."""
    start(gang, {0: "exit0", 1: "wait"}, gang.reserve("127.0.0.2"))
    _, rank = gang.running({0: [0], 1: [1]})
    gang.go()
    assert gang.workers[0].end() == ExitCode.OK
    os.kill(rank, signal.SIGKILL)
    assert gang.workers[1].end() != ExitCode.OK
    assert gang.workers[1].record()["reason"] == "RankKilled"


def test_a_late_launcher_never_joins_a_later_attempt(gang: Gang) -> None:
    """Ranks that hang are killed after the time to end; a stale launcher is refused until it has the order itself."""
    port = gang.reserve("127.0.0.2")
    start(gang, {}, port)
    old = gang.running({0: [0], 1: [1]})  # these do not answer SIGTERM
    gang.order(1, grace_s=0.2, only=0)
    wait_until(lambda: status_of(gang, port)["attempt"] == 1)
    wait_until(lambda: not any(map(alive, old)))
    gang.workers[1].process.kill()  # its pod is replaced by one that does not know the order yet
    gang.workers[1].end()
    start(gang, {}, port, only=1)
    wait_until(lambda: "late: its attempt is over" in gang.workers[2].output())
    assert status_of(gang, port)["missing"] == [1]
    gang.order(1, only=1)
    gang.ran(1, 1, worker=1)
    gang.ran(0, 1, worker=0)


def test_an_order_shortens_the_time_of_ranks_that_have_lost_a_peer(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, proc_per_node="2")
    try:
        actions = {"0@0": "stubborn", "1@0": f"exit{ExitCode.PEER_LOST}"}
        gang.start(actions, grace_s=2 * DEADLINE_S, ATTEMPT_FILE=str(gang.order_file(0)))
        gang.running({0: [0, 1]})
        gang.go()
        wait_until(lambda: f"rank 1 ended with exit code {ExitCode.PEER_LOST}" in gang.workers[0].output())
        gang.order(1, grace_s=0.2)
        for rank in range(2):
            gang.ran(rank, 1, worker=0)
    finally:
        gang.close()


@pytest.mark.full("the time without an order is waited for by the same loop as the order", but=("no-restart-helps",))
@pytest.mark.parametrize(
    ("action", "code", "seconds"),
    [("exit65", ExitCode.DATA, 600), ("exit7", 7, 0)],
    ids=["no-restart-helps", "no-order"],
)
def test_a_launcher_ends_where_no_restart_helps_or_none_is_ordered(
    tmp_path: pathlib.Path, action: str, code: int, seconds: int
) -> None:
    gang = Gang(tmp_path, proc_per_node="1")
    gang.launcher_flags = ["--standby-s", str(seconds)]
    try:
        gang.start({0: action}, ATTEMPT_FILE=str(gang.order_file(0)))
        gang.go()
        assert gang.workers[0].end() == code
        assert gang.workers[0].record()["reason"] == "RankFailed"
    finally:
        gang.close()
