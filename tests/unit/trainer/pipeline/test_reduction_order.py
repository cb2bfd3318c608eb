"""Gradient reductions begin in one order, in whichever order gradients become ready."""

import functools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.pipeline.reduction_order import order_reductions

ROUNDS = st.lists(st.permutations(range(5)), min_size=1, max_size=3)


def grouped(begun: list[int], *, first: bool = False, overlap: bool = True) -> list[Any]:
    """Five groups of buckets of two chunks, ordered; each appends its place to `begun` when its reduction begins."""
    config = SimpleNamespace(overlap_grad_reduce=overlap)
    groups = [
        SimpleNamespace(is_first_batch=first, ddp_config=config, start_grad_sync=functools.partial(begun.append, place))
        for place in range(5)
    ]
    chunks: list[Any] = [
        SimpleNamespace(bucket_groups=groups[3:], expert_parallel_bucket_groups=[]),
        SimpleNamespace(bucket_groups=groups[:2], expert_parallel_bucket_groups=groups[2:3]),
    ]
    order_reductions(chunks)
    order_reductions(chunks)
    return groups


@given(ROUNDS)
def test_reductions_of_each_step_begin_from_the_last_chunk_to_the_first(rounds: list[list[int]]) -> None:
    begun: list[int] = []
    groups = grouped(begun)
    for ready in rounds:
        for place in ready:
            groups[place].start_grad_sync()
    assert begun == list(range(5)) * len(rounds)


@given(st.permutations(range(5)))
def test_a_reduction_begins_as_soon_as_all_before_it_have(ready: list[int]) -> None:
    begun: list[int] = []
    groups = grouped(begun)
    for count in range(1, 6):
        groups[ready[count - 1]].start_grad_sync()
        done = set(ready[:count])
        assert len(begun) == next(place for place in range(6) if place not in done)


@given(st.permutations(range(5)), st.booleans())
def test_reductions_that_megatron_core_begins_at_the_end_of_the_step_stay_as_they_are(
    ready: list[int], first: bool
) -> None:
    begun: list[int] = []
    groups = grouped(begun, first=first, overlap=first)
    for place in ready:
        groups[place].start_grad_sync()
    assert begun == ready
