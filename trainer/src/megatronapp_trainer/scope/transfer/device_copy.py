"""Numbers on their way to the host: all tensors of a step as one run of bytes, copied beside the model's own work.

On a GPU the copy runs on a stream of its own into pinned memory, and an event says when it is there; whoever sends it
asks the event. On a CPU the bytes are there at once.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

_NUMPY: Mapping[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float16: np.dtype("<f2"),
    torch.uint8: np.dtype("u1"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NamedTensor:
    """A named tensor of a step, floats or (codes) bytes: [layers, rows, ..], or [rows, ..] of sites without layers."""

    name: str
    values: torch.Tensor
    layers: tuple[int, ...] | None = None
    group: int = 0
    """Which of the captures of a step it belongs to."""
    header: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a part's header says of it beside its layers."""
    has_rows: bool = True
    """No: pictures of heads, and rows of pinned heads, which stand as they are."""

    def rows_first(self) -> torch.Tensor:
        """[rows, layers, ..]."""
        return self.values.transpose(0, 1) if self.has_rows and self.layers is not None else self.values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BufferLayout:
    """Which tensors lie one behind the other in a parcel."""

    found: tuple[NamedTensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def tensors(self) -> "Iterator[tuple[NamedTensor, int, tuple[int, ...], np.dtype[Any]]]":
        """Each with its first byte, its shape, rows first, and its type."""
        place = 0
        for found, shape, dtype in zip(self.found, self.shapes, self.dtypes, strict=True):
            yield found, place, shape, _NUMPY[dtype]
            place += math.prod(shape) * dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedBuffer:
    """Tensors of a step in one buffer on the device."""

    layout: BufferLayout
    flat: torch.Tensor


def pack(found: Sequence[NamedTensor]) -> PackedBuffer:
    """Put tensors into one buffer, rows before layers, as frames have them; the widest numbers first, so that all lie
    as their type needs it."""
    turned = [dataclasses.replace(one, values=one.rows_first()) for one in found]
    ordered = sorted(turned, key=lambda one: -one.values.dtype.itemsize)
    pieces = [one.values.contiguous().view(-1).view(torch.uint8) for one in ordered]
    return PackedBuffer(
        layout=BufferLayout(
            found=tuple(dataclasses.replace(one, values=torch.empty(0)) for one in ordered),
            shapes=tuple(tuple(one.values.shape) for one in ordered),
            dtypes=tuple(one.values.dtype for one in ordered),
        ),
        flat=torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8),
    )


class DeviceToHostCopier:
    """Sends parcels from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # torch's own gap
        self._steps: UnderWay = collections.deque()
        self._prompts: UnderWay = collections.deque()

    def before_decode(self) -> None:
        """Let the next step's kernels wait for those beside the step before the last one, which read what it will
        write. It writes nothing that those beside the last one or beside prompts read."""
        _await(self._steps, but=1)

    def before_prompts(self) -> None:
        """Let the next step's kernels wait for all that was sent: it may write over any sequence's keys."""
        _await(self._steps)
        _await(self._prompts)

    def on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        """What is launched within comes behind all that was sent, and before what will be sent."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Until nothing is under way; for borders of steps at which graphs are thrown away."""
        if self._stream is not None:
            self._stream.synchronize()

    def now(self) -> "torch.cuda.Event | None":
        """When all that has been launched up to here is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def send_step(
        self, make: Callable[[], PackedBuffer], held: object, after: "torch.cuda.Event | None"
    ) -> "PendingCopy":
        """Make a parcel of a decode step beside the model's own work, once `after` is done, and start its copy; returns
        at once. `held`, whose memory is read meanwhile, is held until it is ready or another step waits for it."""
        return self._send(make, held, after, self._steps)

    def send_prompts(
        self, make: Callable[[], PackedBuffer], held: object, after: "torch.cuda.Event | None"
    ) -> "PendingCopy":
        """The same, of prompts."""
        return self._send(make, held, after, self._prompts)

    def _send(
        self,
        make: Callable[[], PackedBuffer],
        held: object,
        after: "torch.cuda.Event | None",
        under_way: "UnderWay",
    ) -> "PendingCopy":
        if self._stream is None or after is None:
            parcel = make()
            return PendingCopy(parcel, parcel.flat.clone(), None, held)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            parcel = make()
            host = torch.empty(parcel.flat.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(parcel.flat, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        arrival = PendingCopy(parcel, host, event, held)
        under_way.append((event, arrival))
        return arrival


def _await(under_way: "UnderWay", *, but: int = 0) -> None:
    """Let what is launched next wait for these, the `but` newest left out. What they held may be written over then."""
    while len(under_way) > but:
        event, arrival = under_way.popleft()
        torch.cuda.current_stream().wait_event(event)
        arrival.release()


class PendingCopy:
    """A parcel that has come, or will."""

    def __init__(
        self, parcel: PackedBuffer, host: torch.Tensor, event: "torch.cuda.Event | None", held: object
    ) -> None:
        self.layout = parcel.layout
        self._flat: torch.Tensor | None = parcel.flat
        self._host = host
        self._event = event
        self._held = held

    def release(self) -> None:
        """Nothing that is launched from now on comes before it: what it reads need not be held."""
        self._held = None

    @property
    def nbytes(self) -> int:
        """On the host."""
        return self._host.numel()

    def ready(self) -> bool:
        """All bytes are there; asks, and does not wait. From then on nothing on the device is held."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self._event = self._held = self._flat = None
        return True

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes. Only when `ready`."""
        found: NDArray[np.uint8] = self._host.numpy()
        return found

    def open(self) -> list[tuple[NamedTensor, NDArray[Any]]]:
        """The tensors, as arrays on the host, rows first. Only when `ready`."""
        data = self.data
        return [
            (found, data[place : place + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
            for found, place, shape, dtype in self.layout.tensors()
        ]


UnderWay: TypeAlias = "collections.deque[tuple[torch.cuda.Event, PendingCopy]]"
