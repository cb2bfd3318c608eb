"""Copies to the host: all tensors of a step as one run of bytes, in parallel with the model's own work.

On a GPU the copy runs on a separate stream into pinned memory, and the thread that sends it asks an event whether it is
done. On a CPU it is done at once.
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
    """Further fields of its entry in a part's header."""
    has_rows: bool = True
    """False for pictures of heads and rows of pinned heads, which are not transposed."""

    def rows_first(self) -> torch.Tensor:
        """Return the values as [rows, layers, ..]."""
        return self.values.transpose(0, 1) if self.has_rows and self.layers is not None else self.values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BufferLayout:
    """Tensors of a packed buffer, in their order."""

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
    """Pack tensors into one buffer, rows before layers, as frames have them.

    The widest numbers are first, so that all are aligned.
    """
    turned = [dataclasses.replace(tensor, values=tensor.rows_first()) for tensor in found]
    ordered = sorted(turned, key=lambda tensor: -tensor.values.dtype.itemsize)
    parts = [tensor.values.contiguous().view(-1).view(torch.uint8) for tensor in ordered]
    return PackedBuffer(
        layout=BufferLayout(
            found=tuple(dataclasses.replace(tensor, values=torch.empty(0)) for tensor in ordered),
            shapes=tuple(tuple(tensor.values.shape) for tensor in ordered),
            dtypes=tuple(tensor.values.dtype for tensor in ordered),
        ),
        flat=torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8),
    )


class DeviceToHostCopier:
    """Copies packed buffers from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # torch's own gap
        self._steps: UnderWay = collections.deque()
        self._prompts: UnderWay = collections.deque()

    def before_decode(self, *, is_last_sent: bool) -> None:
        """Let the next step's kernels wait for reductions of the step before the last one, which read what it writes.

        It writes nothing that reductions of the last step or of prompts read. `is_last_sent`: the newest copy is of the
        last step.
        """
        _await(self._steps, but=int(is_last_sent))

    def before_prompts(self) -> None:
        """Let the next step's kernels wait for all that was sent: it may write over any sequence's keys."""
        _await(self._steps)
        _await(self._prompts)

    def on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose kernels run after all earlier copies and before all later ones."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until no copy is under way; for step boundaries at which graphs are dropped."""
        if self._stream is not None:
            self._stream.synchronize()

    def now(self) -> "torch.cuda.Event | None":
        """Record an event after all that has been launched; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def send_step(
        self, make: Callable[[], PackedBuffer], keep_alive: object, after: "torch.cuda.Event | None"
    ) -> "PendingCopy":
        """Start to make and copy the buffer of a decode step after `after`, in parallel with the model's own work.

        `keep_alive` is what the kernels read; it is kept alive until the copy is ready or another step waits for it.
        """
        return self._send(make, keep_alive, after, self._steps)

    def send_prompts(
        self, make: Callable[[], PackedBuffer], keep_alive: object, after: "torch.cuda.Event | None"
    ) -> "PendingCopy":
        """Start to make and copy the buffer of prompts."""
        return self._send(make, keep_alive, after, self._prompts)

    def _send(
        self,
        make: Callable[[], PackedBuffer],
        keep_alive: object,
        after: "torch.cuda.Event | None",
        under_way: "UnderWay",
    ) -> "PendingCopy":
        if self._stream is None or after is None:
            buffer = make()
            return PendingCopy(buffer, buffer.flat.clone(), None, keep_alive)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            buffer = make()
            host = torch.empty(buffer.flat.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(buffer.flat, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        copy = PendingCopy(buffer, host, event, keep_alive)
        under_way.append((event, copy))
        return copy


def _await(under_way: "UnderWay", *, but: int = 0) -> None:
    """Let later kernels wait for these copies, except the `but` newest. What they held may be overwritten then."""
    while len(under_way) > but:
        event, copy = under_way.popleft()
        torch.cuda.current_stream().wait_event(event)
        copy.release()


class PendingCopy:
    """A packed buffer on its way to the host."""

    def __init__(
        self, buffer: PackedBuffer, host: torch.Tensor, event: "torch.cuda.Event | None", keep_alive: object
    ) -> None:
        self.layout = buffer.layout
        self._flat: torch.Tensor | None = buffer.flat
        self._host = host
        self._event = event
        self._keep_alive = keep_alive

    def release(self) -> None:
        """Hold what it reads no more: all later kernels run after it."""
        self._keep_alive = None

    @property
    def nbytes(self) -> int:
        """Size in the host's memory."""
        return self._host.numel()

    def ready(self) -> bool:
        """Return true, and hold nothing on the device any more, once all bytes are copied. Does not wait."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self._event = self._keep_alive = self._flat = None
        return True

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes, once `ready`."""
        found: NDArray[np.uint8] = self._host.numpy()
        return found

    def open(self) -> list[tuple[NamedTensor, NDArray[Any]]]:
        """Return the tensors as arrays on the host, rows first. Only once `ready`."""
        data = self.data
        return [
            (found, data[place : place + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
            for found, place, shape, dtype in self.layout.tensors()
        ]


UnderWay: TypeAlias = "collections.deque[tuple[torch.cuda.Event, PendingCopy]]"
