"""Training on devices: losses of the processor, alike in every layout, resumed to the bit, without needless waits."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from device_training import losses_of, train, train_without_fusing

RunRanks = Callable[..., list[Any]]
TOLERANCE = 1e-4
"""Relative, in fp32 over eight steps of Adam: kernels of devices and processors, and layouts, add in other orders."""
FP16 = "--fp16 --initial-loss-scale 4096"


def on_device(flags: str) -> dict[str, Any]:
    result = train(flags)
    assert result["device"].startswith("cuda")
    return result


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> list[float]:
    """Losses on one device, in fp32."""
    return losses_of(run_ranks(1, on_device, ""))


@pytest.mark.parametrize("flags", ["", "--transformer-impl local", "--swiglu --normalization RMSNorm"])
def test_losses_are_those_of_the_processor(run_ranks: RunRanks, on_processor: RunRanks, flags: str) -> None:
    device = losses_of(run_ranks(1, on_device, flags))
    assert device == pytest.approx(losses_of(on_processor(1, train, flags)), rel=TOLERANCE)


@pytest.mark.parametrize("flags", ["--bf16", FP16, f"{FP16} --use-distributed-optimizer"])
def test_half_precision_follows_fp32(run_ranks: RunRanks, alone: list[float], flags: str) -> None:
    device = losses_of(run_ranks(1, on_device, flags))
    assert device == pytest.approx(alone, abs=0.03)
    assert device != alone


def test_a_resumed_run_is_equal_to_the_bit(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"--bf16 --deterministic-mode --save {tmp_path} --load {tmp_path}"
    first = run_ranks(1, on_device, f"{flags} --exit-interval 4")[0]["losses"]
    second = run_ranks(1, on_device, flags)[0]["losses"]
    assert first + second == run_ranks(1, on_device, "--bf16 --deterministic-mode")[0]["losses"]


def unfused(flags: str) -> dict[str, Any]:
    return train_without_fusing(flags)


@pytest.mark.parametrize("flags", ["", "--bf16 --use-distributed-optimizer"])
def test_fused_adam_trains_like_the_plain_optimizer(run_ranks: RunRanks, flags: str) -> None:
    (fused,), (plain,) = run_ranks(1, on_device, flags), run_ranks(1, unfused, flags)
    assert all(fused["fused"])
    assert not any(plain["fused"])
    assert fused["step_devices"] == ["cuda"]
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5 if not flags else 1e-3)


def test_adam_is_fused_after_a_checkpoint_of_a_processor(
    run_ranks: RunRanks, on_processor: RunRanks, tmp_path: pathlib.Path
) -> None:
    flags = f"--save {tmp_path} --load {tmp_path}"
    first = on_processor(1, train, f"{flags} --exit-interval 4")[0]
    second = run_ranks(1, on_device, flags)[0]
    assert all(second["fused"])
    assert second["step_devices"] == ["cuda"]
    whole = losses_of(on_processor(1, train, ""))
    assert first["losses"] + second["losses"] == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.parametrize("flags", ["", "--bf16 --use-distributed-optimizer"])
def test_synchronisations_of_a_step_do_not_grow_with_parameters(run_ranks: RunRanks, flags: str) -> None:
    few, many = (run_ranks(1, on_device, f"{flags} --num-layers {layers}")[0] for layers in (2, 8))
    assert few["synchronisations"] == many["synchronisations"]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
    ids=["TP2", "TP2-SP", "PP2", "VPP2", "DP2", "DP2-overlap"],
)
def test_layouts_agree_with_a_single_device(run_ranks: RunRanks, alone: list[float], layout: str) -> None:
    assert losses_of(run_ranks(2, on_device, layout)) == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2 --use-dpp", ""],
    ids=["TP2-SP", "PP2-MegaDPP", "DP2"],
)
def test_layouts_in_fp16_follow_a_single_device(run_ranks: RunRanks, alone: list[float], layout: str) -> None:
    assert losses_of(run_ranks(2, on_device, f"{FP16} {layout}")) == pytest.approx(alone, abs=0.03)


EXPERTS = (
    "--disable-bias-linear --swiglu --normalization RMSNorm --num-experts 4 --moe-ffn-hidden-size 64 "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 64 "
    "--moe-token-dispatcher-type alltoall"
)


def test_experts_train_as_on_the_processor(run_ranks: RunRanks, on_processor: RunRanks) -> None:
    device = losses_of(run_ranks(1, on_device, EXPERTS))
    assert device == pytest.approx(losses_of(on_processor(1, train, EXPERTS)), rel=TOLERANCE)


def test_grouped_products_train_as_expert_by_expert(run_ranks: RunRanks) -> None:
    """In bf16, where torch's kernel is used."""
    grouped = losses_of(run_ranks(1, on_device, f"{EXPERTS} --bf16 --moe-grouped-gemm"))
    assert grouped == pytest.approx(losses_of(run_ranks(1, on_device, f"{EXPERTS} --bf16")), abs=0.01)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_of_two_devices_train_as_those_of_a_single_device(run_ranks: RunRanks, dispatcher: str) -> None:
    pair = (
        f"{EXPERTS} --expert-model-parallel-size 2 --use-distributed-optimizer --moe-token-dispatcher-type {dispatcher}"
    )
    assert losses_of(run_ranks(2, on_device, pair)) == pytest.approx(
        losses_of(run_ranks(1, on_device, EXPERTS)), rel=TOLERANCE
    )


@pytest.mark.gpus(2)
def test_experts_in_fp16_follow_a_single_device(run_ranks: RunRanks) -> None:
    pair = f"{EXPERTS} {FP16} --moe-router-dtype fp32 --expert-model-parallel-size 2 --use-distributed-optimizer"
    assert losses_of(run_ranks(2, on_device, pair)) == pytest.approx(
        losses_of(run_ranks(1, on_device, EXPERTS)), abs=0.03
    )
