"""Codes of numbers: their bytes in frames, the worst error of each, and the vectors that page and ranks must
reproduce."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatronapp_common.errors import TensorCodeError
from megatronapp_common.scope.codes import DTYPES, TensorCode, decode, encode

VECTORS = pathlib.Path(__file__).resolve().parents[3] / "fixtures" / "scope" / "codes.json"
INDEX: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))
WORST_U8S, WORST_U8 = 0.00392, 0.00197
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6), elements=finite)
probabilities = hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(0, 1, width=32))


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["code"])
def test_a_vector_is_written_and_read(entry: dict[str, Any]) -> None:
    code = TensorCode(entry["code"])
    values = np.frombuffer(bytes.fromhex(entry["values"]), "<f4").reshape(entry["shape"])
    found = encode(code, values)
    assert found.data.tobytes().hex() == entry["data"]
    assert (None if found.scales is None else found.scales.tobytes().hex()) == entry["scales"]
    decoded = np.frombuffer(bytes.fromhex(entry["decoded"]), "<f4").reshape(entry["shape"])
    np.testing.assert_array_equal(decode(code, found.data, found.scales), decoded)


def test_there_is_a_vector_for_every_code() -> None:
    assert {entry["code"] for entry in INDEX} == set(TensorCode)


@given(rows)
def test_i8_is_off_by_half_a_step_at_most(values: np.ndarray) -> None:
    found = encode(TensorCode.I8, values)
    assert found.scales is not None
    decoded = decode(TensorCode.I8, found.data, found.scales)
    assert np.isfinite(decoded).all()
    errors = np.abs(decoded.astype(np.float64) - values)
    assert (errors <= 0.50001 * found.scales[..., None].astype(np.float64)).all()
    again = encode(TensorCode.I8, decoded)
    np.testing.assert_array_equal(again.data, found.data)


@given(probabilities)
def test_probabilities_are_off_by_little(values: np.ndarray) -> None:
    for code, worst in ((TensorCode.U8S, WORST_U8S), (TensorCode.U8, WORST_U8)):
        data = encode(code, values).data
        decoded = decode(code, data)
        assert (np.abs(decoded.astype(np.float64) - values) <= worst).all()
        np.testing.assert_array_equal(encode(code, decoded).data, data)


def test_the_worst_errors_are_reached() -> None:
    values = np.linspace(0, 1, 100_001, dtype=np.float32)
    for code, worst in ((TensorCode.U8S, WORST_U8S), (TensorCode.U8, WORST_U8)):
        error = np.abs(decode(code, encode(code, values).data) - values).max()
        assert 0.99 * worst < error <= worst


def test_small_probabilities_do_not_fall_to_zero() -> None:
    values = np.array([4e-6, 1e-5, 1e-3], np.float32)
    assert (encode(TensorCode.U8S, values).data > 0).all()
    assert (encode(TensorCode.U8, values).data == 0).all()


@given(rows)
def test_f16_is_half_precision(values: np.ndarray) -> None:
    found = encode(TensorCode.F16, values).data
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float16))
    small = np.abs(values) < 65504
    errors = np.abs(decode(TensorCode.F16, found)[small].astype(np.float64) - values[small])
    assert (errors <= np.maximum(2.0**-11 * np.abs(values[small].astype(np.float64)), 2.0**-25)).all()


@given(rows)
def test_f32_is_exact(values: np.ndarray) -> None:
    np.testing.assert_array_equal(decode(TensorCode.F32, encode(TensorCode.F32, values).data), values)


def test_what_is_no_number_has_a_code() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 2.0, -1.0], np.float32)
    signed = encode(TensorCode.I8, odd)
    assert signed.data.tolist() == [-128, 127, -127, 126, -63]
    np.testing.assert_allclose(decode(TensorCode.I8, signed.data, signed.scales), odd, rtol=1e-6)
    for code in (TensorCode.U8S, TensorCode.U8):
        assert encode(code, odd).data.tolist() == [0, 255, 0, 255, 0]
    for code in (TensorCode.F16, TensorCode.F32):
        np.testing.assert_array_equal(decode(code, encode(code, odd).data), odd)


@pytest.mark.parametrize("code", TensorCode)
def test_arrays_of_another_code_are_refused(code: TensorCode) -> None:
    wrong = np.zeros((2, 3), np.float64)
    with pytest.raises(TensorCodeError, match=f"float64 is not what code {code} holds, which is {DTYPES[code]}"):
        decode(code, wrong)


@pytest.mark.parametrize("scales", [None, np.zeros(3, np.float32), np.zeros((2, 1), np.float32)])
def test_scales_must_fit(scales: np.ndarray | None) -> None:
    with pytest.raises(TensorCodeError, match=r"needs scales of shape \(2,\), not"):
        decode(TensorCode.I8, np.zeros((2, 3), np.int8), scales)
