"""Forward and backward ranks that share no memory: each directory of shared memory takes the place of a node."""

import contextlib
import io
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from evaluated_training import Record, train

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.trace import RECORD, RecordKind, TransferPath

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

SWITCH = "--forward-backward-disaggregating"
PP2 = "--pipeline-model-parallel-size 2"
MERGED = "--tensor-model-parallel-size 2 --ignore-forward-tensor-parallel --attention-dropout 0"
TWO = "--use-distributed-optimizer --overlap-grad-reduce --fbd-backward-per-forward 2"


class TrainedRank(NamedTuple):
    """Results of a rank."""

    record: Record | None
    logged: set[tuple[int, str]]
    """Peer and path of each line of the log."""
    copied: set[tuple[int, TransferPath]]
    """Sender and path of each copy in its trace."""


def train_on(flags: str, folder: str, nodes: Sequence[int]) -> tuple[Any, ...]:
    """Train with a trace, and return the fields of a trained rank; `nodes`: that of each rank."""
    import megatronapp_native as native
    from megatronapp_trainer.pretrain import log_to_stderr

    home = pathlib.Path(folder, str(nodes[int(os.environ["RANK"])]))
    home.mkdir(exist_ok=True)
    os.environ[Env.SHM_DIR] = str(home)
    with contextlib.redirect_stderr(io.StringIO()) as log:
        log_to_stderr()
        code, record = train(f"{flags} {SWITCH} --trace")
    assert code == ExitCode.OK
    ring = home / f"test.rank{os.environ['RANK']}.ring"
    assert not list(home.glob("*.transport.*"))
    reader = native.RingReader(str(ring))
    senders = {comm["slot"]: comm["members"][0] for comm in json.loads(reader.info().metadata)["comms"]}
    records = np.frombuffer(reader.read(1_000_000)[0], RECORD)
    copies = records[records["kind"] == RecordKind.COPY]
    places = zip(copies["comm"].tolist(), copies["layer"].tolist(), strict=True)
    logged = re.findall(r"path to rank (\d+): (shared memory|ucx, round trip \d+ us)", log.getvalue())
    return (
        record,
        {(int(peer), path.split(",")[0]) for peer, path in logged},
        {(senders[slot], TransferPath(path)) for slot, path in places},
    )


def trained(run_ranks: RunRanks, folder: pathlib.Path, flags: str, nodes: Sequence[int]) -> list[TrainedRank]:
    folder.mkdir()
    environment = {"MEGATRONAPP_SHM_PREFIX": "test"}
    results = run_ranks(len(nodes), train_on, flags, str(folder), nodes, environment=environment)
    return [TrainedRank(*fields) for fields in results]


@pytest.mark.full("layouts on several nodes", but=("pair",))
@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ("", (0, 1)),
        (PP2, (0, 1, 2, 3)),
        (PP2, (0, 1, 0, 1)),
        (f"{PP2} --fbd-forward-ranks-apart", (0, 0, 1, 1)),
        (TWO, (0, 1, 2)),
        (TWO, (0, 1, 1)),
        (MERGED, (0, 1, 2)),
    ],
    ids=["pair", "PP2", "PP2-by-role", "PP2-apart", "one-forward-for-two", "one-forward-for-two-uneven", "merged"],
)
def test_ranks_of_several_nodes_train_as_on_a_shared_node(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str, nodes: Sequence[int]
) -> None:
    together = trained(run_ranks, tmp_path / "together", flags, [0] * len(nodes))
    apart = trained(run_ranks, tmp_path / "apart", flags, nodes)
    assert [outcome.record for outcome in apart] == [outcome.record for outcome in together]
    assert sum(outcome.record is not None for outcome in apart) == 1
    for rank, outcome in enumerate(together):
        peers = {peer for peer, _ in outcome.logged}
        assert outcome.logged == {(peer, "shared memory") for peer in peers}
        assert {path for _, path in outcome.copied} == {TransferPath.SHARED_MEMORY}
        far = {peer for peer in peers if nodes[peer] != nodes[rank]}
        assert apart[rank].logged == {(peer, "ucx" if peer in far else "shared memory") for peer in peers}
        assert apart[rank].copied == {
            (sender, TransferPath.UCX if sender in far else TransferPath.SHARED_MEMORY) for sender, _ in outcome.copied
        }


def refused(flags: str, folder: str, nodes: Sequence[int]) -> str:
    """Message of the error that a rank ends with, before it has made a file."""
    from megatronapp_trainer.errors import UsageError

    with pytest.raises(UsageError) as error:
        train_on(flags, folder, nodes)
    assert error.value.exit_code == ExitCode.USAGE
    return str(error.value)


def test_a_rank_without_ucx_is_a_usage_error_on_all_ranks(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    environment = {"MEGATRONAPP_SHM_PREFIX": "test", "MEGATRONAPP_UCX_LIBRARY": "/nonexistent/libucp.so.0"}
    for text in run_ranks(2, refused, "", str(tmp_path), (0, 1), environment=environment):
        assert "rank 0 has no path to ranks on other nodes: UCX cannot be loaded: /nonexistent" in text
    assert not list(tmp_path.glob("*/*.transport.*"))


def refused_when_full(folder: str) -> str:
    """`refused` where the shared memory has one free block."""
    fields = list(os.statvfs("/"))
    fields[4] = 1
    os.statvfs = lambda _path: os.statvfs_result(fields)  # type: ignore[assignment]
    return refused("", folder, (0, 0))


def test_messages_that_do_not_fit_are_refused_before_a_file_is_made(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    for text in run_ranks(2, refused_when_full, str(tmp_path), environment={"MEGATRONAPP_SHM_PREFIX": "test"}):
        assert re.search(r"has 0 MiB free, and messages between its 2 ranks need \d+ MiB \(rank [01]: ", text)
        assert "enlarge it (spec.shm.sizeLimit)" in text
    assert not list(tmp_path.glob("*/*.transport.*"))
