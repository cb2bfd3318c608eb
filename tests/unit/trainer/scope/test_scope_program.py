"""Plans on torch: as the reference says, as torch itself says, and the same for every number of shards."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from scope_filters import exact_data, filters, unsharded, well_conditioned

from megatronapp_common.errors import FilterError, ReductionPlanError
from megatronapp_common.filters.reducers import NAMES, Reducer, parse_reducer
from megatronapp_common.filters.shard_plan import ReductionPlan, compile_reduction_plan, run
from megatronapp_common.scope.codes import TensorCode, decode, encode
from megatronapp_trainer.errors import TrainerError
from megatronapp_trainer.scope.capture import device_program as programs
from megatronapp_trainer.scope.capture.device_program import DeviceProgram
from megatronapp_trainer.scope.transfer.quantise import DTYPES, encode_into

CPU = torch.device("cpu")
VECTORS = pathlib.Path(__file__).resolve().parents[3] / "fixtures" / "scope" / "codes.json"
WIDTH = 24
TOLERANCE = 1e-5
TYPED_BY_USERS = [
    "data.mean(dim=-1)",
    "data.abs().max(dim=-1).values",
    "data.max(dim=-1)[0]",
    "data[..., :4].mean(dim=-1)",
    "data[:, :, :, 1::2].sum(-1)",
    "data[..., -1]",
    "torch.sqrt(data.abs()).mean(dim=-1)",
    "torch.mean(torch.square(data), dim=-1) ** 0.5",
    "torch.where(data > 0, data, 0).sum(dim=-1)",
    "(data > 0).float().mean(dim=-1)",
    "(data > 0).sum(dim=-1)",
    "-data.amin(dim=-1) / 2 + 3 * data.amax(-1)",
    "data.pow(2).sum(dim=-1).sqrt()",
    "data.where(data != 1, -2).mean(-1)",
    "(data[..., 1:] - data[..., :-1]).abs().amax(dim=-1)",
    "2 ** -data.abs().mean(dim=-1)",
    "(1 - data.float()).square().mean(dim=-1)",
]


def reduced(plan: ReductionPlan, vectors: torch.Tensor) -> np.ndarray:
    """Final numbers by way of torch, each shard with its program."""
    parts = []
    for index, shard in enumerate(vectors.chunk(plan.shards, dim=-1)):
        program = DeviceProgram(plan.program(index), CPU)
        out = program.buffer(*shard.shape[:-1])
        program.run(shard, out)
        parts.append(out.numpy())
    return plan.combine(parts)


@pytest.mark.parametrize("text", TYPED_BY_USERS)
def test_typed_filters_are_equal_to_torch(text: str) -> None:
    """The seeds bound `data` [batch, tokens, pixels, numbers] and had Python evaluate the text."""
    data = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    expected = eval(text, {"torch": torch}, {"data": data})  # of the texts above
    plan = compile_reduction_plan(parse_reducer(text), width=24, pixels=4)
    found = reduced(plan, data.flatten(-2))
    np.testing.assert_allclose(found[..., 0], expected.float().numpy(), rtol=1e-6, atol=1e-6)


@settings(max_examples=examples(120))
@given(filters(), st.sampled_from([1, 2, 3, 4, 5, 8, 12, 24]), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1))
def test_merged_shards_are_the_unsharded_reference(text: str, pixels: int, shards: int, seed: int) -> None:
    try:
        reducer = parse_reducer(text)
        plan = compile_reduction_plan(reducer, width=WIDTH, pixels=pixels, shards=shards)
    except (FilterError, ReductionPlanError):
        return
    data = exact_data(seed, 2, WIDTH)
    assume(well_conditioned(reducer, data, pixels))
    found = reduced(plan, torch.from_numpy(data))
    whole = reduced(compile_reduction_plan(reducer, width=WIDTH, pixels=pixels), torch.from_numpy(data))
    np.testing.assert_allclose(found, whole, rtol=TOLERANCE, atol=1e-6)
    np.testing.assert_allclose(found, unsharded(reducer, data, pixels), rtol=TOLERANCE, atol=1e-6)


def all_reducers() -> list[Reducer]:
    return [parse_reducer(name if name != "histogram" else "histogram(6, -2, 2)") for name in NAMES]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("pixels", [1, 2, 5, 8])
@pytest.mark.parametrize("reducer", all_reducers(), ids=NAMES)
def test_a_program_is_the_reference(reducer: Reducer, pixels: int, shards: int) -> None:
    if pixels == 5 and shards > 1:
        return
    vectors = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(2))
    plan = compile_reduction_plan(reducer, width=WIDTH, pixels=pixels, shards=shards)
    for index, shard in enumerate(vectors.chunk(shards, dim=-1)):
        program = DeviceProgram(plan.program(index), CPU)
        out = program.buffer(3, 2)
        program.run(shard, out)
        np.testing.assert_allclose(out, run(plan.program(index), shard.numpy()), rtol=TOLERANCE, atol=1e-6)


def test_sixteen_bits_are_summed_with_thirty_two() -> None:
    vectors = torch.full((1, 4096), 1.0).to(torch.bfloat16)
    vectors[0, 0] = 4096
    plan = compile_reduction_plan(parse_reducer("data.sum()"), width=4096, pixels=1)
    assert reduced(plan, vectors).item() == 8191


def test_long_prompts_are_computed_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(7, 3, WIDTH)
    plan = compile_reduction_plan(parse_reducer("data.abs().max()"), width=WIDTH, pixels=5)
    whole = reduced(plan, vectors)
    monkeypatch.setattr(programs, "SLAB_NUMBERS", 4 * WIDTH)
    np.testing.assert_array_equal(reduced(plan, vectors), whole)


def test_a_strided_view_with_gradients_is_read_and_left_alone() -> None:
    fused = torch.randn(3, 2, 4, 3 * 8, requires_grad=True)
    query = fused[..., 8:16]  # of each head, as a fused projection gives it
    plan = compile_reduction_plan(parse_reducer("mean"), width=8, pixels=2)
    program = DeviceProgram(plan.program(0), CPU)
    out = program.buffer(3, 2, 4)
    program.run(query, out)
    assert not out.requires_grad
    np.testing.assert_allclose(out[..., 0], query.detach().reshape(3, 2, 4, 2, 4).mean(-1), rtol=1e-6)


@pytest.mark.parametrize(
    ("width", "shape", "message"),
    [(23, (2, 4, 1), "23 numbers was given to a plan of 24"), (24, (2, 5, 1), r"must be \(2, 4, 1\)")],
)
def test_what_does_not_fit_is_refused(width: int, shape: tuple[int, ...], message: str) -> None:
    program = DeviceProgram(compile_reduction_plan(parse_reducer("mean"), width=WIDTH, pixels=4).program(0), CPU)
    with pytest.raises(TrainerError, match=message):
        program.run(torch.zeros(2, width), torch.zeros(shape))


@pytest.mark.parametrize("entry", json.loads(VECTORS.read_text(encoding="utf-8")), ids=lambda entry: entry["code"])
def test_the_device_writes_the_golden_bytes(entry: dict[str, Any]) -> None:
    code = TensorCode(entry["code"])
    values = torch.from_numpy(np.frombuffer(bytes.fromhex(entry["values"]), "<f4").reshape(entry["shape"]).copy())
    data, scales = torch.empty(values.shape, dtype=DTYPES[code]), torch.empty(values.shape[:-1])
    encode_into(code, values, data, scales if code is TensorCode.I8 else None)
    if code in {TensorCode.F16, TensorCode.F32}:  # of a NaN, the bits may differ
        expected = np.frombuffer(bytes.fromhex(entry["data"]), data.numpy().dtype).reshape(entry["shape"])
        np.testing.assert_array_equal(data.numpy(), expected)
    else:
        assert data.numpy().tobytes().hex() == entry["data"]
    assert entry["scales"] in {None, scales.numpy().tobytes().hex()}


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_the_device_writes_what_the_reference_writes(numbers: list[float]) -> None:
    values = np.array([numbers, numbers[::-1]], np.float32)
    for code in TensorCode:
        expected = encode(code, values)
        data, scales = torch.empty(values.shape, dtype=DTYPES[code]), torch.empty(2)
        encode_into(code, torch.from_numpy(values), data, scales)
        found = decode(code, data.numpy(), scales.numpy())
        np.testing.assert_array_equal(found, decode(code, expected.data, expected.scales))


OF_TWO_WIDTHS = [
    (text, 3, 1) for text in [*TYPED_BY_USERS, "std", "histogram(4, -1, 1)", "where(data.mean() > 0, 1, 0)"]
]
MERGED = [(text, 1, 4) for text in ["mean", "std", "data.abs().max() / data.sum()", "histogram(4, -1, 1)"]]


@pytest.mark.parametrize(("text", "pixels", "shards"), [*OF_TWO_WIDTHS, *MERGED])
def test_no_value_is_read_from_the_device(text: str, pixels: int, shards: int) -> None:
    """Check with tensors of the meta device, which have no values: reading one fails."""
    meta = torch.device("meta")
    plan = compile_reduction_plan(parse_reducer(text), width=40, pixels=pixels, shards=shards)
    program = DeviceProgram(plan.program(0), meta)
    out = program.buffer(3, 2)
    program.run(torch.empty(3, 2, 40 // shards, dtype=torch.bfloat16, device=meta), out)
    for code in TensorCode:
        data = torch.empty(out.shape, dtype=DTYPES[code], device=meta)
        encode_into(code, out, data, torch.empty(out.shape[:-1], device=meta))
