"""Tensors over the native transport: sent from where they are, received as views of shared memory.

A key has 64 bits (the trainer packs kind, microbatch, chunk and step into it) and identifies a message alone: receivers
may take messages in any order. docs/adr/0021-transport-in-shared-memory.md describes the native transport.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

import megatronapp_native as native
from megatronapp_common.names import DEFAULT_SHM_DIR, Env
from megatronapp_common.trace import TransferPath
from megatronapp_trainer.errors import PeerLostError, TransferError, TransferTimeoutError

if TYPE_CHECKING:
    from megatronapp_native._native import PeerStatistics

P = ParamSpec("P")
R = TypeVar("R")


def shared_memory_directory() -> str:
    """Return the directory that MEGATRONAPP_SHM_DIR names, or /dev/shm."""
    return os.environ.get(Env.SHM_DIR) or DEFAULT_SHM_DIR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """How a rank takes part. All ranks of an attempt have the same job, attempt, slots and directory."""

    job: str
    """Uid of the job; names files in shared memory."""
    attempt: int
    rank: int
    slot_bytes: int
    """Bytes of the largest message."""
    slots: int = 8
    """Messages from one rank to another that are not released yet; more wait in the sender's queue."""
    deadline_s: float = 600.0
    """For peers to connect, for a send to get a slot, and for a receive that names none."""
    threads: int = 1
    """Threads that copy messages of this rank in host memory."""
    directory: str = dataclasses.field(default_factory=shared_memory_directory)
    device: int | None = None
    """Ordinal of the CUDA device whose tensors are sent and received; None for tensors of the host.

    Peers may have a device or not. Messages between a device and a host, or another node, pass through pinned memory.
    """
    pinned: bool = False
    """With a device: so do messages to other devices of the node, for devices that do not reach each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype that a receiver expects."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class MessagePart(NamedTuple):
    """Memory that is sent as a part of a message."""

    offset: int
    """First byte in the message."""
    address: int
    bytes: int
    owner: torch.Tensor
    """A tensor on the memory, which keeps it."""


class _DeviceSlot:
    """Memory of a message on a device, for `torch.as_tensor`; its end releases the message in the order of a stream."""

    __slots__ = ("__cuda_array_interface__", "_message", "_stream")

    def __init__(self, message: native.TransportMessage, stream: int) -> None:
        self._message = message
        self._stream = stream
        self.__cuda_array_interface__ = {
            "shape": (message.bytes,),
            "typestr": "|u1",
            "data": (message.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            # The release would be part of the graph, and each replay would give back whatever is in the slot then.
            _LET_GO_IN_CAPTURES.append((self._message, self._stream))
        else:
            self._message.release(self._stream)


_LET_GO_IN_CAPTURES: collections.deque[tuple[native.TransportMessage, int]] = collections.deque()
"""Messages whose tensors ended while a CUDA graph was captured, and the streams in whose order they are released."""


def _release_let_go() -> None:
    """Release what captures have let go, once none is under way."""
    while _LET_GO_IN_CAPTURES and not torch.cuda.is_current_stream_capturing():
        message, stream = _LET_GO_IN_CAPTURES.popleft()
        message.release(stream)


class ReceivedTensor:
    """A tensor in the memory of its message.

    `release` gives the memory back to the sender, who overwrites it; the tensor must not be used from then on. Without
    `release` that happens when neither this object nor any tensor on the memory is referenced.

    On a device it is for work on the stream that was current when it was received: that stream waits for the copy, and
    the memory is given back once all has ended that is enqueued there at the release.
    """

    __slots__ = ("_message", "_stream", "tensor")

    def __init__(self, message: native.TransportMessage, spec: TensorSpec, device: int | None = None) -> None:
        self._message = message
        self._stream: int | None = None
        if device is not None:
            self._stream = torch.cuda.current_stream(device).cuda_stream
            message.wait(self._stream)
            slot = torch.as_tensor(_DeviceSlot(message, self._stream), device=torch.device("cuda", device))
            self.tensor = slot.view(spec.dtype).view(spec.shape)
        elif spec.bytes:
            self.tensor = torch.frombuffer(message, dtype=spec.dtype).view(spec.shape)
        else:
            self.tensor = torch.empty(spec.shape, dtype=spec.dtype)

    @property
    def sender(self) -> int:
        """Rank that sent it."""
        return self._message.peer

    @property
    def key(self) -> int:
        return self._message.key

    @property
    def copied_ns(self) -> tuple[int, int]:
        """Start and end of the sender's copy on the monotonic clock."""
        return self._message.start_ns, self._message.end_ns

    @property
    def message(self) -> native.TransportMessage:
        return self._message

    @property
    def queued_ns(self) -> int:
        """When the sender was asked to send it, on the same clock."""
        return self._message.queued_ns

    def release(self) -> None:
        self._message.release(self._stream)


def translated(error: native.TransportError) -> PeerLostError | TransferError:
    """Return the error of this package, whose exit code says whether the evidence is with another rank."""
    if isinstance(error, native.TransferTimeoutError):
        return TransferTimeoutError(str(error))
    if isinstance(error, native.PeerLostError):
        return PeerLostError(str(error))
    return TransferError(str(error))


def raises_trainer_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Raise native errors of `function` as those of this package."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except native.TransportError as error:
            raise translated(error) from error

    return call


class RemotePeers(Protocol):
    """Peers on other nodes."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the peers."""

    def add_to(self, endpoint: native.TransportEndpoint) -> None:
        """Add them to the endpoint of this rank."""


class TensorTransport:
    """The transport of one rank. Ranks construct it with their peers, connect, and then use it from any thread.

    Errors: PeerLostError for a peer that died or closed, TransferTimeoutError (also a PeerLostError) for one that
    hangs, TransferError for wrong use, ranks that do not agree, and damaged memory. The native error is their cause.
    """

    @raises_trainer_errors
    def __init__(self, options: TransportOptions, *, peers: Sequence[int], boards: Sequence[int] = ()) -> None:
        """Make the shared memory of this rank.

        peers: ranks that exchange messages with this one. boards: ranks with which only progress and logs are shared.
        """
        self.options = options
        self.paths: dict[int, str] = {}
        """Names of the paths to the peers that exchange messages, once connected."""
        self._message_peers = tuple(peers)
        self._endpoint = native.TransportEndpoint(
            directory=options.directory,
            job=options.job,
            attempt=options.attempt,
            rank=options.rank,
            slot_bytes=options.slot_bytes,
            slots=options.slots,
            deadline_s=options.deadline_s,
            threads=options.threads,
            device=options.device,
            pinned=options.pinned,
        )
        for peer in peers:
            self._endpoint.add_peer(peer, True)
        for peer in boards:
            self._endpoint.add_peer(peer, False)

    @raises_trainer_errors
    def connect(self, remote: RemotePeers | None = None) -> dict[int, int]:
        """Wait until all peers have connected, too. `remote`: peers on other nodes, which are added before.

        Returns the shortest round trip to each of them in nanoseconds.
        """
        if remote is not None:
            try:
                remote.add_to(self._endpoint)
            except BaseException:
                self._endpoint.close(False)  # so that no file is left in shared memory
                raise
        self._endpoint.connect()
        ranks = () if remote is None else remote.ranks
        for peer in (*self._message_peers, *ranks):
            name = self._endpoint.statistics(peer)["path"]
            self.paths[peer] = "shared memory" if name == "host memory" else name
        return {peer: self._endpoint.round_trip_ns(peer) or 0 for peer in ranks}

    @raises_trainer_errors
    def send(self, peer: int, key: int, tensor: torch.Tensor) -> None:
        """Queue a tensor and return. Its contents must not change while `sending` counts it.

        On a device it is sent as it is when all has ended that is enqueued on the current stream, and kept alive until
        it is copied.
        """
        source = _source(tensor, self.options.device)
        self._endpoint.send(peer, key, source.data_ptr(), source.nbytes, source, _stream(self.options.device))

    @raises_trainer_errors
    def part(self, offset: int, tensor: torch.Tensor) -> MessagePart:
        """Return a tensor as the part of a message from byte `offset` on."""
        source = _source(tensor, self.options.device)
        return MessagePart(offset, source.data_ptr(), source.nbytes, source)

    @raises_trainer_errors
    def send_parts(self, peer: int, key: int, parts: Sequence[MessagePart], size: int) -> None:
        """Queue one message of `size` bytes that is gathered from parts, and return.

        parts: memory of the transport's device, in any order, without overlap in the message. Bytes that no part covers
        arrive with any value. Otherwise as `send`, for all of the parts.
        """
        places = [(address, offset, length) for offset, address, length, _ in parts]
        owners = [part.owner for part in parts]
        self._endpoint.send_parts(peer, key, places, size, owners, _stream(self.options.device))

    @raises_trainer_errors
    def poll(self, peer: int, key: int, spec: TensorSpec, *, posted: bool = False) -> ReceivedTensor | None:
        """Return the tensor if it has arrived, or with `posted` also if it is on its way.

        On a device the current stream waits for it.
        """
        _release_let_go()
        message = self._endpoint.poll_posted(peer, key) if posted else self._endpoint.poll(peer, key)
        return None if message is None else _received(message, spec, self.options.device)

    @raises_trainer_errors
    def take_arrived(self, peers: Sequence[int], spec: TensorSpec | None) -> list[ReceivedTensor]:
        """Return all tensors of these peers that have arrived, in no order; without `spec` as bytes.

        The failure of a peer is raised only if there are none.
        """
        _release_let_go()
        return [_received(message, spec, self.options.device) for message in self._endpoint.take_arrived(peers)]

    @raises_trainer_errors
    def posted(self, peers: Sequence[int]) -> list[tuple[int, int]]:
        """Return sender and key of each message whose copy is enqueued on the sender's device and has not ended."""
        return self._endpoint.posted(peers)

    @raises_trainer_errors
    def receive(self, peer: int, key: int, spec: TensorSpec, deadline_s: float | None = None) -> ReceivedTensor:
        """Wait for the tensor, at most `deadline_s` seconds or the deadline of the options."""
        _release_let_go()
        message = self._endpoint.receive(peer, key, _deadline(self.options, deadline_s))
        return _received(message, spec, self.options.device)

    def sending(self) -> int:
        """Return how many sent tensors are not copied yet."""
        return self._endpoint.sending()

    @raises_trainer_errors
    def activity(self) -> int:
        """Return a number that changes with each message, log entry and failure. Read it before polling."""
        return self._endpoint.activity()

    @raises_trainer_errors
    def wait_activity(self, seen: int, deadline_s: float | None = None) -> bool:
        """Wait until `activity` is not `seen`; return False at the deadline."""
        return self._endpoint.wait_activity(seen, _deadline(self.options, deadline_s))

    @raises_trainer_errors
    def publish(self, index: int, value: int, stream: torch.cuda.Stream | None = None) -> None:
        """Store a 64-bit number of this rank at `index`; the last value wins and wakes no peer.

        With a stream of the device: once all has ended that is enqueued there.
        """
        self._endpoint.publish(index, value, None if stream is None else stream.cuda_stream)

    @raises_trainer_errors
    def progress(self, peer: int, index: int) -> int:
        """Return the number that a peer published at `index`; 0 before the first one."""
        return self._endpoint.read(peer, index)

    @raises_trainer_errors
    def lead(self, followers: Sequence[int]) -> None:
        """Begin a log of decisions that these ranks follow."""
        self._endpoint.lead(followers)

    @raises_trainer_errors
    def append(self, decision: int, deadline_s: float | None = None) -> None:
        """Append 64 bits to the log of this rank; wait while it is full."""
        self._endpoint.append(decision, _deadline(self.options, deadline_s))

    @raises_trainer_errors
    def poll_decision(self, leader: int) -> int | None:
        """Return the next entry of a leader's log if there is one: each once and in order."""
        return self._endpoint.poll_entry(leader)

    @raises_trainer_errors
    def next_decision(self, leader: int, deadline_s: float | None = None) -> int:
        """Wait for the next entry of a leader's log."""
        return self._endpoint.next_entry(leader, _deadline(self.options, deadline_s))

    @raises_trainer_errors
    def statistics(self, peer: int) -> "PeerStatistics":
        """Return counts and the last 256 transfers with their true times."""
        return self._endpoint.statistics(peer)

    @raises_trainer_errors
    def close(self, *, drain: bool = True) -> None:
        """End the threads; with `drain`, deliver first what was sent (within the deadline). May be called again."""
        self._endpoint.close(drain)


def transfer_path(name: str) -> TransferPath:
    """Return the path of `TensorTransport.paths` as traces name it."""
    if name.startswith("ucx"):
        return TransferPath.UCX
    return TransferPath.CUDA_IPC if name == "CUDA IPC" else TransferPath.SHARED_MEMORY


def _source(tensor: torch.Tensor, device: int | None) -> torch.Tensor:
    """Return a tensor to send. Raises TransferError for one that is elsewhere than the transport's."""
    own = torch.device("cpu") if device is None else torch.device("cuda", device)
    if tensor.device != own:
        remedy = "send tensor.cpu()" if device is None else f"send tensor.to('{own}')"
        raise TransferError(f"a tensor on {tensor.device} cannot be sent over a transport of {own}; {remedy}")
    return tensor.detach().contiguous()


def _stream(device: int | None) -> int | None:
    return None if device is None else torch.cuda.current_stream(device).cuda_stream


def _deadline(options: TransportOptions, deadline_s: float | None) -> float:
    return options.deadline_s if deadline_s is None else deadline_s


def _received(message: native.TransportMessage, spec: TensorSpec | None, device: int | None) -> ReceivedTensor:
    spec = spec or TensorSpec((message.bytes,), torch.uint8)
    if message.bytes != spec.bytes:
        raise TransferError(
            f"key {message.key:#x} from rank {message.peer} has {message.bytes} bytes, and {tuple(spec.shape)} of"
            f" {spec.dtype} are {spec.bytes}; let sender and receiver agree on shape and dtype"
        )
    return ReceivedTensor(message, spec, device)
