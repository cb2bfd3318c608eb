"""Tensors between the devices of two processes: on one device, and on two where there are two."""

import multiprocessing
import os
import pathlib
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 1 << 20
SLEEP_CYCLES = 500_000_000
"""A kernel of this length ends after a quarter of a second or more."""


@pytest.fixture
def shm() -> Iterator[pathlib.Path]:
    """Folder in memory: the driver registers no files of a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield pathlib.Path(directory)


def transport_of(directory: str, rank: int, device: int, **options: Any) -> Any:
    """Return rank `rank` of two, connected."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions

    torch.cuda.set_device(device)
    given = {"slot_bytes": 64 * MIB, "slots": 4, "deadline_s": 60.0, "attempt": 1} | options
    transport = TensorTransport(
        TransportOptions(job="job", rank=rank, directory=directory, device=device, **given), peers=[1 - rank]
    )
    transport.connect()
    return transport


def _run(function: Callable[..., Any], pipe: Any, *arguments: Any) -> None:
    try:
        pipe.send(("result", function(*arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise


def run_two(
    function: Callable[..., Any], directory: pathlib.Path, *arguments: Any, devices: tuple[int, int] = (0, 0)
) -> list[Any]:
    """Run a function of this file in two processes, with the directory, its rank, its device and the arguments.

    The result of a killed process is None.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run, args=(function, theirs, str(directory), rank, devices[rank], *arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    try:
        for pipe in pipes:
            assert pipe.poll(150), "a rank hangs"
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "result", None
            assert kind == "result", value
            results.append(value)
        for process in processes:
            process.join(60)
            assert not process.is_alive(), "a rank does not end"
    finally:
        for process in processes:
            process.kill()
    assert list(directory.iterdir()) == []
    return results


SIZES = (1, 2, 1000, 4096, 65_537, MIB, 3 * MIB + 5, 64 * MIB)


def exchange(directory: str, rank: int, device: int, pinned: bool) -> tuple[int, str]:
    """Send and receive tensors of all sizes and three types in any order; return how many were wrong, and the path."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    transport = transport_of(directory, rank, device, pinned=pinned)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32)

    def tensor_of(sender: int, key: int) -> torch.Tensor:
        dtype = dtypes[key % 3]
        generator = torch.Generator("cuda").manual_seed(1000 * sender + key)
        count = -(-SIZES[key % len(SIZES)] // dtype.itemsize)
        count = min(count, 64 * MIB // dtype.itemsize)
        numbers = torch.randint(0, 255, (count,), generator=generator, device="cuda", dtype=torch.uint8)
        return numbers.to(dtype)

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
            wrong += not torch.equal(received.tensor, expected) or not received.queued_ns <= start_ns <= end_ns
            received.release()
    path = str(transport.statistics(1 - rank)["path"])
    transport.close()
    return wrong + transport.sending(), path


@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_arrive_bit_equal_in_any_order(shm: pathlib.Path, pinned: bool) -> None:
    path = "pinned host memory" if pinned else "CUDA IPC"
    assert run_two(exchange, shm, pinned) == [(0, path)] * 2


@pytest.mark.gpus(2)
@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_arrive_bit_equal_on_another_device(shm: pathlib.Path, pinned: bool) -> None:
    path = "pinned host memory" if pinned else "CUDA IPC"
    assert run_two(exchange, shm, pinned, devices=(0, 1)) == [(0, path)] * 2


def wait_early(directory: str, rank: int, device: int) -> list[bool]:
    """Launch work on an input that its sender's device makes later; return whether it was not there, and right."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    transport = transport_of(directory, rank, device)
    spec = TensorSpec((MIB,), torch.bfloat16)
    warm = torch.full((MIB,), 1.0, dtype=torch.bfloat16, device="cuda")  # kernels are not loaded while a stream waits
    assert bool((warm * 2 == 2).all().item()) and warm.sum().item() > 0
    if rank == 0:
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        transport.send(1, 7, torch.full((MIB,), 3.0, dtype=torch.bfloat16, device="cuda"))
        transport.publish(5, 99, torch.cuda.current_stream())
        assert transport.receive(1, 8, spec).tensor.sum().item() == 2 * MIB
        transport.close()
        return []
    while (0, 7) not in transport.posted([0]):
        transport.wait_activity(transport.activity(), 0.001)
    received = transport.poll(0, 7, spec, posted=True)
    assert received is not None
    early = not received.message.complete
    unknown = received.message.copied_ns is None and transport.progress(0, 5) == 0
    doubled = received.tensor * 2
    transport.send(0, 8, torch.full((MIB,), 2.0, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    right = bool((doubled == 6).all().item())
    while received.message.copied_ns is None or transport.progress(0, 5) != 99:
        transport.wait_activity(transport.activity(), 0.001)
    start_ns, end_ns = received.message.copied_ns
    received.release()
    transport.close()
    return [early, unknown, right, received.queued_ns < start_ns < end_ns]


def test_streams_wait_for_inputs_on_their_way(shm: pathlib.Path) -> None:
    assert run_two(wait_early, shm) == [[], [True] * 4]


def release_late(directory: str, rank: int, device: int) -> bool:
    """Return whether contents stay whole while the receiver's stream still has to read them."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    transport = transport_of(directory, rank, device, slots=2, slot_bytes=4 * MIB)
    spec = TensorSpec((MIB,), torch.float32)
    if rank == 0:
        for key in range(8):
            transport.send(1, key, torch.full((MIB,), float(key), device="cuda"))
        transport.close()
        return True
    sums = []
    for key in range(8):
        tensor = transport.receive(0, key, spec).tensor
        torch.cuda._sleep(SLEEP_CYCLES // 4)  # type: ignore[no-untyped-call]
        sums.append(tensor.double().sum())
        del tensor  # in the order of the stream
    right = [total.item() for total in sums] == [float(key * MIB) for key in range(8)]
    transport.close()
    return right


def test_memory_returns_in_the_order_of_the_stream(shm: pathlib.Path) -> None:
    assert run_two(release_late, shm) == [True, True]


def let_go_in_capture(directory: str, rank: int, device: int) -> bool:
    """Return whether messages stay right where a tensor ended within the capture of a graph that is replayed later."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    transport = transport_of(directory, rank, device)
    count, spec = 16, TensorSpec((MIB,), torch.float32)
    if rank == 0:
        for key in range(count):
            transport.send(1, key, torch.full((MIB,), float(key), device="cuda"))
        transport.close()
        return True
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own gap
    with torch.cuda.stream(stream):
        first = [transport.receive(0, 0, spec).tensor]
        total = torch.zeros((), device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first.clear()
            total += 1
        right = True
        for key in range(1, count):
            tensor = transport.receive(0, key, spec).tensor
            graph.replay()
            right = right and bool((tensor == key).all())
            del tensor
        right = right and float(total) == count - 1
    transport.close()
    return right


def test_a_tensor_may_end_within_the_capture_of_a_graph(shm: pathlib.Path) -> None:
    assert run_two(let_go_in_capture, shm) == [True, True]


def outlive(directory: str, rank: int, device: int) -> bool | None:
    """Kill rank 0 while the stream of rank 1 waits for its message; return whether the device of rank 1 still works."""
    import torch

    from megatronapp_trainer.errors import PeerLostError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    transport = transport_of(directory, rank, device, slot_bytes=4 * MIB)
    spec = TensorSpec((MIB,), torch.float32)
    if rank == 0:
        message = torch.zeros(MIB, device="cuda")
        for _ in range(40):
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        transport.send(1, 7, message)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        signal.pause()
    while not transport.posted([0]):
        transport.wait_activity(transport.activity(), 0.001)
    received = transport.poll(0, 7, spec, posted=True)
    assert received is not None
    result = received.tensor.sum()  # its first launch may not return before the wait ends
    torch.cuda.synchronize()  # the wait has ended, whatever the result
    del result
    with pytest.raises(PeerLostError, match="rank 0 died"):
        transport.receive(0, 8, spec)
    transport.close(drain=False)
    return bool((torch.ones(4, device="cuda") == 1).all().item())


def test_a_stream_that_waits_for_a_killed_rank_is_let_through(shm: pathlib.Path) -> None:
    assert run_two(outlive, shm) == [None, True]


def connect_often(directory: str, rank: int, device: int, times: int) -> int:
    """Return the bytes of the device that are missing after many connections with a message each."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    free = 0
    for attempt in range(times):
        transport = transport_of(directory, rank, device, attempt=attempt, slot_bytes=8 * MIB)
        transport.send(1 - rank, 1, torch.ones(MIB, device="cuda"))
        assert transport.receive(1 - rank, 1, TensorSpec((MIB,), torch.float32)).tensor[5].item() == 1.0
        transport.close()
        del transport
        if attempt == 2:
            free = torch.cuda.mem_get_info()[0]
    return free - torch.cuda.mem_get_info()[0]


def test_connections_leave_no_memory_of_the_device(shm: pathlib.Path) -> None:
    missing = run_two(connect_often, shm, 200)
    assert max(missing) <= 128 * MIB  # each connection has 64 MiB of slots in both processes together
