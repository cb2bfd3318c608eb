"""The split backward pass on devices: bit-equal to megatron-core's layers, and W frees what is counted."""

from collections.abc import Callable
from typing import Any

import pytest
from split_training import GROUPED, LATE, MIXED, WHOLE, Executor, trace

RunRanks = Callable[..., list[Any]]
FLAGS = f"{GROUPED} --deterministic-mode"


def compare(flags: str) -> bool:
    """Return whether the trace with split layers is that of megatron-core's."""
    expected = trace(flags, WHOLE, split=False)
    return all(trace(flags, tasks) == expected for tasks in (LATE, MIXED))


@pytest.mark.parametrize("flags", [FLAGS, f"{FLAGS} --bf16"])
def test_split_passes_are_bit_equal_to_megatron_core(run_ranks: RunRanks, flags: str) -> None:
    assert run_ranks(1, compare, flags) == [True]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 4000",
    ],
)
def test_layouts_are_bit_equal_to_megatron_core(run_ranks: RunRanks, layout: str) -> None:
    assert run_ranks(2, compare, f"{FLAGS} --bf16 {layout}") == [True] * 2


def fused(flags: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Traces with fused products in two orders, and one of megatron-core's layers."""
    late, mixed = (trace(flags, tasks, fused=True) for tasks in (LATE, MIXED))
    return late, mixed, trace(flags, WHOLE, split=False)


def test_fused_products_do_not_depend_on_the_order_of_tasks(run_ranks: RunRanks) -> None:
    ((late, mixed, plain),) = run_ranks(1, fused, f"{FLAGS} --bf16")
    assert late == mixed
    assert late != plain
    for (losses, _), (expected, _) in zip(late, plain, strict=True):
        assert losses == pytest.approx(expected, abs=0.02)


def retained_and_allocated(flags: str) -> tuple[int, int]:
    """Bytes that the store counts, and bytes that W frees on the device, of one microbatch."""
    import torch

    executor = Executor(flags, split=True)
    executor.step(0, LATE)  # allocates what stays
    store: Any = executor.store
    memory: dict[str, int] = {}

    def measure(task: tuple[str, int]) -> None:
        if task == ("B", 3):
            memory["retained"] = store.retained_bytes
            memory["before"] = torch.cuda.memory_allocated()
        elif task == ("W", 3):
            memory["after"] = torch.cuda.memory_allocated()

    executor.step(1, LATE, measure)
    return memory["retained"], memory["before"] - memory["after"]


def test_w_frees_what_the_store_counts(run_ranks: RunRanks) -> None:
    """Allocations are rounded up to 512 bytes, 18 of them for each of three pending microbatches."""
    ((retained, freed),) = run_ranks(1, retained_and_allocated, f"{FLAGS} --bf16")
    assert retained <= freed <= retained + 3 * 18 * 512
