"""Our rank arithmetic against megatron-core's own generator."""

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples

from megatronapp_common.topology import Group, Topology

pytestmark = pytest.mark.torch
ORDER = "tp-cp-ep-dp-pp"
DENSE = (
    Group.TENSOR,
    Group.CONTEXT,
    Group.DATA,
    Group.PIPELINE,
    Group.DATA_CONTEXT,
    Group.MODEL,
    Group.TENSOR_CONTEXT,
    Group.TENSOR_DATA,
    Group.TENSOR_DATA_CONTEXT,
)
EXPERT = {
    Group.EXPERT: "ep",
    Group.EXPERT_DATA: "dp",
    Group.EXPERT_TENSOR: "tp-ep",
    Group.EXPERT_TENSOR_PIPELINE: "tp-ep-pp",
}
sizes = st.integers(1, 5)


@pytest.fixture(scope="module")
def parallel_state() -> Any:
    """The module under comparison; importing it costs seconds, starts nothing."""
    with warnings.catch_warnings():  # that Transformer Engine and Apex are missing
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    return parallel_state


def as_tuples(groups: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in groups)


@settings(max_examples=examples(100))
@given(tensor=sizes, context=sizes, data=sizes, pipeline=sizes)
def test_dense_groups(parallel_state: Any, tensor: int, context: int, data: int, pipeline: int) -> None:
    generator = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=ORDER)
    topology = Topology(tensor=tensor, context=context, data=data, pipeline=pipeline)
    assert topology.world_size == generator.world_size
    for kind in DENSE:
        assert topology.groups(kind) == as_tuples(generator.get_ranks(kind.value))
    stages = generator.get_ranks("pp")
    assert topology.groups(Group.EMBEDDING) == as_tuples(list(map(parallel_state.default_embedding_ranks, stages)))
    assert topology.groups(Group.POSITION_EMBEDDING) == as_tuples(
        list(map(parallel_state.default_position_embedding_ranks, stages))
    )


@settings(max_examples=examples(300))
@given(tensor=sizes, context=st.integers(1, 3), expert=sizes, copies=st.integers(1, 3), pipeline=st.integers(1, 3))
def test_expert_groups(
    *, parallel_state: Any, tensor: int, context: int, expert: int, copies: int, pipeline: int
) -> None:
    replicas = expert * copies * context  # context x data, so that experts and context divide it
    topology = Topology(tensor=tensor, context=context, expert=expert, data=replicas // context, pipeline=pipeline)
    generator = parallel_state.RankGenerator(
        tp=tensor, ep=expert, dp=topology.expert_data, pp=pipeline, cp=1, order=ORDER
    )
    assert topology.world_size == generator.world_size
    for kind, token in EXPERT.items():
        assert topology.groups(kind) == as_tuples(generator.get_ranks(token))


@settings(max_examples=examples(100))
@given(tensor=sizes, context=sizes, data=sizes, pipeline=sizes)
def test_coordinates_are_places_within_megatrons_groups(
    parallel_state: Any, tensor: int, context: int, data: int, pipeline: int
) -> None:
    generator = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=ORDER)
    topology = Topology(tensor=tensor, context=context, data=data, pipeline=pipeline)
    for token in ("tp", "cp", "dp", "pp"):
        for group in generator.get_ranks(token):
            assert [getattr(topology.coordinates(rank), token) for rank in group] == list(range(len(group)))
