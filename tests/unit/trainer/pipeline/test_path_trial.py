"""The preflight of real launchers tries the paths of a MegaDPP or MegaFBD job with real processes.

The first test starts an interpreter for each trial; those of the other tests are forked."""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import forked_trials
import pytest
from launchers import Gang

from megatronapp_common.names import ExitCode

pytestmark = [pytest.mark.torch, pytest.mark.process]

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 120 "
    "--eval-iters 0"
)
PIPELINE = "--pipeline-model-parallel-size 2"
PREFLIGHT = '{"enabled":true,"timeoutSeconds":600}'


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, proc_per_node="1,1")
    gang.arguments = f"--use-dpp {PIPELINE} {MODEL}".split()
    yield gang
    gang.close()


@pytest.fixture
def launcher(forkserver: Any) -> list[str]:
    """Program and arguments of a launcher whose trials are forked."""
    return [forked_trials.__file__, " ".join(forkserver.python())]


@pytest.fixture
def forking_gang(gang: Gang, launcher: list[str]) -> Gang:
    gang.launcher = launcher
    return gang


def paths(gang: Gang) -> set[str]:
    """Paths in the logs of the launchers, as `rank 0 to rank 1: shared memory`."""
    found = re.findall(r"(rank \d+ to rank \d+: [^,]+), \d+ bytes after", "".join(w.output() for w in gang.workers))
    return set(found)


def test_ranks_with_common_memory_are_tried_through_it(gang: Gang) -> None:
    gang.start(dict.fromkeys(range(2), "finish"), PREFLIGHT=PREFLIGHT)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK], gang.workers[0].output()
    assert paths(gang) == {"rank 0 to rank 1: shared memory", "rank 1 to rank 0: shared memory"}
    assert list(gang.shm.iterdir()) == []


def start_apart(gang: Gang, actions: dict[int, str], each: Sequence[dict[str, str]], **variables: str) -> None:
    """Start launchers whose ranks share no memory."""
    folders = [gang.shm / str(index) for index in range(2)]
    for folder in folders:
        folder.mkdir()
    own = [{**given, "SHM_DIR": str(folder)} for given, folder in zip(each, folders, strict=True)]
    gang.start(actions, each=own, base=variables, PREFLIGHT=PREFLIGHT)


def refusal(gang: Gang) -> str:
    """Message of the first worker that ended for its own reason; no rank has started."""
    codes = [worker.end() for worker in gang.workers]
    record = gang.workers[codes.index(ExitCode.USAGE)].record()
    assert record["reason"] == "PreflightFailed"
    assert not list(gang.tmp.glob("worker-*/state-*"))
    message: str = record["message"]
    return message


ATTACHED = json.dumps(
    [
        {"name": "cluster", "interface": "eth0", "ips": ["10.0.0.7"], "default": True},
        {"name": "fabric/a", "interface": "lo", "ips": ["127.0.0.1"]},
    ]
)
"""A pod's annotation of Multus. The pods' own addresses, 127.0.0.2 and 127.0.0.3, are of no interface."""


@pytest.mark.full("sources of an address", but=("multus",))
@pytest.mark.parametrize("found_by", [{"NETWORK_STATUS": ATTACHED}, {"INTERFACE": "l[o]"}], ids=["multus", "interface"])
def test_ranks_without_common_memory_are_tried_over_ucx_at_their_addresses(
    forking_gang: Gang, found_by: dict[str, str]
) -> None:
    gang = forking_gang
    gang.arguments += ["--node-ips", "127.0.0.1,127.0.0.1"]
    start_apart(gang, dict.fromkeys(range(2), "finish"), [found_by, found_by])
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK]
    assert paths(gang) == {"rank 0 to rank 1: UCX", "rank 1 to rank 0: UCX"}


PAIR = {"rank 0 to rank 1: UCX", "rank 1 to rank 0: UCX"}
BY_STAGE = {
    f"rank {sender} to rank {receiver}: {path}"
    for first, second, path in ((0, 1, "shared memory"), (2, 3, "shared memory"), (0, 2, "UCX"), (1, 3, "UCX"))
    for sender, receiver in ((first, second), (second, first))
}
"""Paths of two stages on a node each: partners share its memory, neighbours of a role do not."""


@pytest.mark.full("gangs with both roles; ranks of one role are tried above")
@pytest.mark.parametrize(
    ("per_node", "flags", "expected"), [("1,1", "", PAIR), ("2,2", PIPELINE, BY_STAGE)], ids=["pair", "PP2"]
)
def test_partners_and_neighbours_of_both_roles_are_tried(
    tmp_path: pathlib.Path, launcher: list[str], per_node: str, flags: str, expected: set[str]
) -> None:
    gang = Gang(tmp_path, proc_per_node=per_node)
    gang.launcher = launcher
    try:
        world = sum(map(int, per_node.split(",")))
        gang.arguments = f"--forward-backward-disaggregating {flags} {MODEL}".split()
        gang.arguments += ["--node-ips", ",".join(["127.0.0.1"] * world)]
        start_apart(gang, dict.fromkeys(range(world), "finish"), [{"INTERFACE": "lo"}] * 2)
        gang.go()
        assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK], gang.workers[0].output()
        assert paths(gang) == expected
    finally:
        gang.close()


@pytest.mark.full("the gang of a refused path is shown below")
def test_addresses_of_no_interface_are_named_before_a_rank_starts(forking_gang: Gang) -> None:
    gang = forking_gang
    start_apart(gang, {}, [{}, {}])
    assert "has no path of MegaDPP: rank 0 has no path to ranks on other nodes: no network interface" in refusal(gang)


@pytest.mark.full("the gang of a refused path is shown below")
def test_node_ips_are_compared_with_the_rank_table_before_a_rank_starts(forking_gang: Gang) -> None:
    gang = forking_gang
    gang.arguments += ["--node-ips", "127.0.0.2,127.0.0.1"]
    start_apart(gang, {}, [{"NETWORK_STATUS": ATTACHED}, {}])
    assert "rank 0 is at 127.0.0.1, not at 127.0.0.2; leave it out, or give 127.0.0.1,127.0.0.3" in refusal(gang)


def test_a_path_without_ucx_is_named_before_a_rank_starts(forking_gang: Gang) -> None:
    gang = forking_gang
    found_by = {"NETWORK_STATUS": ATTACHED}
    start_apart(gang, {}, [found_by, found_by], MEGATRONAPP_UCX_LIBRARY="/nonexistent/libucp.so.0")
    assert "has no path of MegaDPP: rank 0 has no path to ranks on other nodes: UCX cannot be" in refusal(gang)


def test_messages_that_do_not_fit_are_named_before_a_rank_starts(forking_gang: Gang) -> None:
    gang = forking_gang
    gang.arguments += ["--seq-length", str(1 << 40)]
    gang.start({}, PREFLIGHT=PREFLIGHT)
    assert "MiB free, and messages between its 2 ranks need" in refusal(gang)
