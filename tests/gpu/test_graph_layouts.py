"""CUDA graphs of layouts: replayed in slots, passes train to the last bit as without graphs.

    python -m pytest tests/gpu/test_graph_layouts.py --timeout 600

Kernels, attention and collectives are the same in both runs, in torch's deterministic mode. A sum over two ranks does
not depend on its order. Between steps there are evaluations and checkpoints, which run without graphs.
"""

import importlib
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from device_training import STEPS, losses_of, train
from late_copies import LateCopies
from late_inputs import wrap_transport

RunRanks = Callable[..., list[Any]]
COMMON = "--deterministic-mode --micro-batch-size 1 --eval-iters 1 --eval-interval 3"
HALF = "--bf16 --use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = {
    "TP2": f"{HALF} {TP2}",
    "TP2-fp32": f"{TP2} --qk-layernorm",
    "TP2-SP": f"{HALF} {TP2} --sequence-parallel",
    "TP2-SP-qwen": (
        f"{HALF} {TP2} --sequence-parallel --swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm"
    ),
    "PP2": f"{HALF} {PP2}",
    "PP2-fp16": f"--fp16 --initial-loss-scale 4096 --use-distributed-optimizer {PP2}",
    "PP2-untied": f"{HALF} {PP2} --untie-embeddings-and-output-weights",
    "PP2-VPP2": f"{HALF} {PP2} {VPP2}",
    "PP2-VPP2-no-overlap": f"{HALF} {PP2} {VPP2} --no-overlap-p2p-communication",
    "PP2-growing-batch": f"{HALF} {PP2} --rampup-batch-size 2 2 16",
    "DP2": HALF,
    "DP2-serial": f"{HALF} --no-overlap-data-parallel",
    "DP2-overlap": f"{HALF} {OVERLAP} --ddp-bucket-size 20000 --untie-embeddings-and-output-weights",
    "DP2-growing-batch": f"{HALF} {OVERLAP} --ddp-bucket-size 20000 --rampup-batch-size 2 2 16",
    "MegaDPP-static": f"{HALF} {PP2} --use-dpp --dpp-schedule static",
    "MegaDPP-zero-bubble": f"{HALF} {PP2} --use-dpp --dpp-schedule zero-bubble",
    "MegaDPP-auto": f"{HALF} {PP2} --use-dpp",
    "MegaDPP-auto-VPP2": f"{HALF} {PP2} {VPP2} --use-dpp",
    "MegaDPP-dfc-VPP2": f"{HALF} {PP2} {VPP2} --use-dpp --dpp-schedule dfc",
}
LARGER = {
    "TP2xPP2-SP": f"{HALF} {TP2} {PP2} --sequence-parallel",
    "PP2xDP2-overlap": f"{HALF} {PP2} {OVERLAP}",
    "TP2xPP2-MegaDPP": f"{HALF} {TP2} {PP2} --sequence-parallel --use-dpp",
    "PP4-VPP2": f"{HALF} --pipeline-model-parallel-size 4 {VPP2} --num-layers 8",
}
"""Layouts of four devices."""


def train_counting(flags: str) -> dict[str, Any]:
    """Train with the kernels of graphs, whether there are graphs or not; `replayed`: forward passes from graphs."""
    warnings.simplefilter("ignore")
    for name in ("models.kernels.choice", "pipeline.split_backward"):
        module: Any = importlib.import_module(f"megatronapp_trainer.{name}")
        module.launches_are_replayed = lambda _config: True
    replayed = 0
    for name, owner in (("pass_slot", "PassSlot"), ("graphed_step", "MicrobatchGraph")):
        module = importlib.import_module(f"megatronapp_trainer.pipeline.graphs.{name}")
        replaced = getattr(module, owner)
        whole = replaced.forward

        def counting(graph: Any, *arguments: Any, whole: Any = whole) -> Any:
            nonlocal replayed
            replayed += 1
            return whole(graph, *arguments)

        replaced.forward = counting
    result = train(flags)
    assert result["device"].startswith("cuda")
    return result | {"replayed": replayed}


def train_late(flags: str) -> dict[str, Any]:
    """Train with copies between stages that begin late: outputs of passes are read long after they were launched."""
    seed = 3 + int(os.environ["RANK"])
    wrap_transport(lambda transport: LateCopies(transport, seed))
    return train_counting(flags)


def assert_equal_to_eager(run_ranks: RunRanks, world: int, flags: str) -> None:
    flags = f"{COMMON} {flags}"
    expected = run_ranks(world, train_counting, f"{flags} --cuda-graph-impl none")
    found = run_ranks(world, train_counting, f"{flags} --cuda-graph-impl local")
    assert losses_of(found) == losses_of(expected)
    assert [rank["norms"] for rank in found] == [rank["norms"] for rank in expected]
    assert not any(rank["replayed"] for rank in expected)
    assert all(rank["replayed"] for rank in found)
    assert all(
        rank["synchronisations"] <= other["synchronisations"] for rank, other in zip(found, expected, strict=True)
    )


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_of_two_devices_are_equal_to_the_bit(run_ranks: RunRanks, layout: str) -> None:
    assert_equal_to_eager(run_ranks, 2, LAYOUTS[layout])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", ["MegaDPP-static", "MegaDPP-auto", "MegaDPP-auto-VPP2"])
def test_late_copies_read_what_passes_have_put_out(run_ranks: RunRanks, layout: str) -> None:
    flags = f"{COMMON} {LAYOUTS[layout]}"
    expected = losses_of(run_ranks(2, train_counting, f"{flags} --cuda-graph-impl none"))
    found = run_ranks(2, train_late, f"{flags} --cuda-graph-impl local")
    assert losses_of(found) == expected
    assert all(rank["replayed"] for rank in found)


@pytest.mark.gpus(4)
@pytest.mark.parametrize("layout", LARGER)
def test_graphs_of_four_devices_are_equal_to_the_bit(run_ranks: RunRanks, layout: str) -> None:
    assert_equal_to_eager(run_ranks, 4, LARGER[layout])


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --initial-loss-scale 4096",
        "--fp16 --initial-loss-scale 1e9 --loss-scale-window 2",
        "--fp16 --initial-loss-scale 4096 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
    ids=["fp16", "fp16-overflows", "fp16-overlap"],
)
def test_slots_of_a_single_device_are_equal_to_the_bit(run_ranks: RunRanks, flags: str) -> None:
    assert_equal_to_eager(run_ranks, 1, flags)


@pytest.mark.parametrize("schedule", ["static", "zero-bubble", "auto"])
def test_stages_on_a_common_device_are_equal_to_the_bit(run_ranks: RunRanks, schedule: str) -> None:
    flags = f"{PP2} --ranks-per-gpu 2 --distributed-backend gloo --untie-embeddings-and-output-weights --bf16"
    assert_equal_to_eager(run_ranks, 2, f"{flags} --use-dpp --dpp-schedule {schedule}")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", ["TP2-SP", "PP2", "MegaDPP-auto"])
def test_a_resumed_run_with_graphs_is_equal_to_the_bit(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    flags = f"{COMMON} {LAYOUTS[layout]}"
    expected = losses_of(run_ranks(2, train_counting, f"{flags} --cuda-graph-impl none"))
    resumed = f"{flags} --cuda-graph-impl local --save {tmp_path} --load {tmp_path}"
    parts = [
        run_ranks(2, train_counting, f"{resumed} --save-interval 3 --exit-interval 4"),
        run_ranks(2, train_counting, resumed),
    ]
    assert all(rank["replayed"] for part in parts for rank in part)
    known = [next(rank["losses"] for rank in part if any(rank["losses"])) for part in parts]
    assert [len(losses) for losses in known] == [4, STEPS - 4]
    assert [*known[0], *known[1]] == expected
