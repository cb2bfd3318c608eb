"""Statistics of layers in training steps: those of the values themselves, in every layout, and no bit is changed."""

import math
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured_training import CAPTURED, FLAGS, train
from evaluated_training import MODEL
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.frames import FrameType, decode, encode
from megatronapp_common.scope.layer_statistics import (
    COMPUTED,
    RECORD,
    Records,
    SiteLayer,
    first_not_finite,
    merge,
    of_values,
    read_statistics,
    statistics_frame,
)

RunRanks = Callable[..., list[Any]]
Found = dict[SiteLayer, Records]
LAYOUTS = {
    "DP2": (2, "--use-distributed-optimizer"),
    "recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "SP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "dynamic": (2, "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pair": (2, "--forward-backward-disaggregating"),
}


def values_of_plain_hooks(flags: str) -> dict[tuple[str, int], list[Any]]:
    """Values of all sites, and the gradients of all weights, of the captured step of one rank, by torch alone."""
    import small_training
    import torch

    run = small_training.prepare(f"{MODEL} {FLAGS} {flags}")
    trainer = small_training.trainer_of(run)
    trainer.step()
    model = run.state.chunks[0].module
    values: dict[tuple[str, int], list[Any]] = {}

    def hook(name: str, layer: int, module: Any) -> None:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            value, bias = output if isinstance(output, tuple) else (output, None)
            value = value if bias is None else value + bias
            values.setdefault((name, layer), []).append(value.detach().double().numpy().copy())

        module.register_forward_hook(keep)

    hook("embedding", -1, model.embedding)
    hook("final_norm", -1, model.decoder.final_layernorm)
    for number, layer in enumerate(model.decoder.layers):
        hook("attention_output", number, layer.self_attention.linear_proj)
        hook("mlp1", number, layer.mlp.linear_fc1)
        hook("mlp2", number, layer.mlp.linear_fc2)
        hook("residual", number, layer)
    step = run.state.optimizer.step

    def stepping() -> Any:
        for name, parameter in model.named_parameters():
            layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else -1
            values.setdefault(("gradient", layer), []).append(parameter.main_grad.double().numpy().copy())
            values.setdefault(("weight", layer), []).append(parameter.detach().double().numpy().copy())
        before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
        done = step()
        for name, parameter in model.named_parameters():
            layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else -1
            change = (parameter.detach().double() - before[name]).numpy()
            values.setdefault(("update", layer), []).append(change)
        return done

    run.state.optimizer.step = stepping
    assert trainer.step().loss.mean > 0
    assert torch.is_grad_enabled()
    return values


@pytest.fixture(scope="module")
def plain(run_ranks: RunRanks) -> dict[SiteLayer, Records]:
    (values,) = run_ranks(1, values_of_plain_hooks, "")
    return {
        SiteLayer(*key): of_values(np.concatenate([part.reshape(-1) for part in parts]))
        for key, parts in values.items()
    }


def merged(ranks: list[dict[str, Any]]) -> Found:
    found: Found = {}
    for rank, result in enumerate(ranks):
        frames = [decode(data) for data in result["frames"]]
        assert [(frame.header["rank"], frame.header["step"]) for frame in frames] == [(rank, CAPTURED)]
        assert frames[0].header["ranks"] == len(ranks)
        rows, records = read_statistics(frames[0])
        for row, record in zip(rows, records, strict=True):
            merge(found.setdefault(row, np.zeros(1, RECORD)), record.reshape(1))
    return found


@pytest.mark.torch
@pytest.mark.full("all layouts", but=("SP2xPP2", "pair"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_are_those_of_all_values_and_training_is_bit_equal(
    run_ranks: RunRanks, plain: Found, layout: str
) -> None:
    size, flags = LAYOUTS[layout]
    ranks = run_ranks(size, train, flags, True)
    found = merged(ranks)
    assert found.keys() == plain.keys()
    assert {row.site for row in found} == {*COMPUTED, "gradient", "weight", "update"}
    for row, expected in plain.items():
        assert found[row]["count"] == expected["count"], row
        for name in ("squares", "largest"):
            np.testing.assert_allclose(found[row][name], expected[name], rtol=2e-4, err_msg=str((row, name)))
        bins = np.abs(found[row]["histogram"] - expected["histogram"]).sum()
        assert bins <= 0.01 * expected["count"][0], row
    off = run_ranks(size, train, flags, False)
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in off]
    assert [rank["norms"] for rank in ranks] == [rank["norms"] for rank in off]
    if layout in {"dynamic", "pair"}:
        assert sum(rank["measured"] for rank in ranks) < sum(rank["measured"] for rank in off)


@pytest.mark.torch
def test_gradients_in_fp16_are_those_without_the_loss_scale(run_ranks: RunRanks) -> None:
    ranks = run_ranks(1, train, "--fp16 --loss-scale 4096", True)
    squares = sum(records["squares"][0] for row, records in merged(ranks).items() if row.site == "gradient")
    assert math.sqrt(squares) == pytest.approx(ranks[0]["norms"][CAPTURED - 1], rel=1e-3)


NUMBERS = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 2.0**-24, 1.0, -3.0])
)


@pytest.mark.torch
@given(parts=st.lists(st.lists(NUMBERS, max_size=20), min_size=1, max_size=4))
def test_accumulated_and_merged_parts_are_those_of_all_values(parts: list[list[float]]) -> None:
    import torch

    from megatronapp_trainer.scope.statistics import accumulator

    row = SiteLayer("residual", 3)
    on_device = accumulator.StatisticsAccumulator([SiteLayer("other", 0), row], torch.device("cpu"))
    with unittest.mock.patch.object(accumulator, "SLICE", 7):
        for part in parts:
            on_device.add(row, torch.tensor(part, dtype=torch.float32).reshape(-1, 1))
    frame = decode(
        encode(
            statistics_frame(
                FrameType.TRAINING_STATISTICS, {"rank": 0}, on_device.rows, on_device.packed().numpy().tobytes()
            )
        )
    )
    (_, _), records = read_statistics(frame)
    host = np.zeros(1, RECORD)
    for part in parts:
        merge(host, of_values(np.array(part, np.float32)))
    expected = of_values(np.array([number for part in parts for number in part], np.float32))
    for found in (records[1:], host):
        for name in ("count", "nan", "inf", "zero", "histogram", "largest"):
            assert np.array_equal(found[name], expected[name]), name
        np.testing.assert_allclose(found["squares"], expected["squares"], rtol=1e-12)
        np.testing.assert_allclose(found["sum"], expected["sum"], rtol=1e-9, atol=1e-12 * expected["largest"][0])
    assert not records[0]["count"]


def test_the_first_site_that_is_not_finite_is_that_which_is_computed_first() -> None:
    broken, whole = of_values(np.array([1.0, np.nan]))[0], of_values(np.array([1.0]))[0]
    order = [
        SiteLayer("weight", 9),
        SiteLayer("embedding", -1),
        SiteLayer("attention_output", 0),
        SiteLayer("residual", 0),
        SiteLayer("attention_output", 1),
        SiteLayer("final_norm", -1),
        SiteLayer("gradient", 5),
        SiteLayer("gradient", 1),
    ]
    for place in range(len(order)):
        rows = order[::-1]
        records = [whole if order.index(row) < place else broken for row in rows]
        assert first_not_finite(rows, np.array(records)) == order[place]
    assert first_not_finite(order, np.array([whole] * len(order))) is None
