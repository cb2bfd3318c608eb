"""A rank with a GPU and peers with which its device shares no memory: a rank without a GPU, and one on another node.

Both ranks are processes of one GPU host. With different folders of shared memory they are as if on two nodes.
"""

import multiprocessing
import os
import pathlib
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 1 << 20
SIZES = (1, 2, 1000, 4096, 65_537, MIB, 3 * MIB + 5, 16 * MIB)
SLEEP_CYCLES = 500_000_000
"""A kernel of this length ends after a quarter of a second or more."""


@pytest.fixture
def shm() -> Iterator[pathlib.Path]:
    """Folder in memory: the driver registers no files of a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield pathlib.Path(directory)


def connected(directory: str, rank: int, device: int | None, pipe: Any) -> Any:
    """Return rank `rank` of two; over UCX if a pipe to exchange addresses is given."""
    import torch

    from megatronapp_trainer.pipeline.transport.network import ucx_library
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions

    if device is not None:
        torch.cuda.set_device(device)
    options = TransportOptions(
        job="job",
        attempt=1,
        rank=rank,
        slot_bytes=16 * MIB,
        slots=4,
        deadline_s=60.0,
        directory=directory,
        device=device,
    )
    if pipe is None:
        transport = TensorTransport(options, peers=[1 - rank])
        transport.connect()
        return transport

    class OtherNode:
        ranks = (1 - rank,)

        def add_to(self, endpoint: Any) -> None:
            pipe.send(endpoint.open_network(library=ucx_library(), devices="lo"))
            endpoint.add_remote_peer(1 - rank, True, pipe.recv())

    transport = TensorTransport(options, peers=[])
    (round_trip_ns,) = transport.connect(OtherNode()).values()
    assert round_trip_ns > 0
    return transport


def exchange(transport: Any, rank: int) -> tuple[int, str]:
    """Send and receive tensors of all sizes and three types in any order; return how many were wrong, and the path."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    device = transport.options.device
    own = torch.device("cpu") if device is None else torch.device("cuda", device)

    def tensor_of(sender: int, key: int) -> torch.Tensor:
        dtype = (torch.uint8, torch.bfloat16, torch.float32)[key % 3]
        count = max(1, SIZES[key % len(SIZES)] // dtype.itemsize)
        generator = torch.Generator().manual_seed(1000 * sender + key)
        numbers = torch.randint(0, 255, (count,), generator=generator, dtype=torch.uint8)
        return numbers.to(own).to(dtype)

    wrong = 0
    order = random.Random(rank)
    for first in range(0, 48, 4):
        keys = list(range(first, first + 4))
        for key in order.sample(keys, 4):
            transport.send(1 - rank, key, tensor_of(rank, key))
        for key in order.sample(keys, 4):
            expected = tensor_of(1 - rank, key)
            received = transport.receive(1 - rank, key, TensorSpec(tuple(expected.shape), expected.dtype))
            start_ns, end_ns = received.copied_ns
            wrong += received.tensor.device != own or not torch.equal(received.tensor, expected)
            wrong += not received.queued_ns <= start_ns <= end_ns
            received.release()
    path = str(transport.statistics(1 - rank)["path"])
    transport.close()
    return wrong + transport.sending(), path


def gather(transport: Any, rank: int) -> int:
    """Send messages as parts that the stream makes late; return how many were wrong."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    device = transport.options.device
    own = torch.device("cpu") if device is None else torch.device("cuda", device)
    wrong = 0
    for key in range(8):
        if device is not None:
            torch.cuda._sleep(SLEEP_CYCLES // 8)  # type: ignore[no-untyped-call]
        parts = [(part * MIB, torch.full((MIB,), 10 * rank + part, dtype=torch.uint8, device=own)) for part in range(4)]
        transport.send_parts(1 - rank, key, [transport.part(*part) for part in reversed(parts)], 4 * MIB)
        del parts  # the transport alone keeps them
        received = transport.receive(1 - rank, key, TensorSpec((4, MIB), torch.uint8))
        expected = 10 * (1 - rank) + torch.arange(4, dtype=torch.uint8, device=own)
        wrong += not torch.equal(received.tensor, expected[:, None].expand(4, MIB))
        received.release()
    transport.close()
    return wrong + int(transport.sending())


def release_late(transport: Any, rank: int) -> bool:
    """Return whether contents stay whole while the receiver's stream still has to read them."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    if rank == 0:
        own = torch.device("cpu") if transport.options.device is None else torch.device("cuda")
        for key in range(12):
            transport.send(1, key, torch.full((MIB,), float(key), device=own))
        transport.close()
        return True
    sums = []
    for key in range(12):
        tensor = transport.receive(0, key, TensorSpec((MIB,), torch.float32)).tensor
        torch.cuda._sleep(SLEEP_CYCLES // 8)  # type: ignore[no-untyped-call]
        sums.append(tensor.double().sum())
        del tensor  # in the order of the stream
    right = [total.item() for total in sums] == [float(key * MIB) for key in range(12)]
    transport.close()
    return right


def _run(function: Callable[..., Any], directory: str, rank: int, device: int | None, pipes: tuple[Any, Any]) -> None:
    addresses, results = pipes
    try:
        os.environ["MEGATRONAPP_SHM_DIR"] = directory
        results.send(("result", function(connected(directory, rank, device, addresses), rank)))
    except BaseException:
        results.send(("error", traceback.format_exc()))
        raise


def run_two(
    function: Callable[..., Any], shm: pathlib.Path, devices: tuple[int | None, int | None], *, nodes: int
) -> list[Any]:
    """Run a function of this file in two processes, each with its end of a connection and its rank."""
    context = multiprocessing.get_context("spawn")
    addresses: tuple[Any, Any] = context.Pipe() if nodes == 2 else (None, None)
    pipes, processes = [], []
    for rank in range(2):
        directory = shm / f"node-{rank if nodes == 2 else 0}"
        directory.mkdir(exist_ok=True)
        ours, theirs = context.Pipe()
        arguments = (function, str(directory), rank, devices[rank], (addresses[rank], theirs))
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    try:
        for pipe in pipes:
            assert pipe.poll(150), "a rank hangs"
            kind, value = pipe.recv()
            assert kind == "result", value
            results.append(value)
        for process in processes:
            process.join(60)
            assert not process.is_alive(), "a rank does not end"
    finally:
        for process in processes:
            process.kill()
    assert [list(directory.iterdir()) for directory in shm.iterdir()] == [[]] * nodes
    return results


CASES = {
    "host to device": ((None, 0), 1, ("host memory", "pinned host memory")),
    "device to host": ((0, None), 1, ("pinned host memory", "host memory")),
    "devices on two nodes": ((0, 0), 2, ("ucx through pinned memory",) * 2),
    "host and device on two nodes": ((None, 0), 2, ("ucx", "ucx through pinned memory")),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_arrive_bit_equal_in_any_order(shm: pathlib.Path, case: str) -> None:
    devices, nodes, paths = CASES[case]
    assert run_two(exchange, shm, devices, nodes=nodes) == [(0, path) for path in paths]


@pytest.mark.parametrize("case", CASES)
def test_messages_are_gathered_from_parts(shm: pathlib.Path, case: str) -> None:
    devices, nodes, _ = CASES[case]
    assert run_two(gather, shm, devices, nodes=nodes) == [0, 0]


@pytest.mark.parametrize("case", [name for name in CASES if name != "device to host"])
def test_memory_returns_in_the_order_of_the_stream(shm: pathlib.Path, case: str) -> None:
    devices, nodes, _ = CASES[case]
    assert run_two(release_late, shm, devices, nodes=nodes) == [True, True]
