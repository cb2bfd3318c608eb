"""Tensors over shared memory between real processes, and the errors that end them."""

import contextlib
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import megatronapp_native as native
from megatronapp_common.names import ExitCode

RunRanks = Callable[..., list[Any]]

PEER = """
import sys
import megatronapp_native as native
endpoint = native.TransportEndpoint(
    directory=sys.argv[1], job="job", attempt=1, rank=1, slot_bytes=4096, slots=2, deadline_s=240.0, threads=1)
endpoint.add_peer(0, True)
endpoint.connect()
print("connected", flush=True)
sys.stdin.read()
"""


def exchange(directory: str, dtype_name: str, seed: int) -> tuple[int, int]:
    """Send and receive 40 tensors in each direction, in other orders on each rank; return wrong and unfinished ones."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, TensorTransport, TransportOptions

    rank = int(os.environ["RANK"])
    peers = [peer for peer in range(int(os.environ["WORLD_SIZE"])) if peer != rank]
    dtype = getattr(torch, dtype_name)
    shapes = [(3, 5, 7), (256, 128), (), (0, 4), (1,)]

    def tensor_of(sender: int, key: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * sender + key)
        return torch.randn(shapes[key % 5], generator=generator).to(dtype)

    options = TransportOptions(job="job", attempt=1, rank=rank, slot_bytes=1 << 17, slots=3, directory=directory)
    transport = TensorTransport(options, peers=peers)
    transport.connect()
    order = random.Random(seed)
    wrong = 0
    for first in range(0, 40, 3):  # as many as there are slots, so that any order can be received
        keys = list(range(first, first + 3))
        for key in order.sample(keys, 3):
            for peer in peers:
                transport.send(peer, key, tensor_of(rank, key))
        for key in random.Random(seed + rank).sample(keys, 3):
            for peer in peers:
                expected = tensor_of(peer, key)
                received = transport.receive(peer, key, TensorSpec(tuple(expected.shape), dtype))
                start_ns, end_ns = received.copied_ns
                wrong += not torch.equal(received.tensor, expected) or start_ns > end_ns
                received.release()
    transport.close()
    return wrong, transport.sending()


@pytest.mark.torch
@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_tensors_arrive_bit_equal_in_any_order(run_ranks: RunRanks, tmp_path: pathlib.Path, dtype_name: str) -> None:
    results = run_ranks(3, exchange, str(tmp_path), dtype_name, 5)
    assert results == [(0, 0)] * 3
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def native_peer(directory: pathlib.Path) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Rank 0 of this process, connected with rank 1 in another one that waits for the end of its input."""
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions

    command = [sys.executable, "-c", PEER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        options = TransportOptions(job="job", attempt=1, rank=0, slot_bytes=4096, slots=2, directory=str(directory))
        transport = TensorTransport(options, peers=[1])
        try:
            transport.connect()
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            yield transport, process
        finally:
            transport.close(drain=False)
            process.kill()
    assert list(directory.iterdir()) == []


def test_a_killed_peer_is_an_error_with_the_exit_code_of_victims(tmp_path: pathlib.Path) -> None:
    import torch

    from megatronapp_trainer.errors import PeerLostError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    with native_peer(tmp_path) as (transport, process):
        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1 died") as caught:
            transport.receive(1, 5, TensorSpec((2,), torch.float32), 240.0)
        with pytest.raises(PeerLostError, match="rank 1 died"):
            transport.send(1, 5, torch.ones(2))
    assert caught.value.exit_code == ExitCode.PEER_LOST
    assert isinstance(caught.value.__cause__, native.PeerLostError)
    assert caught.value.__cause__.peer == 1


def test_a_peer_that_sends_nothing_is_a_timeout(tmp_path: pathlib.Path) -> None:
    import torch

    from megatronapp_trainer.errors import TransferTimeoutError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    with native_peer(tmp_path) as (transport, _):
        with pytest.raises(
            TransferTimeoutError, match=r"receive from rank 1, key 0x5: nothing within 0\.05 s"
        ) as caught:
            transport.receive(1, 5, TensorSpec((2,), torch.float32), 0.05)
        cause = caught.value.__cause__
        assert isinstance(cause, native.TransferTimeoutError)
        assert (cause.peer, cause.key, cause.direction, cause.seconds) == (1, 5, "receive", 0.05)
        assert transport.poll(1, 5, TensorSpec((2,), torch.float32)) is None
        with pytest.raises(TransferTimeoutError, match="entry of a log"):
            transport.next_decision(1, 0.01)


def test_a_signal_interrupts_a_wait(tmp_path: pathlib.Path) -> None:
    class SignalledError(Exception):
        pass

    def on_alarm(_number: int, _frame: object) -> None:
        raise SignalledError

    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with native_peer(tmp_path) as (transport, _), pytest.raises(SignalledError):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            transport.receive(1, 5, TensorSpec((2,), torch.float32), 240.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def transports(tmp_path: pathlib.Path) -> Iterator[list[Any]]:
    """Two connected ranks in this process."""
    import threading

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions

    made = [
        TensorTransport(
            TransportOptions(job="job", attempt=1, rank=rank, slot_bytes=4096, slots=2, directory=str(tmp_path)),
            peers=[1 - rank],
        )
        for rank in range(2)
    ]
    other = threading.Thread(target=made[1].connect)
    other.start()
    made[0].connect()
    other.join()
    yield made
    for transport in made:
        transport.close(drain=False)


def test_memory_is_released_with_the_last_tensor_on_it(transports: list[Any]) -> None:
    import torch

    from megatronapp_trainer.errors import TransferError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    spec = TensorSpec((4,), torch.float32)
    transports[0].send(1, 7, torch.arange(4.0))
    row = transports[1].receive(0, 7, spec, 240.0).tensor[1:]
    with pytest.raises(TransferError, match="key 0x7 was sent to rank 1 before"):
        transports[0].send(1, 7, torch.zeros(4))
    assert row.tolist() == [1.0, 2.0, 3.0]
    del row
    gc.collect()
    transports[0].send(1, 7, torch.zeros(4))
    assert transports[1].receive(0, 7, spec, 240.0).tensor.tolist() == [0.0] * 4


def test_sent_memory_lives_until_it_is_copied(transports: list[Any]) -> None:
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    spec = TensorSpec((1024,), torch.float32)
    for key in range(20):  # far more than there are slots
        transports[0].send(1, key, torch.full((1024,), float(key)))
    assert transports[0].sending() >= 18
    all_queued_ns = native.monotonic_ns()
    starts_ns = []
    for key in range(20):
        received = transports[1].receive(0, key, spec, 240.0)
        assert float(received.tensor.sum()) == 1024.0 * key
        assert received.queued_ns <= all_queued_ns
        starts_ns.append(received.copied_ns[0])
        del received
    assert max(starts_ns) > all_queued_ns, "the wait for a slot is not part of the copy"
    transports[0].close()
    assert transports[0].sending() == 0


def test_all_arrived_tensors_are_taken_together(transports: list[Any]) -> None:
    import torch

    from megatronapp_trainer.errors import PeerLostError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    spec = TensorSpec((4,), torch.float32)
    for key in (3, 9):
        transports[0].send(1, key, torch.full((4,), float(key)))
    received = {message.key: message for message in transports[1].take_arrived([0], spec)}
    assert {key: message.tensor.tolist() for key, message in received.items()} == {3: [3.0] * 4, 9: [9.0] * 4}
    assert {message.sender for message in received.values()} == {0}
    assert transports[1].take_arrived([0], spec) == []
    assert transports[1].poll(0, 3, spec) is None
    transports[0].close()
    with pytest.raises(PeerLostError, match="rank 0 closed"):
        transports[1].receive(0, 1, spec, 240.0)
    with pytest.raises(PeerLostError, match="rank 0 closed"):
        transports[1].take_arrived([0], spec)
    assert transports[1].take_arrived([], spec) == []


def test_transfers_have_their_true_times(transports: list[Any]) -> None:
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    before = native.monotonic_ns()
    transports[0].send(1, 3, torch.ones(8))
    transports[1].receive(0, 3, TensorSpec((8,), torch.float32), 240.0).release()
    for transport, sent in ((transports[0], True), (transports[1], False)):
        ((key, size, start_ns, end_ns, was_sent),) = transport.statistics(1 if sent else 0)["last"]
        assert (key, size, was_sent) == (3, 32, sent)
        assert before <= start_ns <= end_ns <= native.monotonic_ns()


def test_progress_and_decisions(transports: list[Any]) -> None:
    leader, follower = transports
    leader.publish(native.PROGRESS_WORDS - 1, 2**64 - 1)
    assert follower.progress(0, native.PROGRESS_WORDS - 1) == 2**64 - 1
    seen = follower.activity()
    leader.lead([1])
    for decision in (5, 6, 7):
        leader.append(decision)
    assert follower.wait_activity(seen)
    assert [follower.next_decision(0), follower.poll_decision(0), follower.next_decision(0)] == [5, 6, 7]
    assert follower.poll_decision(0) is None


def test_refusals_name_the_remedy(transports: list[Any]) -> None:
    import torch

    from megatronapp_trainer.errors import TransferError
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    with pytest.raises(TransferError, match="does not fit a slot of 4096; give all ranks larger slots"):
        transports[0].send(1, 1, torch.ones(2000))
    with pytest.raises(TransferError, match=r"send tensor\.cpu"):
        transports[0].send(1, 1, torch.ones(2, device="meta"))
    with pytest.raises(TransferError, match="rank 9 is not connected"):
        transports[0].poll(9, 1, TensorSpec((), torch.float32))
    transports[0].send(1, 1, torch.ones(2))
    with pytest.raises(TransferError, match=r"key 0x1 from rank 0 has 8 bytes, and \(3,\) of torch.float32 are 12"):
        transports[1].receive(0, 1, TensorSpec((3,), torch.float32), 240.0)
    transports[0].close()
    with pytest.raises(TransferError, match="this endpoint is closed"):
        transports[0].send(1, 1, torch.ones(2))


def gather(directory: str) -> int:
    """Send messages as parts in any order, and the same messages whole; return how many were wrong."""
    import torch

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, TensorTransport, TransportOptions

    rank = int(os.environ["RANK"])
    peer = 1 - rank
    options = TransportOptions(job="job", attempt=1, rank=rank, slot_bytes=1 << 17, slots=3, directory=directory)
    transport = TensorTransport(options, peers=[peer])
    transport.connect()
    wrong = 0
    for key in range(20):
        generator = torch.Generator().manual_seed(key)
        sizes = torch.randint(0, 20_000, (6,), generator=generator).tolist()
        whole = torch.randint(0, 255, (sum(sizes),), generator=generator, dtype=torch.uint8)
        if rank == 0:
            parts, start = [], 0
            for size in sizes:
                parts.append((start, whole[start : start + size].clone()))  # the transport alone keeps it alive
                start += size
            transport.send_parts(1, key, [transport.part(*part) for part in reversed(parts)], start)
            del parts
        else:
            received = transport.receive(0, key, TensorSpec(tuple(whole.shape), torch.uint8))
            wrong += not torch.equal(received.tensor, whole)
            received.release()
    transport.close()
    return wrong + transport.sending()


@pytest.mark.torch
def test_gathered_messages_arrive_bit_equal(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    assert run_ranks(2, gather, str(tmp_path)) == [0, 0]


@pytest.mark.torch
def test_gathered_messages_refuse_parts_that_overlap_or_are_elsewhere(tmp_path: pathlib.Path) -> None:
    import torch

    from megatronapp_trainer.errors import TransferError

    with native_peer(tmp_path) as (transport, _):
        part = torch.ones(4)
        with pytest.raises(TransferError, match="begins before the end of the one before it, 16"):
            transport.send_parts(1, 7, [transport.part(8, part), transport.part(0, part)], 24)
        with pytest.raises(TransferError, match="16 bytes at 0 exceeds its message of 15 bytes"):
            transport.send_parts(1, 7, [transport.part(0, part)], 15)
        with pytest.raises(TransferError, match=r"a tensor on meta cannot be sent .* send tensor.cpu\(\)"):
            transport.part(0, part.to("meta"))
        transport.send_parts(1, 7, [transport.part(0, part)], 16)
