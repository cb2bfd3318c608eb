"""Memory of the device: what the log shows of it, and a snapshot where it runs out."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError

log = logging.getLogger(__name__)
_GIB = 1 << 30
_ENTRIES = 100_000
"""Allocations and releases that are recorded, the newest."""


def take_peak_gib() -> tuple[float, float]:
    """Return the most memory that tensors took since the last call, and the most that torch reserved, in GiB."""
    peaks = torch.cuda.max_memory_allocated() / _GIB, torch.cuda.max_memory_reserved() / _GIB
    torch.cuda.reset_peak_memory_stats()
    return peaks


@contextlib.contextmanager
def snapshot_on_out_of_memory(config: TrainerConfig, rank: int, *, is_cuda: bool) -> Iterator[None]:
    """Record allocations inside the context with `--record-memory-history`, and write them if memory runs out.

    Raises UsageError without a GPU.
    """
    if not config.watch.record_memory_history:
        yield
        return
    if not is_cuda:
        raise UsageError("--record-memory-history needs a GPU; leave it out")
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    try:
        yield
    except torch.OutOfMemoryError:
        write_snapshot(snapshot_path(config, rank))
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def snapshot_path(config: TrainerConfig, rank: int) -> pathlib.Path:
    """Return the file of a rank: `snapshot.pickle` becomes `snapshot.rank3.pickle`."""
    path = pathlib.Path(config.watch.memory_snapshot_path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def write_snapshot(path: pathlib.Path) -> None:
    """Write what was recorded, for https://pytorch.org/memory_viz; an error is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call] # of torch
    except (OSError, RuntimeError) as error:
        log.warning("the memory snapshot cannot be written to %s: %s", path, error)
    else:
        log.warning("the memory of the device ran out; its snapshot is in %s", path)
