"""Copies of tensors of a GPU that pass through its own memory, which is much faster than the way to the host.

Where the device has room for a second copy, the tensors are copied there first, and from there to the host while
training changes them. A thread does that in slices: a small copy to the host, such as that of a loss, waits for a slice
and not for the whole.
"""

import collections
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatronapp_trainer.config.parallel import ParallelConfig

logger = logging.getLogger(__name__)

SLICE_BYTES = 64 << 20
"""Bytes that are copied to the host at a time: a millisecond or two."""
_QUEUED_SLICES = 2
"""Slices that the device knows of: one is copied, and the next begins without the host."""
_MARGIN = 0.05
"""Part of the device's memory that stays free for other libraries, which do not get back what torch keeps."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with its place in memory of the host."""


def fits(needed: int, *, free: int, former: int, total: int) -> bool:
    """Return True if a snapshot fits into the memory of a device.

    Args:
        needed: bytes of the snapshot.
        free: bytes that no process has.
        former: bytes of the snapshot before, which torch keeps for the next one.
        total: bytes of the device.
    """
    return free + former - needed >= _MARGIN * total


def slices_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], limit: int) -> Iterator[Pairs]:
    """Yield the bytes of contiguous tensors and their places in groups of at most `limit` bytes."""
    group: list[tuple[torch.Tensor, torch.Tensor]] = []
    left = limit
    for source, target in pairs:
        source_bytes, target_bytes = (part.reshape(-1).view(torch.uint8) for part in (source, target))
        start = 0
        while start < source_bytes.numel():
            end = min(source_bytes.numel(), start + left)
            group.append((source_bytes[start:end], target_bytes[start:end]))
            left -= end - start
            start = end
            if left == 0:
                yield group
                group, left = [], limit
    if group:
        yield group


class SnapshotMemory:
    """Memory of the device for the snapshots of one kind of saves, if it has room for them at the time."""

    def __init__(self) -> None:
        self._former_bytes = 0
        self._has_logged = False

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor | None:
        """Return memory, as its bytes; None if there is too little of it, which is logged once."""
        free, total = torch.cuda.mem_get_info(device)
        if fits(size_bytes, free=free, former=self._former_bytes, total=total):
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # what torch had for it has got another use, or another process took memory
                memory = None
            left, _ = torch.cuda.mem_get_info(device)
            if memory is not None and fits(0, free=left, former=0, total=total):
                self._former_bytes = size_bytes
                return memory
            # Torch has given the memory of the one before back, as it does when CUDA graphs are captured.
            self._former_bytes = 0
            del memory
            torch.cuda.empty_cache()
        self._log(size_bytes, free)
        return None

    def _log(self, size_bytes: int, free: int) -> None:
        if not self._has_logged:
            logger.info(
                "checkpoints: a snapshot in the memory of the device takes %.1f GiB, and %.1f GiB are free, of which "
                "some stay so; the update after a save waits for the copy to the host",
                size_bytes / 2**30,
                free / 2**30,
            )
        self._has_logged = True


def snapshot_memory(parallel: ParallelConfig) -> SnapshotMemory | None:
    """Return memory for snapshots; None where ranks share a GPU, whose free memory each would take for its own."""
    return SnapshotMemory() if parallel.ranks_per_gpu == 1 else None


class SnapshotCopy:
    """A copy that has begun: the snapshot is queued on the current stream before anything that follows."""

    def __init__(self, pairs: Pairs, memory: Sequence[torch.Tensor]) -> None:
        """Copy tensors to their places by way of `memory`, which is of their shapes."""
        for (tensor, _), snapshot in zip(pairs, memory, strict=True):
            snapshot.copy_(tensor, non_blocking=True)
        self._device = memory[0].device
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()
        self._error: BaseException | None = None
        targets = [(snapshot, target) for snapshot, (_, target) in zip(memory, pairs, strict=True)]
        self._thread = threading.Thread(target=self._run, args=(targets,), name="checkpoint-copy", daemon=True)
        self._thread.start()

    def _run(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            with torch.cuda.device(self._device):
                self._copy(pairs)
        except BaseException as error:  # the training's thread raises it
            self._error = error
        finally:
            pairs.clear()  # torch has the memory of the snapshot again

    def _copy(self, pairs: Pairs) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_event(self._ready)
        queued: collections.deque[torch.cuda.Event] = collections.deque()
        try:
            with torch.cuda.stream(stream):
                for group in slices_of(pairs, SLICE_BYTES):
                    if len(queued) == _QUEUED_SLICES:
                        queued.popleft().synchronize()
                    for source, target in group:
                        target.copy_(source, non_blocking=True)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(stream)
                    queued.append(event)
        finally:
            stream.synchronize()  # nothing reads the snapshot when it is let go

    def done(self) -> bool:
        """Return True once everything is copied. Raises any error of the copy."""
        if self._thread.is_alive():
            return False
        self.wait()
        return True

    def before_change(self) -> None:
        """Let changes of the tensors on the current stream wait for the snapshot."""
        torch.cuda.current_stream().wait_event(self._ready)

    def wait(self) -> None:
        """Block until everything is copied. Raises any error of the copy."""
        self._thread.join()
        if self._error is not None:
            raise self._error
