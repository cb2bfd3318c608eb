"""Copies of tensors in memory of the host that this process shares with the process that writes them.

Training continues while the copies are made: on a GPU by a stream of their own, from a snapshot where there is room for
it, on a CPU by a thread. The next change of the tensors waits by `before_change`: for the snapshot, or for the copies.
"""

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatronapp_trainer.checkpoint.saving.device_snapshot import Pairs, SnapshotCopy, SnapshotMemory

logger = logging.getLogger(__name__)
_ALIGNMENT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlace:
    """Place of a tensor in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[CopyPlace], int]:
    """Return places for the tensors in a row, and the bytes that they take."""
    places, end = [], 0
    for tensor in tensors:
        places.append(CopyPlace(offset=end, shape=tuple(tensor.shape), dtype=tensor.dtype))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def tensor_at(memory: torch.Tensor, place: CopyPlace) -> torch.Tensor:
    """Return the tensor at a place of a memory, given as its bytes."""
    count = torch.Size(place.shape).numel()
    return memory[place.offset : place.offset + count * place.dtype.itemsize].view(place.dtype).view(place.shape)


def mapped(descriptor: int, size_bytes: int) -> torch.Tensor:
    """Map shared memory; return its bytes."""
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


class HostCopies:
    """Memory for the copies of a checkpoint, which the next one uses again. It has no name and dies with its users."""

    def __init__(self, snapshots: SnapshotMemory | None = None) -> None:
        """Create it, still empty; `snapshots`: as of `begin_copy`."""
        self._snapshots = snapshots
        self.descriptor = os.memfd_create("checkpoint")
        self._memory: torch.Tensor | None = None
        self._copy: TensorCopy | None = None

    def reserve(self, size_bytes: int) -> None:
        """Provide memory for a checkpoint.

        Raises:
            OSError: the host has too little of it.
        """
        if size_bytes == 0 or (self._memory is not None and self._memory.numel() >= size_bytes):
            return
        os.posix_fallocate(self.descriptor, 0, size_bytes)  # an error here, not a signal at the first access
        self._memory = mapped(self.descriptor, size_bytes)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            pin(self._memory)

    def begin(self, tensors: Sequence[torch.Tensor], places: Sequence[CopyPlace]) -> None:
        """Begin to copy; the former copies must be done with. Errors are as of `begin_copy`."""
        pairs = []
        if self._memory is not None:
            pairs = [(tensor, tensor_at(self._memory, place)) for tensor, place in zip(tensors, places, strict=True)]
        self._copy = begin_copy(pairs, self._snapshots)

    def done(self) -> bool:
        """Return True once everything is copied. Raises any error of the copy."""
        return self._copy is None or self._copy.done()

    def before_change(self) -> None:
        """Let changes of the tensors from here on wait for the copies; on a GPU without blocking the host."""
        if self._copy is not None:
            self._copy.before_change()

    def wait(self) -> None:
        """Block until everything is copied. Raises any error of the copy."""
        if self._copy is not None:
            self._copy.wait()

    def close(self) -> None:
        """Give the memory back, once the writer has closed it, too."""
        os.close(self.descriptor)


class TensorCopy(Protocol):
    """A copy of tensors that has begun."""

    def done(self) -> bool:
        """Return True once everything is copied. Raises any error of the copy."""

    def before_change(self) -> None:
        """Let changes of the tensors from here on wait for the copy; on a GPU without blocking the host."""

    def wait(self) -> None:
        """Block until everything is copied. Raises any error of the copy."""


def begin_copy(pairs: Pairs, snapshots: SnapshotMemory | None) -> TensorCopy:
    """Begin to copy tensors to their places; `snapshots`: memory of the device that may be used on the way.

    `done` and `wait` raise what fails here, too: other ranks have begun to copy.
    """
    try:
        return _begun_copy(pairs, snapshots)
    except RuntimeError as error:
        return _FailedCopy(error)


def _begun_copy(pairs: Pairs, snapshots: SnapshotMemory | None) -> TensorCopy:
    device = next((tensor.device for tensor, _ in pairs if tensor.is_cuda), None)
    if device is None:
        return _ThreadCopy(pairs)
    places, size_bytes = places_of([tensor for tensor, _ in pairs])
    memory = None if snapshots is None else snapshots.take(size_bytes, device)
    if memory is None:
        return _StreamCopy(pairs)
    return SnapshotCopy(pairs, [tensor_at(memory, place) for place in places])


class _FailedCopy:
    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def done(self) -> bool:
        raise self._error

    def before_change(self) -> None: ...

    def wait(self) -> None:
        raise self._error


class _ThreadCopy:
    def __init__(self, pairs: Pairs) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pairs,), name="checkpoint-copy", daemon=True)
        self._thread.start()

    def _run(self, pairs: Pairs) -> None:
        try:
            for tensor, target in pairs:
                target.copy_(tensor)
        except BaseException as error:  # the training's thread raises it
            self._error = error

    def done(self) -> bool:
        if self._thread.is_alive():
            return False
        self.wait()
        return True

    def before_change(self) -> None:
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class _StreamCopy:
    def __init__(self, pairs: Pairs) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for tensor, target in pairs:
                target.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(self._stream)
        self._pairs = pairs  # tensors that nobody else holds stay until they are copied

    def done(self) -> bool:
        is_done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return is_done

    def before_change(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def pin(memory: torch.Tensor) -> None:
    """Let the GPU write to the memory by itself. Where CUDA refuses, as for files on a disk, a line is in the log."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error, which otherwise the next launch of training would report
        logger.warning(
            "CUDA cannot pin %.1f GiB of host memory for checkpoints (error %d), so that copying to it is slow and "
            "delays training",
            memory.numel() / 2**30,
            int(code),
        )
