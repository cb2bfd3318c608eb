"""Products of linear layers in 8 bits: rounding, products, whole trainings, and the flags."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import small_training
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pytest_workers import examples

from megatronapp_trainer.config import parse
from megatronapp_trainer.errors import UsageErrors

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --vocab-size 61 "
    "--make-vocab-size-divisible-by 4 --global-batch-size 4 --lr 3e-3 --lr-decay-style constant --mock-data "
    "--train-iters 5 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --bf16"
)
FP8 = "--fp8-format e4m3"
matrices = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False)
    | st.floats(-(2.0**-20), 2.0**-20, width=32, allow_subnormal=False),
)


def tensor(matrix: Matrix) -> "torch.Tensor":
    import torch

    return torch.from_numpy(matrix.copy())


@settings(max_examples=examples(200), deadline=None)
@given(matrices)
def test_rounding_is_off_by_half_a_step_of_e4m3(matrix: Matrix) -> None:
    from megatronapp_trainer.models.kernels import fp8

    rounded = fp8.quantize_rows(tensor(matrix))
    found, scales = rounded.restored().numpy(), rounded.scales.numpy()
    # Three bits of mantissa; below the smallest normal number, 2^-6, steps of 2^-9. A little for the rounded scale.
    most = np.maximum(np.abs(matrix) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)
    assert (np.abs(found - matrix) <= most).all()
    tops = np.abs(matrix).max(axis=1)
    assert np.abs(found).max(axis=1) == pytest.approx(tops, rel=1e-6, abs=1e-27)


@settings(max_examples=examples(50), deadline=None)
@given(matrices)
def test_columns_are_the_rows_of_the_transposed_matrix(matrix: Matrix) -> None:
    from megatronapp_trainer.models.kernels import fp8

    columns, rows = fp8.quantize_columns(tensor(matrix)), fp8.quantize_rows(tensor(matrix.T))
    assert (columns.restored() == rows.restored()).all()


def test_infinity_and_nan_reach_the_product() -> None:
    import torch

    from megatronapp_trainer.models.kernels import fp8

    for bad in (float("inf"), float("nan")):
        inputs = torch.ones(2, 16)
        inputs[1, 3] = bad
        output = fp8.linear(inputs, fp8.quantize_rows(torch.ones(16, 16)), None)
        assert output[0].isfinite().all()
        assert output[1].isnan().all()


def test_products_are_those_of_the_rounded_operands() -> None:
    import torch

    from megatronapp_trainer.models.kernels import fp8

    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(5, 3, 32) * 7, torch.randn(48, 32), torch.randn(48)
    gradient = torch.randn(5, 3, 48) * 1e-4
    rows, columns = fp8.quantize_rows(weight), fp8.quantize_columns(weight)
    expected = (fp8.quantize_rows(inputs.flatten(0, 1)).restored() @ rows.restored().t() + bias).view(5, 3, 48)
    torch.testing.assert_close(fp8.linear(inputs, rows, bias), expected, rtol=1e-5, atol=1e-5)
    expected = (fp8.quantize_rows(gradient.flatten(0, 1)).restored() @ columns.restored().t()).view(5, 3, 32)
    torch.testing.assert_close(fp8.input_gradient(gradient, columns), expected, rtol=1e-5, atol=1e-9)
    # Rounding errors of a sum of products with three bits of mantissa each.
    plain = torch.nn.functional.linear(inputs, weight, bias)
    assert float((fp8.linear(inputs, rows, bias) - plain).norm() / plain.norm()) < 0.05


def test_a_weight_is_rounded_once_in_a_step_and_at_each_use_outside() -> None:
    import torch

    from megatronapp_trainer.models.kernels import fp8
    from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights

    parameter = torch.nn.Parameter(torch.randn(6, 4))
    weights = Fp8Weights(range(1, 3))
    weight = weights.add(0, parameter)

    def doubled() -> fp8.Quantized:
        parameter.detach().mul_(2)
        return fp8.quantize_rows(parameter.detach())

    assert torch.equal(weight.rows().scales, fp8.quantize_rows(parameter.detach()).scales)
    assert torch.equal(weight.rows().scales, doubled().scales / 2)
    with weights.constant():
        rows, columns = weight.rows(), weight.columns()
        before = rows.scales.clone()
        after = doubled()
        assert weight.rows() is rows and torch.equal(rows.scales, before)
        weights.prepare(0)  # finds nothing to do
        assert torch.equal(rows.scales, before)
    with weights.constant():
        weights.prepare(0)
        assert torch.equal(rows.scales, after.scales)  # in the same memory
        assert torch.equal(columns.restored().t(), fp8.quantize_columns(parameter.detach()).restored().t())
        assert weight.rows() is rows and weight.columns() is columns


def test_a_recording_rounds_all_forms_of_a_step() -> None:
    import torch

    from megatronapp_trainer.models.kernels import fp8
    from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights, Recorder

    parameters = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    weights = Fp8Weights(range(1, 3))
    first, second, unused = (weights.add(0, parameter) for parameter in parameters)
    runs: list[str] = []

    def recorder(name: str) -> Recorder:
        def record(compute: Callable[[], object]) -> Callable[[], object]:
            def replay() -> object:
                runs.append(name)
                return compute()

            return replay

        return record

    def step(*, prepares: bool = True) -> None:
        """Compare the forms after a step, in the memory of the first."""
        for parameter in parameters:
            parameter.detach().mul_(3)
        with weights.constant():
            if prepares:
                weights.prepare(0)
                assert first.is_rounded is (first.forms > 0)
            assert torch.equal(first.rows().scales, fp8.quantize_rows(parameters[0].detach()).scales)
            columns = fp8.quantize_columns(parameters[1].detach())
            assert torch.equal(second.columns().scales, columns.scales)
            assert torch.equal(second.columns().restored(), columns.restored())
            weights.prepare(0)

    weights.record(0, recorder("empty"))  # no pass has read a weight
    step()
    weights.record(0, recorder("two"))
    step()
    step()
    assert runs == ["two", "two"]
    step(prepares=False)  # as where the first microbatch is not replayed: nothing is left to round
    assert runs == ["two", "two"]
    with weights.constant():
        memory = unused.rows()
    step()  # not what the recording rounds
    assert runs == ["two", "two"]
    assert torch.equal(memory.scales, fp8.quantize_rows(parameters[2].detach()).scales)
    weights.record(0, recorder("three"))
    step()
    weights.record(0, recorder("again"))
    step()
    assert runs == ["two", "two", "three", "three"]
    assert torch.equal(memory.scales, fp8.quantize_rows(parameters[2].detach()).scales)


def trained_without_memory(flags: str) -> tuple[list[float], list[float]] | None:
    """Train with weights that are rounded at each use."""
    from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights

    Fp8Weights.constant = lambda _weights: contextlib.nullcontext()  # type: ignore[method-assign, assignment, return-value]
    return trained(flags)


@pytest.mark.parametrize("flags", ["", "--use-dpp --pipeline-model-parallel-size 2"], ids=["one", "MegaDPP"])
def test_weights_rounded_once_change_no_bit(run_ranks: RunRanks, flags: str) -> None:
    world = 2 if flags else 1
    flags = f"{FP8} {flags} --eval-interval 2 --eval-iters 1"
    (found,), (expected,) = (
        [result for result in run_ranks(world, train, flags) if result] for train in (trained, trained_without_memory)
    )
    assert found == expected


def trained(flags: str) -> tuple[list[float], list[float]] | None:
    recorder = small_training.train(small_training.prepare(f"{MODEL} {flags}"))
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


def figures_of(run_ranks: RunRanks, world: int, flags: str) -> tuple[list[float], list[float]]:
    (found,) = [result for result in run_ranks(world, trained, flags) if result is not None]
    return found[0], found[1]


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process in fp8."""
    return figures_of(run_ranks, 1, FP8)


def test_a_training_in_fp8_follows_that_in_bf16(run_ranks: RunRanks, alone: tuple[list[float], list[float]]) -> None:
    plain = figures_of(run_ranks, 1, "")
    ends = figures_of(run_ranks, 1, f"{FP8} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2")
    assert alone[0] != plain[0] and ends[0] not in (alone[0], plain[0])
    assert alone[0] == pytest.approx(plain[0], rel=0.01)
    assert alone[1] == pytest.approx(plain[1], rel=0.1)
    assert alone[0][-1] < alone[0][0] - 0.02


@pytest.mark.full("a sweep of layouts", but=("PP2-MegaDPP",))
@pytest.mark.parametrize(
    ("world", "layout", "tolerance"),
    [
        pytest.param(2, "--pipeline-model-parallel-size 2", 1e-3, id="PP2"),
        pytest.param(2, "--pipeline-model-parallel-size 2 --use-dpp", 1e-3, id="PP2-MegaDPP"),
        pytest.param(2, "--use-distributed-optimizer", 1e-2, id="DP2"),
        # Rows of the layers that add their outputs up over ranks are divided, and have a scale for each part.
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", 1e-2, id="TP2"),
    ],
)
def test_layouts_in_fp8_have_the_losses_of_a_single_process(
    run_ranks: RunRanks, alone: tuple[list[float], list[float]], world: int, layout: str, tolerance: float
) -> None:
    losses, norms = figures_of(run_ranks, world, f"{FP8} {layout}")
    assert losses == pytest.approx(alone[0], rel=tolerance)
    assert norms == pytest.approx(alone[1], rel=10 * tolerance)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{FP8} --fp16", "--fp8-format needs --bf16"),
        (f"{FP8} --bf16 --transformer-impl local", "not for --transformer-impl local"),
        (f"{FP8} --bf16 --forward-backward-disaggregating", "cannot be combined with --forward-backward"),
        (f"{FP8} --bf16 --ffn-hidden-size 40", "the MLP on a rank (--ffn-hidden-size) has 40"),
        (f"{FP8} --bf16 --tensor-model-parallel-size 2 --ffn-hidden-size 48", "--ffn-hidden-size) has 24"),
        (
            f"{FP8} --bf16 --tensor-model-parallel-size 4 --num-attention-heads 8 --kv-channels 8 "
            "--group-query-attention --num-query-groups 2",
            "queries, keys and values of a rank has 24",  # 96 in all: heads of keys are fewer than ranks
        ),
        (
            f"{FP8} --bf16 --num-experts 4 --moe-shared-expert-intermediate-size 40",
            "the shared expert on a rank (--moe-shared-expert-intermediate-size) has 40",
        ),
        (f"{FP8} --bf16 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3", "leaves 4 of 4 layers in bf16"),
        ("--first-last-layers-bf16", "--first-last-layers-bf16 needs --fp8-format"),
        (f"{FP8} --bf16 --num-layers-at-start-in-bf16 2", "needs --first-last-layers-bf16"),
        ("--bf16 --fp8-format hybrid", "e4m3"),
        (f"{FP8} --bf16 --fp8-recipe delayed", "rowwise"),
    ],
)
def test_fp8_refuses_what_it_cannot_do(flags: str, message: str) -> None:
    without = MODEL.replace(" --bf16", "")
    with pytest.raises(UsageErrors) as raised:
        parse(f"{without} {flags}".split())
    assert message in str(raised.value)
