"""Tracing adds no collective and no message: the calls of all process groups of a training, with and without it."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import traced_training
from traced_training import MICROBATCHES, STEPS, records

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.windows.agreement import PackedLevels

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced", "gather"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter"),
    *("alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
)
"""Methods of torch's process groups that other ranks take part in."""
WINDOWS = "--trace-interval 3 --continuous-trace-iterations 2 --trace-budget 100"
LAYOUTS = {
    "TP2-SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2": (2, "--overlap-grad-reduce --overlap-param-gather"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


class Call(NamedTuple):
    """A call of a process group."""

    method: str
    ranks: int
    numbers: int
    """Elements of its largest tensor."""


def train_counting_calls(flags: list[str]) -> dict[str, Any]:
    """Train on this rank; `calls`: of its process groups from start to end, in order."""
    import torch.distributed as dist

    def counting(name: str) -> Callable[..., Any]:
        whole = getattr(dist.ProcessGroup, name)

        def call(group: Any, *arguments: Any, **named: Any) -> Any:
            calls.append(tuple(Call(name, group.size(), largest([*arguments, *named.values()]))))
            return whole(group, *arguments, **named)

        return call

    calls: list[tuple[Any, ...]] = []
    for name in METHODS:
        setattr(dist.ProcessGroup, name, counting(name))
    return traced_training.train(flags) | {"calls": calls}


def largest(values: Any) -> int:
    """Return the elements of the largest tensor among values and lists of values."""
    import torch

    if isinstance(values, torch.Tensor):
        return values.numel()
    return max(map(largest, values), default=0) if isinstance(values, list | tuple) else 0


@pytest.mark.full("the same calls in other layouts", but=("TP2-SP-windows", "DP2-phases"))
@pytest.mark.parametrize("windows", ["", WINDOWS], ids=["phases", "windows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tracing_adds_no_collective_and_no_message(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str, windows: str
) -> None:
    """Check also that only the reduction of the loss is larger, by what ranks announce of windows."""
    world, flags = LAYOUTS[layout]
    flags = f"--global-batch-size {4 * MICROBATCHES} {flags}"
    environment = {"MEGATRONAPP_SHM_DIR": str(tmp_path), "MEGATRONAPP_SHM_PREFIX": "test"}
    plain = run_ranks(world, train_counting_calls, flags.split(), environment=environment)
    traced = run_ranks(world, train_counting_calls, f"{flags} --trace {windows}".split(), environment=environment)
    members = 2 if "tensor" in flags else 1
    announced = PackedLevels(world // members, members).length
    for without, found in zip(plain, traced, strict=True):
        assert "records" not in without
        layers = int((records(found)["kind"] == RecordKind.LAYER_FORWARD).sum())
        assert bool(layers) == bool(windows)
        first, second = [Call(*call) for call in without["calls"]], [Call(*call) for call in found["calls"]]
        assert [call[:2] for call in second] == [call[:2] for call in first]
        grown = [after.numbers - before.numbers for before, after in zip(first, second, strict=True)]
        assert [growth for growth in grown if growth] == [announced] * STEPS
        assert len(first) > STEPS * MICROBATCHES
