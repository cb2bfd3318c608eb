"""Ranges of flat elements as rectangles of a tensor."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megatronapp_trainer.checkpoint.saving.rectangles import Rectangle, rectangles_of

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_rectangles_are_the_range_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    end = data.draw(st.integers(start, math.prod(shape)))
    elements = np.arange(math.prod(shape)).reshape(shape)
    whole = Rectangle(offsets=(0,) * len(shape), sizes=shape)
    found = list(rectangles_of(shape, start, end))
    parts = [elements[box.within(whole)].reshape(-1).tolist() for _, box in found]
    assert [number for part in parts for number in part] == list(range(start, end))
    assert [first for first, _ in found] == [part[0] for part in parts]
    assert [box.elements for _, box in found] == [len(part) for part in parts]
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(shape=SHAPES, data=st.data())
def test_the_overlap_of_boxes_has_their_common_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    whole = Rectangle(offsets=(0,) * len(shape), sizes=shape)

    def box() -> Rectangle:
        bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        return Rectangle(offsets=tuple(start for start, _ in bounds), sizes=tuple(end - start for start, end in bounds))

    first, second = box(), box()
    common = first.overlap(second)
    expected = set(elements[first.within(whole)].flat) & set(elements[second.within(whole)].flat)
    assert (set() if common is None else set(elements[common.within(whole)].flat)) == expected
    if common is not None:
        assert np.array_equal(elements[first.within(whole)][common.within(first)], elements[common.within(whole)])


def test_a_range_beyond_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="elements 3 to 7 are not within"):
        list(rectangles_of((2, 3), 3, 7))


def marks_of_copies() -> list[int]:
    """Return the replica numbers of tensors, of which two are copies, after their marks have been corrected."""
    from megatronapp_trainer.checkpoint.saving.rank_content import _leave_out_copies

    marked = [("a", 0, 0), ("a", 8, 0), ("a", 0, 0), ("b", 0, 1), ("b", 0, 0), ("a", 8, 1)]
    entries = [SimpleNamespace(key=key, global_offset=(offset, 0), replica_id=number) for key, offset, number in marked]
    _leave_out_copies({"chunks": entries})
    return [entry.replica_id for entry in entries]


@pytest.mark.torch
def test_equal_copies_of_a_tensor_are_written_once(run_ranks: Callable[..., list[list[int]]]) -> None:
    """In a vee, a rank has both copies of a tied embedding, and megatron-core's division marks both."""
    assert run_ranks(1, marks_of_copies) == [[0, 0, 1, 1, 0, 1]]
