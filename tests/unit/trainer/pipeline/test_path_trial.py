"""The preflight of real launchers tries the paths of a MegaDPP job with real processes."""

import pathlib
import re
from collections.abc import Iterator

import pytest
from launchers import Gang

from megatronapp_common.names import ExitCode

pytestmark = [pytest.mark.torch, pytest.mark.process]

FLAGS = (
    "--use-dpp --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 120"
)
PREFLIGHT = '{"enabled":true,"timeoutSeconds":80}'


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, proc_per_node="1,1")
    gang.arguments = FLAGS.split()
    yield gang
    gang.close()


def paths(gang: Gang) -> set[str]:
    """Paths in the logs of the launchers, as `rank 0 to rank 1: shared memory`."""
    found = re.findall(r"(rank \d+ to rank \d+: [^,]+), 2048 bytes after", "".join(w.output() for w in gang.workers))
    return set(found)


def test_ranks_with_common_memory_are_tried_through_it(gang: Gang) -> None:
    gang.start(dict.fromkeys(range(2), "finish"), PREFLIGHT=PREFLIGHT)
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK], gang.workers[0].output()
    assert paths(gang) == {"rank 0 to rank 1: shared memory", "rank 1 to rank 0: shared memory"}
    assert list(gang.shm.iterdir()) == []


def start_apart(gang: Gang, actions: dict[int, str], **variables: str) -> None:
    """Start launchers whose ranks share no memory, at the only address that an interface has everywhere."""
    gang.coordinator = gang.coordinator.replace("127.0.0.2", "127.0.0.1")
    each = [{"SHM_DIR": str(gang.shm / str(index)), "ADDRESS": "127.0.0.1"} for index in range(2)]
    for own in each:
        pathlib.Path(own["SHM_DIR"]).mkdir()
    gang.start(actions, each=each, base=variables, PREFLIGHT=PREFLIGHT)


def test_ranks_without_common_memory_are_tried_over_ucx(gang: Gang) -> None:
    start_apart(gang, dict.fromkeys(range(2), "finish"))
    gang.go()
    assert [worker.end() for worker in gang.workers] == [ExitCode.OK, ExitCode.OK]
    assert paths(gang) == {"rank 0 to rank 1: UCX", "rank 1 to rank 0: UCX"}


def test_a_path_that_fails_is_named_before_a_rank_starts(gang: Gang) -> None:
    start_apart(gang, {}, MEGATRONAPP_UCX_LIBRARY="/nonexistent/libucp.so.0")
    codes = [worker.end() for worker in gang.workers]
    record = gang.workers[codes.index(ExitCode.USAGE)].record()
    assert record["reason"] == "PreflightFailed"
    assert "has no path of MegaDPP: rank 0 has no path to ranks on other nodes: UCX cannot be" in record["message"]
    assert not list(gang.tmp.glob("worker-*/state-*")), "no rank has started"


def test_messages_that_do_not_fit_are_named_before_a_rank_starts(gang: Gang) -> None:
    gang.arguments += ["--seq-length", str(1 << 40)]
    gang.start({}, PREFLIGHT=PREFLIGHT)
    codes = [worker.end() for worker in gang.workers]
    record = gang.workers[codes.index(ExitCode.USAGE)].record()
    assert "MiB free, and messages between its 2 ranks need" in record["message"]
