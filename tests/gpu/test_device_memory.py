"""Memory of a device in the log, and the snapshot where it runs out."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from device_training import train

RunRanks = Callable[..., list[Any]]


def run_out(flags: str) -> str:
    """Train with batches that no device holds; return the kind of the error."""
    import torch

    try:
        train(flags)
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return ""


def test_a_snapshot_is_written_where_memory_runs_out(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    too_large = "--micro-batch-size 65536 --global-batch-size 65536 --record-memory-history"
    (found,) = run_ranks(1, run_out, f"{too_large} --memory-snapshot-path {tmp_path}/memory.pickle")
    assert found == "OutOfMemoryError"
    assert (tmp_path / "memory.rank0.pickle").stat().st_size > 0


@pytest.mark.parametrize("flags", [""])
def test_peaks_are_those_since_the_last_line(run_ranks: RunRanks, flags: str) -> None:
    (peaks,) = run_ranks(1, peaks_of_two_sizes)
    assert peaks[0] > peaks[1] > 0


def peaks_of_two_sizes() -> list[float]:
    import torch

    from megatronapp_trainer.training.watch.device_memory import take_peak_gib

    take_peak_gib()
    found = []
    for elements in (1 << 28, 1 << 20):
        tensor = torch.ones(elements, device="cuda")
        del tensor
        found.append(take_peak_gib()[0])
    return found
