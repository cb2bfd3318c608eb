"""Pipelines whose ranks share no memory: directories of their own, and network namespaces joined by a veth pair."""

import contextlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import small_training

from megatronapp_common.names import Env, ExitCode

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Result = tuple[list[float] | None, list[str]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 3 --lr 2e-3 --mock-data --vocab-size 120 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --pipeline-model-parallel-size 2"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


def train(flags: str, folder: str, nodes: Sequence[int]) -> Result:
    """Losses and gradient norms on the reporting rank, and the paths in the log of the rank. `nodes`: by rank."""
    from megatronapp_trainer.pretrain import log_to_stderr

    home = pathlib.Path(folder, str(nodes[int(os.environ["RANK"])]))
    home.mkdir(exist_ok=True)
    os.environ[Env.SHM_DIR] = str(home)
    with contextlib.redirect_stderr(io.StringIO()) as log:
        log_to_stderr()
        recorder = small_training.train(small_training.prepare(f"{MODEL} {flags}"))
    assert list(home.iterdir()) == []
    paths = re.findall(r"path to rank \d+: ucx, round trip \d+ us", log.getvalue())
    return None if recorder is None else recorder.losses + recorder.grad_norms, paths


def trained(
    run_ranks: RunRanks, folder: pathlib.Path, flags: str, nodes: Sequence[int]
) -> tuple[list[float], set[int]]:
    """Losses and gradient norms, and the ranks that have a path over UCX."""
    results = run_ranks(len(nodes), train, flags, str(folder), nodes)
    (record,) = [record for record, _ in results if record is not None]
    return record, {rank for rank, (_, paths) in enumerate(results) if paths}


@pytest.mark.full("layouts and transports", but=("PP2",))
@pytest.mark.parametrize(
    ("flags", "nodes", "far"),
    [
        ("--use-dpp", (0, 1), {0, 1}),
        ("--transport native", (0, 1), {0, 1}),
        (f"--use-dpp {TENSOR}", (0, 0, 1, 1), {0, 1, 2, 3}),
        (f"--use-dpp {TENSOR}", (0, 1, 0, 1), {0, 1, 2, 3}),
        (f"--use-dpp {TENSOR}", (0, 0, 0, 1), {1, 2, 3}),
        ("--use-dpp --num-virtual-stages-per-pipeline-rank 2", (0, 1), {0, 1}),
    ],
    ids=["PP2", "PP2-native", "TP2xPP2", "TP-across-nodes", "TP2xPP2-uneven", "VPP2"],
)
def test_ranks_of_several_nodes_train_as_on_a_shared_node(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str, nodes: Sequence[int], far: set[int]
) -> None:
    together = trained(run_ranks, tmp_path, flags, [0] * len(nodes))
    assert together[1] == set()
    assert trained(run_ranks, tmp_path, flags, nodes) == (together[0], far)


def test_a_rank_without_ucx_is_a_usage_error_on_all_ranks(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    results = run_ranks(2, refused, str(tmp_path), environment={"MEGATRONAPP_UCX_LIBRARY": "/nonexistent/libucp.so.0"})
    for text in results:
        assert "rank 0 has no path to ranks on other nodes: UCX cannot be loaded: /nonexistent" in text


def refused(folder: str) -> str:
    from megatronapp_trainer.errors import UsageError

    with pytest.raises(UsageError) as error:
        train("--use-dpp", folder, (0, 1))
    assert error.value.exit_code == ExitCode.USAGE
    return str(error.value)


def test_devices_are_interface_and_adapters_of_an_address(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.errors import TransferError
    from megatronapp_trainer.pipeline.transport.network import devices_at

    assert devices_at("", tmp_path) == ""
    assert devices_at("127.0.0.1", tmp_path) == "lo"
    (tmp_path / "lo" / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    (tmp_path / "lo" / "dev_port").write_text("1\n")
    assert devices_at("127.0.0.1", tmp_path) == "mlx5_3:2,lo"
    for address, problem in (("192.0.2.77", "no network interface"), ("node-1", "no IPv4 or IPv6 address")):
        with pytest.raises(TransferError, match=problem):
            devices_at(address, tmp_path)


PEER = """
import random, sys
import numpy as np
import megatronapp_native as native
rank, directory, library, device, deadline = int(sys.argv[1]), *sys.argv[2:5], float(sys.argv[5])
sizes = [1, 2, 8191, 8192, 8193, 65535, 65536, 65537, 1 << 20, 16 << 20, 64 << 20]
endpoint = native.TransportEndpoint(directory=directory, job="nodes", attempt=1, rank=rank, slot_bytes=max(sizes),
                                    slots=3, deadline_s=deadline, threads=1)
print(endpoint.open_network(library=library, devices=device).hex(), flush=True)
endpoint.add_remote_peer(1 - rank, True, bytes.fromhex(sys.stdin.readline()))
endpoint.connect()
def contents(sender, key):
    return np.random.default_rng(1000 * sender + key).integers(0, 256, sizes[key], dtype=np.uint8)
for first in range(0, len(sizes), 3):
    keys = range(first, min(first + 3, len(sizes)))
    for key in random.Random(rank).sample(keys, len(keys)):
        sent = contents(rank, key)
        endpoint.send(1 - rank, key, sent.ctypes.data, sent.nbytes, sent)
    for key in random.Random(7 + rank).sample(keys, len(keys)):
        message = endpoint.receive(1 - rank, key, deadline)
        assert np.array_equal(np.frombuffer(message, dtype=np.uint8), contents(1 - rank, key)), key
        message.release()
print("exchanged", flush=True)
try:
    endpoint.receive(1 - rank, 99, 10 * deadline)
except native.TransportError as error:
    print(type(error).__name__, error, flush=True)
endpoint.close(False)
"""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=240, text=True).stdout


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces with the interface `uplink` at 10.231.0.1 and .2, joined by a veth pair."""
    if shutil.which("ip") is None:
        pytest.skip("no command ip (iproute2)")
    name = uuid.uuid4().hex[:8]
    first, second = f"node-{name}-a", f"node-{name}-b"
    with contextlib.ExitStack() as stack:
        for node in (first, second):
            try:
                ip("netns", "add", node)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", node)
        ip("link", "add", "uplink", "netns", first, "type", "veth", "peer", "name", "uplink", "netns", second)
        for number, node in enumerate((first, second)):
            ip("-n", node, "addr", "add", f"10.231.0.{number + 1}/24", "dev", "uplink")
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "link", "set", "uplink", "up")
        deadline = time.monotonic() + 240
        while not all("LOWER_UP" in ip("-n", node, "link", "show", "uplink") for node in (first, second)):
            assert time.monotonic() < deadline, "the link does not come up"
        yield first, second


@contextlib.contextmanager
def ranks_of(nodes: tuple[str, str], folder: pathlib.Path, deadline_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank 0 and 1 on their nodes, after all messages have arrived."""
    from megatronapp_trainer.pipeline.transport.network import ucx_library

    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, node in enumerate(nodes):
            (folder / node).mkdir()
            arguments = [
                sys.executable,
                "-c",
                PEER,
                str(rank),
                str(folder / node),
                ucx_library(),
                "uplink",
                str(deadline_s),
            ]
            # ip replaces itself by the command, so that signals reach the rank.
            command = ["ip", "netns", "exec", node, *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        addresses = [line(rank) for rank in ranks]
        for process, address in zip(ranks, reversed(addresses), strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{address}\n")
            process.stdin.flush()
        assert [line(rank) for rank in ranks] == ["exchanged"] * 2
        yield ranks


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


@pytest.mark.process
@pytest.mark.full("64 MiB each way, on nodes that are lost", but=("killed",))
@pytest.mark.parametrize(
    ("fault", "deadline_s", "message"),
    [
        ("killed", 240.0, r"PeerLostError rank 1 died or is unreachable \(UCX: .*\); its own log says which"),
        ("stopped", 8.0, "PeerLostError rank 1 is stopped or unreachable: nothing was heard of it for 4 s"),
        ("unplugged", 8.0, "PeerLostError rank 1 is stopped or unreachable: nothing was heard of it for 4 s"),
    ],
    ids=["killed", "stopped", "unplugged"],
)
def test_messages_cross_nodes_and_a_lost_node_is_an_error_within_the_deadline(
    nodes: tuple[str, str], tmp_path: pathlib.Path, fault: str, deadline_s: float, message: str
) -> None:
    with ranks_of(nodes, tmp_path, deadline_s) as ranks:
        if fault == "unplugged":
            ip("-n", nodes[1], "link", "set", "uplink", "down")
        else:
            ranks[1].send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        assert re.match(message, line(ranks[0]))
        if fault == "unplugged":
            assert "rank 0 is stopped or unreachable" in line(ranks[1])
        ranks[1].kill()
    assert [list((tmp_path / node).iterdir()) for node in nodes] == [[], []]
