"""Pixels that are the same in every layout, and reducers whose shards merge to the same numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from scope_filters import exact_data, filters, unsharded, well_conditioned

from megatronapp_common.errors import FilterError, ReductionPlanError
from megatronapp_common.filters.pixels import fitting_pixels, merges, pixel_edges
from megatronapp_common.filters.reducers import NAMED, Reducer, parse_reducer
from megatronapp_common.filters.shard_plan import ReductionPlan, compile_reduction_plan, run

SHARDS = [1, 2, 4]
WIDTH = 24
TOLERANCE = 1e-5
"""Relative tolerance of sharded against unsharded results, where rounding changes little."""


def sharded(plan: ReductionPlan, data: np.ndarray) -> np.ndarray:
    shards = np.split(data, plan.shards, axis=-1)
    return plan.combine([run(plan.program(index), shard) for index, shard in enumerate(shards)])


def compiled(reducer: Reducer, pixels: int, shards: int) -> ReductionPlan | None:
    """The plan, or None where this filter or these pixels are refused."""
    try:
        return compile_reduction_plan(reducer, width=WIDTH, pixels=pixels, shards=shards)
    except (FilterError, ReductionPlanError):
        return None


@given(st.integers(1, 300), st.data())
def test_edges_are_near_equal_and_never_inside_a_shard(width: int, draw: st.DataObject) -> None:
    pixels = draw.draw(st.integers(1, width))
    edges = pixel_edges(width, pixels)
    sizes = {stop - start for start, stop in itertools.pairwise(edges)}
    assert (edges[0], edges[-1], len(edges)) == (0, width, pixels + 1)
    assert sizes <= {width // pixels, -(-width // pixels)}
    shards = draw.draw(st.sampled_from([count for count in range(1, width + 1) if width % count == 0]))
    size = width // shards
    try:
        merged = merges(width, pixels, shards)
    except ReductionPlanError as refused:
        better = fitting_pixels(width, pixels, shards)
        assert f"write {better} pixels" in str(refused)
        for fewer in range(1, shards + 1):
            if shards % fewer == 0:
                merges(width, better, fewer)
        return
    for start, stop in itertools.pairwise(edges):
        assert (start % size == 0 and stop % size == 0) if merged else start // size == (stop - 1) // size


@pytest.mark.parametrize(
    ("width", "pixels", "shards", "fitting"),
    [
        (64, 96, 4, 64),
        (66, 64, 4, None),
        (4096, 100, 8, 104),
        (4096, 99, 8, 96),
        (24, 3, 8, 4),
        (24, 6, 4, 8),
        (8, 3, 1, 3),
    ],
)
def test_the_nearest_number_that_fits(width: int, pixels: int, shards: int, fitting: int | None) -> None:
    if fitting is None:
        with pytest.raises(ReductionPlanError, match="no 4 equal shards; use a divisor of 66"):
            fitting_pixels(width, pixels, shards)
    else:
        assert fitting_pixels(width, pixels, shards) == fitting


@pytest.mark.parametrize(("pixels", "sentence"), [(0, "write 1 to 24"), (25, "write 1 to 24"), (10, "write 12 pixels")])
def test_impossible_divisions_into_pixels_are_refused(pixels: int, sentence: str) -> None:
    with pytest.raises(ReductionPlanError, match=sentence):
        compile_reduction_plan(NAMED["mean"], width=WIDTH, pixels=pixels, shards=4)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("pixels", [1, 2, 4, 12])
def test_reducers_are_equal_to_numpy(pixels: int, shards: int) -> None:
    data = np.random.default_rng(3).normal(size=(3, 2, WIDTH)).astype(np.float32)
    pixel_values = data.reshape(3, 2, pixels, -1).astype(np.float64)
    expected = {
        "mean": pixel_values.mean(-1),
        "absmax": np.abs(pixel_values).max(-1),
        "rms": np.sqrt(np.square(pixel_values).mean(-1)),
        "std": pixel_values.std(-1),
        "min": pixel_values.min(-1),
        "max": pixel_values.max(-1),
    }
    assert expected.keys() == NAMED.keys()
    for name, reference in expected.items():
        plan = compile_reduction_plan(parse_reducer(name), width=WIDTH, pixels=pixels, shards=shards)
        found = sharded(plan, data)
        assert (found.dtype.name, found.shape, plan.values) == ("float32", (3, 2, pixels, 1), 1)
        np.testing.assert_allclose(found[..., 0], reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("pixels", [1, 2, 4])
def test_a_histogram_counts_as_numpy_does_and_leaves_out_the_rest(pixels: int, shards: int) -> None:
    data = exact_data(1, 2, WIDTH)
    data[0, :3] = np.nan, np.inf, -np.inf
    plan = compile_reduction_plan(parse_reducer("histogram(8, -2, 2)"), width=WIDTH, pixels=pixels, shards=shards)
    found = sharded(plan, data)
    assert found.shape == (2, pixels, 8)
    rows = data.reshape(2, pixels, -1)
    expected = [[np.histogram(row[np.isfinite(row)], 8, (-2, 2))[0] for row in rows_of] for rows_of in rows]
    np.testing.assert_array_equal(found, expected)


def test_a_spread_merges_without_losing_digits() -> None:
    data = (1e4 + np.random.default_rng(1).normal(size=(1, 4096))).astype(np.float32)
    plan = compile_reduction_plan(parse_reducer("std"), width=4096, pixels=1, shards=8)
    np.testing.assert_allclose(sharded(plan, data)[0, 0, 0], data.astype(np.float64).std(), rtol=1e-4)


@pytest.mark.parametrize("name", ["mean", "std", "rms"])
def test_merged_pixels_may_have_two_widths(name: str) -> None:
    data = np.arange(8, dtype=np.float32) ** 2
    plan = compile_reduction_plan(parse_reducer(name), width=8, pixels=3, shards=8)
    assert (plan.merged, plan.edges) == (True, (0, 2, 5, 8))
    np.testing.assert_allclose(sharded(plan, data), unsharded(NAMED[name], data, 3), rtol=1e-6)


def test_pixels_of_two_widths_are_in_order() -> None:
    data = np.arange(10, dtype=np.float32)
    plan = compile_reduction_plan(parse_reducer("data[0]"), width=10, pixels=4)
    assert plan.edges == (0, 2, 5, 7, 10)
    assert sharded(plan, data)[:, 0].tolist() == [0, 2, 5, 7]
    assert [group.width for group in plan.program(0).groups] == [2, 3]


@settings(max_examples=examples(250))
@given(filters(), st.sampled_from([1, 2, 3, 4, 5, 8, 12, 24]), st.sampled_from(SHARDS), st.integers(0, 2**32 - 1))
def test_shards_merge_to_the_unsharded_answer(text: str, pixels: int, shards: int, seed: int) -> None:
    try:
        reducer = parse_reducer(text)
    except FilterError:
        return
    plan = compiled(reducer, pixels, shards)
    if plan is None:
        return
    data = exact_data(seed, 2, WIDTH)
    assume(well_conditioned(reducer, data, pixels))
    found, expected = sharded(plan, data), unsharded(reducer, data, pixels)
    assert found.shape == (2, pixels, plan.values)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-6)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data[:8].mean()", "column 6: a part of the vector cannot be taken where a pixel lies on several of"),
        ("data[0]", "column 6: an element cannot be taken"),
        (
            "(data - data.mean()).square().mean()",
            "column 14: mean cannot wait for the mean in it",
        ),
        ("where(data > data.max() / 2, 1, 0).sum()", "column 19: sum cannot wait for the max in it"),
        ("data.abs()[1].square()", "column 12: an element cannot be taken"),
    ],
)
def test_what_has_no_state_that_merges_is_refused(text: str, sentence: str, shards: int) -> None:
    reducer = parse_reducer(text)
    with pytest.raises(FilterError, match=sentence) as refused:
        compile_reduction_plan(reducer, width=WIDTH, pixels=1, shards=shards)
    assert f"ask for {shards} pixels" in refused.value.sentence
    compile_reduction_plan(reducer, width=WIDTH, pixels=1)
    compile_reduction_plan(reducer, width=WIDTH, pixels=shards, shards=shards)


@pytest.mark.parametrize(
    ("text", "pixels", "sentence"),
    [
        ("data[8:].mean()", 4, "column 6: nothing is left of a pixel of 6 numbers"),
        ("data[6]", 4, "column 6: there is no element 6: a pixel has 6 numbers"),
        ("data[-7]", 4, "there is no element -7"),
        ("(data[1:] * data).sum()", 4, "column 11: vectors of 5 and 6 elements"),
        ("where(data[:2] > 0, data, 0).sum()", 4, "column 1: vectors of 2 and 6 elements"),
        ("data[2]", 10, "a pixel has 2 numbers here"),
    ],
)
def test_parts_must_fit_the_pixels(text: str, pixels: int, sentence: str) -> None:
    with pytest.raises(FilterError, match=sentence):
        compile_reduction_plan(parse_reducer(text), width=WIDTH, pixels=pixels)


def test_equal_reductions_are_sent_once() -> None:
    reducer = parse_reducer("data.max() / data.mean() + data.max() - data.sum()")
    plan = compile_reduction_plan(reducer, width=WIDTH, pixels=2, shards=4)
    assert plan.merged
    assert [output.merge.value for output in plan.outputs] == ["max", "sum", "sum"]
    assert plan.program(3).columns == 3
    assert [list(plan.shard_pixels(shard)) for shard in range(4)] == [[0], [0], [1], [1]]


def test_parts_are_needed_of_every_shard() -> None:
    plan = compile_reduction_plan(parse_reducer("mean"), width=WIDTH, pixels=4, shards=4)
    with pytest.raises(ReductionPlanError, match="3 parts of 4 shards"):
        plan.merge([np.zeros((1, 1, 1))] * 3)
    with pytest.raises(ReductionPlanError, match="no shard 4"):
        plan.program(4)


def test_numbers_that_are_none_go_through() -> None:
    data = np.array([[np.nan, 1, 2, 3, np.inf, 1, 1, 1]], np.float32)
    for pixels, shards in [(2, 2), (2, 1), (2, 4)]:
        plan = compile_reduction_plan(parse_reducer("max"), width=8, pixels=pixels, shards=shards)
        np.testing.assert_array_equal(sharded(plan, data)[0, :, 0], [np.nan, np.inf])
