"""MegaDPP on GPUs: stages train as in the static order, to the last bit, also with late copies.

On one GPU two stages share it; on two and four each rank has one.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from device_training import train
from late_copies import LateCopies
from late_inputs import wrap_transport

RunRanks = Callable[..., list[Any]]
Record = tuple[list[float], list[float]]

STEPS = 10
SHARED = (
    "--pipeline-model-parallel-size 2 --ranks-per-gpu 2 --distributed-backend gloo --deterministic-mode "
    f"--micro-batch-size 1 --train-iters {STEPS} --untie-embeddings-and-output-weights"
)
LAYOUTS = {
    "PP2-fp32": "",
    "PP2-bf16": "--bf16",
    "VPP2-fp32": "--num-virtual-stages-per-pipeline-rank 2",
    "VPP2-bf16-recomputed": "--num-virtual-stages-per-pipeline-rank 2 --bf16 --recompute-activations",
}
SCHEDULES = ("auto", "zero-bubble", "dfc")
PATIENCE_S = 50.0
"""Limit of a run, so that one that hangs is named."""


def train_late(flags: str, seed: int | None) -> tuple[list[float], list[float], int]:
    """Losses and gradient norms, and the number of tasks that this rank has launched before their input was there."""
    import torch

    from megatronapp_trainer.pipeline.transport.shared_memory_transport import SharedMemoryTransport

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    early: list[object] = []
    take_posted = SharedMemoryTransport.take_posted

    def counting(transport: SharedMemoryTransport, task: Any) -> Any:
        early.append(task)
        return take_posted(transport, task)

    SharedMemoryTransport.take_posted = counting  # type: ignore[assignment, method-assign]
    if seed is not None:
        wrap_transport(lambda transport: LateCopies(transport, seed + int(os.environ["RANK"])))
    result = train(flags)
    assert result["device"].startswith("cuda")
    return result["losses"], result["norms"], len(early)


def record(results: list[Any]) -> Record:
    """Losses and norms of the reporting rank, which is the last stage."""
    losses, norms, _ = results[-1]
    assert len(losses) == STEPS
    assert all(losses)
    return losses, norms


@pytest.fixture(scope="module")
def static(run_ranks: RunRanks) -> Callable[[str], Record]:
    """Record of the static order, once for each layout."""
    known: dict[str, Record] = {}

    def run(layout: str) -> Record:
        if layout not in known:
            flags = f"{SHARED} {LAYOUTS[layout]} --use-dpp --dpp-schedule static"
            results = run_ranks(2, train_late, flags, None, timeout_s=PATIENCE_S)
            known[layout] = record(results)
        return known[layout]

    return run


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (layout, schedule)
        for layout in LAYOUTS
        for schedule in SCHEDULES
        if schedule != "zero-bubble" or "VPP" not in layout
    ],
)
def test_schedules_are_bit_equal_to_the_static_order(
    run_ranks: RunRanks, static: Callable[[str], Record], layout: str, schedule: str, late: bool
) -> None:
    flags = f"{SHARED} {LAYOUTS[layout]} --use-dpp --dpp-schedule {schedule}"
    assert record(run_ranks(2, train_late, flags, 3 if late else None, timeout_s=PATIENCE_S)) == static(layout)


OWN_GPUS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "TP2xPP2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.gpus(ranks)) for name, (ranks, _) in OWN_GPUS.items()],
)
def test_ranks_with_a_gpu_each_are_bit_equal_to_megatron_core(run_ranks: RunRanks, layout: str) -> None:
    ranks, flags = OWN_GPUS[layout]
    flags = f"{flags} --deterministic-mode --micro-batch-size 1 --train-iters {STEPS} --bf16"
    flags += " --untie-embeddings-and-output-weights"
    expected = record(run_ranks(ranks, train_late, flags, None, timeout_s=PATIENCE_S))
    for schedule in ("static", "auto"):
        late = f"{flags} --use-dpp --dpp-schedule {schedule}"
        assert record(run_ranks(ranks, train_late, late, 3, timeout_s=PATIENCE_S)) == expected, schedule


def test_tasks_of_the_first_stage_are_launched_before_late_inputs(
    run_ranks: RunRanks, static: Callable[[str], Record]
) -> None:
    # It needs each gradient as soon as that is sent. The last stage needs outputs a microbatch after they are sent.
    flags = f"{SHARED} {LAYOUTS['PP2-fp32']} --use-dpp --dpp-schedule static"
    results = run_ranks(2, train_late, flags, 3, timeout_s=PATIENCE_S)
    assert record(results) == static("PP2-fp32")
    assert results[0][2] > 0


def test_losses_are_those_of_a_single_stage(run_ranks: RunRanks, static: Callable[[str], Record]) -> None:
    flags = f"--deterministic-mode --micro-batch-size 1 --train-iters {STEPS} --untie-embeddings-and-output-weights"
    (alone,) = run_ranks(1, train, flags)
    assert static("PP2-fp32")[0] == pytest.approx(alone["losses"], rel=1e-4)
