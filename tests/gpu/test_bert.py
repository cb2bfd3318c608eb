"""BERT on devices: losses of the processor, alike in every layout, and resumed to the bit."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from device_training import losses_of, train

RunRanks = Callable[..., list[Any]]
TOLERANCE = 1e-4
"""Relative, in fp32 over eight steps of Adam: kernels of devices and processors, and layouts, add in other orders."""


def bert(flags: str) -> dict[str, Any]:
    return train(f"--model-type bert {flags}")


def bert_on_device(flags: str) -> dict[str, Any]:
    result = bert(flags)
    assert result["device"].startswith("cuda")
    return result


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> list[float]:
    """Losses on one device, in fp32."""
    return losses_of(run_ranks(1, bert_on_device, ""))


def test_losses_are_those_of_the_processor(alone: list[float], on_processor: RunRanks) -> None:
    assert alone == pytest.approx(losses_of(on_processor(1, bert, "")), rel=TOLERANCE)


def test_bf16_follows_fp32(run_ranks: RunRanks, alone: list[float]) -> None:
    device = losses_of(run_ranks(1, bert_on_device, "--bf16"))
    assert device == pytest.approx(alone, abs=0.03)
    assert device != alone


def test_a_resumed_run_is_equal_to_the_bit(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"--bf16 --deterministic-mode --save {tmp_path} --load {tmp_path}"
    first = run_ranks(1, bert_on_device, f"{flags} --exit-interval 4")[0]["losses"]
    second = run_ranks(1, bert_on_device, flags)[0]["losses"]
    assert first + second == run_ranks(1, bert_on_device, "--bf16 --deterministic-mode")[0]["losses"]


def test_a_step_waits_for_the_device_as_often_with_more_layers(run_ranks: RunRanks) -> None:
    few, many = (run_ranks(1, bert_on_device, f"--bf16 --num-layers {layers}")[0] for layers in (2, 8))
    assert few["synchronisations"] == many["synchronisations"]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-size 2 --use-dpp",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
    ids=["TP2", "TP2-SP", "PP2", "VPP2", "PP2-MegaDPP", "DP2-overlap"],
)
def test_layouts_agree_with_a_single_device(run_ranks: RunRanks, alone: list[float], layout: str) -> None:
    assert losses_of(run_ranks(2, bert_on_device, layout)) == pytest.approx(alone, rel=TOLERANCE)
