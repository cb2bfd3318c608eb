"""Kernels and CUDA graphs of training on a device: against plain torch, and the losses of whole trainings."""

from collections.abc import Callable
from typing import Any

import pytest
from device_training import losses_of, train, train_on_all_kernels

RunRanks = Callable[..., list[Any]]
OFF = (
    "--attention-backend flash --no-cross-entropy-loss-fusion --no-gradient-accumulation-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm --cuda-graph-impl none"
)
HALF = "--bf16 --use-distributed-optimizer"
TOLERANCE = 1e-5
"""Relative, in fp32 over eight steps of Adam: kernels sum in another order than torch's."""
HALF_TOLERANCE = 0.01
"""Absolute, in bf16: the loss falls from 4.8 to 3.8, and weight gradients and biases are rounded less often."""


def fused(flags: str) -> dict[str, Any]:
    return train(flags)


@pytest.mark.parametrize(
    "flags", ["", "--swiglu --normalization RMSNorm --qk-layernorm", "--openai-gelu --disable-bias-linear"]
)
def test_kernels_train_like_plain_torch(run_ranks: RunRanks, flags: str) -> None:
    plain = losses_of(run_ranks(1, fused, f"{OFF} {flags}"))
    assert losses_of(run_ranks(1, fused, flags)) == pytest.approx(plain, rel=TOLERANCE)


@pytest.mark.parametrize("flags", ["", "--swiglu --normalization RMSNorm"])
def test_kernels_in_bf16_follow_plain_torch(run_ranks: RunRanks, flags: str) -> None:
    plain = losses_of(run_ranks(1, fused, f"{OFF} {HALF} {flags}"))
    assert losses_of(run_ranks(1, fused, f"{HALF} {flags}")) == pytest.approx(plain, abs=HALF_TOLERANCE)


@pytest.mark.parametrize(
    "flags",
    [
        HALF,
        "",
        f"{HALF} --overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights "
        "--ddp-bucket-size 20000",
    ],
)
def test_graphs_are_equal_to_the_bit(run_ranks: RunRanks, flags: str) -> None:
    flags = f"{flags} --deterministic-mode"
    expected = run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl none")[0]
    found = run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl local")[0]
    assert found["losses"] == expected["losses"]
    assert found["norms"] == expected["norms"]


def test_graphs_follow_a_growing_batch(run_ranks: RunRanks) -> None:
    """Each length of a step has its own divisor of the loss, and so its own graph."""
    flags = f"{HALF} --deterministic-mode --rampup-batch-size 2 2 16"
    expected = losses_of(run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl none"))
    assert losses_of(run_ranks(1, train_on_all_kernels, f"{flags} --cuda-graph-impl local")) == expected


def embedding_gradient() -> bool:
    """Return whether the gradient of an embedding is that of torch in fp64, and the same when it is computed again."""
    import torch

    from megatronapp_trainer.models.kernels.embedding import add_rows

    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4096,), device="cuda")
    rows = torch.randn(4096, 640, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.ones(64, 640, device="cuda") for _ in range(2))
    for total in (first, second):
        add_rows(total, tokens, rows)
    expected = torch.ones(64, 640, device="cuda", dtype=torch.float64).index_add_(0, tokens, rows.double())
    return torch.equal(first, second) and bool(torch.allclose(first.double(), expected, rtol=1e-5, atol=1e-4))


def test_rows_of_an_embedding_are_added_in_the_same_order(run_ranks: RunRanks) -> None:
    assert run_ranks(1, embedding_gradient) == [True]
