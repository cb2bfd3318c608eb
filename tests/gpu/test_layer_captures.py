"""Statistics of layers on a device: those of the numbers, without a wait of the host, and training is bit-equal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured_training import train
from not_finite_training import LAYER, STEP
from not_finite_training import train as train_to_nan

from megatronapp_common.frames import decode
from megatronapp_common.scope.layer_statistics import RECORD, SiteLayer, first_not_finite, of_values, read_statistics

RunRanks = Callable[..., list[Any]]


def statistics(dtype: str, is_deterministic: bool) -> tuple[bytes, Any]:
    """Statistics that a device counts, and the numbers, while torch raises if the host waits."""
    import torch

    from megatronapp_trainer.scope.statistics.accumulator import StatisticsAccumulator

    values = torch.randn(1 << 20, device="cuda").to(getattr(torch, dtype))
    values[:5] = torch.tensor([0.0, float("nan"), float("inf"), -float("inf"), 1e-30]).to(values)
    row = SiteLayer("residual", 0)
    StatisticsAccumulator([row], values.device).add(row, values)  # loads kernels
    found = StatisticsAccumulator([row], values.device)
    torch.use_deterministic_algorithms(is_deterministic)
    torch.cuda.set_sync_debug_mode("error")
    found.add(row, values)
    torch.cuda.set_sync_debug_mode("default")
    return found.packed().cpu().numpy().tobytes(), values.double().cpu().numpy()


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_are_those_of_the_numbers(run_ranks: RunRanks, dtype: str, is_deterministic: bool) -> None:
    ((packed, values),) = run_ranks(1, statistics, dtype, is_deterministic)
    record, expected = np.frombuffer(packed, RECORD), of_values(values)
    for name in ("count", "nan", "inf", "zero", "histogram", "largest"):
        assert np.array_equal(record[name], expected[name]), name
    np.testing.assert_allclose(record["squares"], expected["squares"], rtol=1e-9)


def test_training_with_captures_is_bit_equal(run_ranks: RunRanks) -> None:
    (on,), (off,) = (run_ranks(1, train, "--bf16", captures) for captures in (True, False))
    assert on["losses"] == off["losses"] and on["norms"] == off["norms"]
    assert len(on["frames"]) == 1


@pytest.mark.parametrize("flags", ["", "--bf16 --use-distributed-optimizer"], ids=["fp32", "bf16"])
def test_the_second_computation_of_a_step_has_the_numbers_of_the_first(run_ranks: RunRanks, flags: str) -> None:
    """A step with dropout that is not finite: its capture afterwards, and a capture of its first computation."""
    found = []
    for every in (100, STEP):
        arguments = f"--deterministic-mode {flags} --scope-capture-interval {every}"
        (rank,) = run_ranks(1, train_to_nan, arguments, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        assert rank["error"].startswith("NotFiniteError: the loss of step 2 is nan")
        (data,) = rank["frames"]
        found.append(read_statistics(decode(data)))
    (rows, again), (expected_rows, expected) = found
    assert rows == expected_rows
    for name in ("count", "nan", "inf", "zero", "histogram", "largest"):
        assert np.array_equal(again[name], expected[name]), name
    np.testing.assert_allclose(again["squares"], expected["squares"], rtol=1e-9)
    assert first_not_finite(rows, again) == SiteLayer("mlp2", LAYER)
