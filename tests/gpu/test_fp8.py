"""Products in 8 bits on a device: rounding and products next to plain torch, and trainings next to bf16."""

from collections.abc import Callable
from typing import Any

import pytest
from device_training import losses_of, train, train_on_all_kernels

RunRanks = Callable[..., list[Any]]
HALF = "--bf16 --use-distributed-optimizer"
FP8 = f"{HALF} --fp8-format e4m3"
TOLERANCE = 0.05
"""Absolute: the loss falls from 4.8 to 3.8 over eight steps."""


def rounding_errors(tokens: int, size: int) -> dict[str, float]:
    """Return the share of numbers that the kernels round otherwise than torch, and relative errors of products."""
    import torch

    from megatronapp_trainer.models.kernels import fp8

    torch.manual_seed(0)
    inputs = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16) * 7
    weight, bias = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((640, size), (640,)))
    gradient = torch.randn(tokens, 640, device="cuda", dtype=torch.bfloat16) * 1e-4
    inputs[5] = 0
    rows, columns = fp8.quantize_rows(inputs), fp8.quantize_columns(weight)
    expected_rows, expected_columns = fp8.quantize_rows(inputs.cpu()), fp8.quantize_columns(weight.cpu())

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.cpu().float() - expected.float()).norm() / expected.float().norm())

    return {
        "rows": float((rows.values.cpu().float() != expected_rows.values.float()).float().mean()),
        "columns": float((columns.values.cpu().float() != expected_columns.values.float()).float().mean()),
        "row scales": error(rows.scales, expected_rows.scales),
        "column scales": error(columns.scales, expected_columns.scales),
        "output": error(
            fp8.linear(inputs, fp8.quantize_rows(weight), bias),
            fp8.linear(inputs.cpu(), fp8.quantize_rows(weight.cpu()), bias.cpu()),
        ),
        "input gradient": error(
            fp8.input_gradient(gradient, columns), fp8.input_gradient(gradient.cpu(), expected_columns)
        ),
    }


@pytest.mark.parametrize(("tokens", "size"), [(300, 512), (64, 16), (257, 9216)])
def test_rounding_and_products_are_those_of_torch(run_ranks: RunRanks, tokens: int, size: int) -> None:
    (found,) = run_ranks(1, rounding_errors, tokens, size)
    assert found["rows"] < 1e-3 and found["columns"] < 1e-3  # on Ada, which rounds to fp16 first
    assert found["row scales"] < 1e-6 and found["column scales"] < 1e-6
    assert found["output"] < 0.005 and found["input gradient"] < 0.005  # rounded to bf16


def finite_rows_next_to(bad: float) -> list[list[bool]]:
    """Return for each number of an output whether it is finite, where `bad` is in the second row of the inputs."""
    import torch

    from megatronapp_trainer.models.kernels import fp8

    inputs = torch.ones(3, 16, device="cuda", dtype=torch.bfloat16)
    inputs[1, 3] = bad
    weight = fp8.quantize_rows(torch.ones(32, 16, device="cuda", dtype=torch.bfloat16))
    found: list[list[bool]] = fp8.linear(inputs, weight, None).isfinite().tolist()
    return found


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinity_and_nan_reach_the_product(run_ranks: RunRanks, bad: float) -> None:
    (found,) = run_ranks(1, finite_rows_next_to, bad)
    assert found == [[True] * 32, [False] * 32, [True] * 32]


@pytest.mark.parametrize("flags", ["", "--swiglu --normalization RMSNorm"])
def test_fp8_follows_bf16(run_ranks: RunRanks, flags: str) -> None:
    plain = losses_of(run_ranks(1, train, f"{HALF} {flags}"))
    found = losses_of(run_ranks(1, train, f"{FP8} {flags}"))
    assert found != plain
    assert found == pytest.approx(plain, abs=TOLERANCE)


def test_graphs_in_fp8_are_equal_to_the_bit(run_ranks: RunRanks) -> None:
    flags = f"{FP8} --deterministic-mode"
    expected = run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl none")[0]
    found = run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl local")[0]
    assert found["losses"] == expected["losses"]
    assert found["norms"] == expected["norms"]


def roundings_of_weights(flags: str) -> tuple[list[int], list[float]]:
    """Return how often the host rounds weights in each step of a training on graphs, and its losses."""
    from megatronapp_trainer.models.kernels import fp8_weights

    module: Any = fp8_weights
    counts: list[int] = []
    constant = module.Fp8Weights.constant

    def counted_step(weights: Any) -> Any:
        counts.append(0)
        return constant(weights)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            counts[-1] += 1
            return function(*arguments)

        return run

    module.Fp8Weights.constant = counted_step
    module.quantize_rows, module.quantize_columns = counted(module.quantize_rows), counted(module.quantize_columns)
    return counts, train_on_all_kernels(f"{flags} --cuda-graph-impl local")["losses"]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_weights_are_rounded_by_a_graph(run_ranks: RunRanks, microbatches: int) -> None:
    flags = f"{FP8} --deterministic-mode --global-batch-size {2 * microbatches}"
    ((counts, losses),) = run_ranks(1, roundings_of_weights, flags)
    assert counts[0] > 0
    assert counts[3:] == [0] * len(counts[3:])
    plain = run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl none")[0]["losses"]
    assert losses == plain


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", id="TP2"),
        pytest.param("--pipeline-model-parallel-size 2", id="PP2"),
        pytest.param("--pipeline-model-parallel-size 2 --use-dpp", id="PP2-MegaDPP"),
    ],
)
def test_layouts_in_fp8(run_ranks: RunRanks, flags: str) -> None:
    alone = losses_of(run_ranks(1, train, FP8))
    assert losses_of(run_ranks(2, train, f"{FP8} {flags}")) == pytest.approx(alone, abs=TOLERANCE)
