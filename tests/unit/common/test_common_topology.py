"""Rank arithmetic by its own laws; against megatron-core in test_common_topology_megatron."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import TopologyError
from megatronapp_common.topology import FbdWorld, Group, Placement, RankRole, Topology, fbd_world, fbd_world_of

sizes = st.integers(1, 4)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    context, data = draw(sizes), draw(sizes)
    divisors = [size for size in range(1, context * data + 1) if context * data % size == 0]
    expert = draw(st.sampled_from(divisors))
    return Topology(tensor=draw(sizes), context=context, expert=expert, data=data, pipeline=draw(sizes))


def test_tensor_is_fastest_and_pipeline_slowest() -> None:
    topology = Topology(tensor=2, context=1, data=2, pipeline=2)
    places = [topology.coordinates(rank) for rank in range(8)]
    assert [(at.tp, at.dp, at.pp) for at in places] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (1, 1, 1),
    ]


def test_groups_of_a_known_layout() -> None:
    topology = Topology(tensor=2, data=2, pipeline=2)
    assert topology.groups(Group.TENSOR) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups(Group.DATA) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups(Group.PIPELINE) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups(Group.MODEL) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Topology(pipeline=3).groups(Group.EMBEDDING) == ((0, 2),)
    assert Topology(pipeline=3).groups(Group.POSITION_EMBEDDING) == ((0,),)
    assert Topology(data=2).groups(Group.EMBEDDING) == ((0,), (1,))


@given(topologies())
def test_coordinates_and_ranks_are_inverse(topology: Topology) -> None:
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert at.ep == (at.cp + topology.context * at.dp) % topology.expert


@given(topologies(), st.sampled_from(list(Group)))
def test_groups_part_the_world(topology: Topology, kind: Group) -> None:
    groups = topology.groups(kind)
    members = [rank for group in groups for rank in group]
    assert len(set(members)) == len(members)
    if kind not in {Group.EMBEDDING, Group.POSITION_EMBEDDING}:
        assert sorted(members) == list(range(topology.world_size))
        assert len({len(group) for group in groups}) == 1
    for group in groups:
        assert all(topology.group_of(kind, rank) == group for rank in group)


@given(topologies())
def test_a_middle_stage_is_in_no_embedding_group(topology: Topology) -> None:
    for rank in range(topology.world_size):
        outside = topology.coordinates(rank).pp not in {0, topology.pipeline - 1}
        assert (topology.group_of(Group.EMBEDDING, rank) == ()) == outside


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(tensor=0), "tensor: the size is 0; write 1 or more"),
        (lambda: Topology(expert=3, data=4), "expert: 3 does not divide context 1 x data 4 = 4"),
        (lambda: Topology.of_world(6, tensor=4), "6 ranks cannot be divided into replicas of 4"),
        (lambda: Topology.of_world(0), "0 ranks cannot be divided"),
        (lambda: Topology(data=2).coordinates(2), "rank 2 is outside of this world of 2; take 0 to 1"),
        (lambda: Topology(data=2).rank(tp=1), "tp 1 is outside of its 1 ranks"),
        (lambda: Topology(data=2).group_of(Group.TENSOR, -1), "rank -1 is outside"),
        (lambda: Placement(()), "every worker needs 1 or more"),
        (lambda: Placement((2, 0)), "every worker needs 1 or more"),
        (lambda: Placement((2, 2)).worker_of(4), "rank 4 is outside of this world of 4"),
        (lambda: Placement((2,)).ranks_of(1), "worker 1 does not exist; there are 1"),
        (lambda: fbd_world_of(6, tensor=2, pipeline=1), "6 ranks cannot be divided into replicas of 4"),
        (lambda: fbd_world_of(4, tensor=2, pipeline=1, merged=True), "replicas of 3 forward and backward"),
        (lambda: fbd_world_of(4, tensor=1, pipeline=1, backward_per_forward=2), "into 2 replicas of 3 forward and"),
        (
            lambda: fbd_world(tensor=1, pipeline=1, data=2, backward_per_forward=0),
            "backward_per_forward: the size is 0",
        ),
        (lambda: fbd_world(tensor=1, pipeline=1, data=3, backward_per_forward=2), "2 does not divide data 3"),
        (
            lambda: fbd_world(tensor=2, pipeline=1, data=2, merged=True, backward_per_forward=2),
            "backward_per_forward: 2 and merged forward ranks exclude each other",
        ),
        (lambda: fbd_world(tensor=2, pipeline=1, data=1).role_of(4), "rank 4 is outside of this world of 4"),
        (lambda: fbd_world(tensor=2, pipeline=1, data=1).rank_of(RankRole.FORWARD, 2), "forward rank 2 is outside"),
        (lambda: fbd_world(tensor=1, pipeline=1, data=1).rank_of(RankRole.ALL, 0), "none runs both"),
    ],
)
def test_layouts_that_do_not_exist_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message.replace("(", r"\(")):
        make()


def test_of_world_derives_the_replicas() -> None:
    assert Topology.of_world(24, tensor=2, pipeline=3) == Topology(tensor=2, pipeline=3, data=4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_placement_of_uneven_workers(counts: list[int]) -> None:
    placement = Placement(tuple(counts))
    seen = [placement.worker_of(rank) for rank in range(placement.world_size)]
    assert seen == [worker for worker, count in enumerate(counts) for _ in range(count)]
    for worker, count in enumerate(counts):
        assert [placement.worker_of(rank) for rank in placement.ranks_of(worker)] == [worker] * count


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "merged", "world", "forward"),
    [
        (1, 2, 2, False, 8, 4),
        (2, 2, 1, False, 8, 4),
        (2, 2, 1, True, 6, 2),
        (2, 1, 1, True, 3, 1),
        (4, 2, 3, True, 30, 6),
        (1, 2, 2, True, 8, 4),
    ],
)
def test_fbd_worlds(*, tensor: int, pipeline: int, data: int, merged: bool, world: int, forward: int) -> None:
    fbd = fbd_world(tensor=tensor, pipeline=pipeline, data=data, merged=merged)
    assert (fbd.world_size, fbd.forward_ranks) == (world, forward)
    assert fbd.backward_ranks == fbd.trained.world_size


@given(sizes, sizes, sizes)
def test_merging_needs_the_original_fraction_of_the_ranks(tensor: int, pipeline: int, data: int) -> None:
    doubled = fbd_world(tensor=tensor, pipeline=pipeline, data=data).world_size
    merged = fbd_world(tensor=tensor, pipeline=pipeline, data=data, merged=True).world_size
    assert merged * 2 * tensor == doubled * (tensor + 1)


@st.composite
def fbd_worlds(draw: st.DrawFn) -> FbdWorld:
    merged = draw(st.booleans())
    served = 1 if merged else draw(st.integers(1, 3))
    return FbdWorld(
        trained=Topology(
            tensor=draw(sizes), context=draw(st.integers(1, 2)), data=served * draw(sizes), pipeline=draw(sizes)
        ),
        merged=merged,
        backward_per_forward=served,
        apart=draw(st.booleans()),
    )


@given(fbd_worlds())
def test_both_spellings_of_fbd_agree(world: FbdWorld) -> None:
    spelling: dict[str, Any] = {
        "tensor": world.trained.tensor,
        "pipeline": world.trained.pipeline,
        "merged": world.merged,
        "backward_per_forward": world.backward_per_forward,
        "apart": world.apart,
    }
    by_data = fbd_world(data=world.trained.data, **spelling)
    assert fbd_world_of(by_data.world_size, **spelling) == by_data


@given(fbd_worlds())
def test_ranks_of_both_roles_number_the_world(world: FbdWorld) -> None:
    assert world.world_size == world.backward_ranks + world.forward_ranks
    assert world.forward.world_size == world.forward_ranks
    seen = []
    for role in (RankRole.BACKWARD, RankRole.FORWARD):
        for index in range(world.topology_of(role).world_size):
            rank = world.rank_of(role, index)
            assert (world.role_of(rank), world.role_rank(rank)) == (role, index)
            seen.append(rank)
    assert sorted(seen) == list(range(world.world_size))


@given(fbd_worlds())
def test_partners_are_the_same_from_both_sides(world: FbdWorld) -> None:
    for rank in range(world.world_size):
        is_forward = world.role_of(rank) is RankRole.FORWARD
        assert len(world.partners(rank)) == (world.served if is_forward else 1)
        for partner in world.partners(rank):
            assert world.role_of(partner) is not world.role_of(rank)
            assert rank in world.partners(partner)


@given(fbd_worlds())
def test_partners_hold_the_same_part_of_the_model(world: FbdWorld) -> None:
    for index in range(world.forward_ranks):
        rank = world.rank_of(RankRole.FORWARD, index)
        at = world.forward.coordinates(index)
        for place, partner in enumerate(world.partners(rank)):
            other = world.trained.coordinates(world.role_rank(partner))
            assert (other.pp, other.cp) == (at.pp, at.cp)
            assert other.tp == (place if world.merged else at.tp)
            assert other.dp == (at.dp if world.merged else at.dp * world.backward_per_forward + place)


@given(fbd_worlds(), st.integers(1, 4))
def test_partners_run_on_the_same_worker_where_units_fit(world: FbdWorld, units: int) -> None:
    per_worker = units * (world.served + 1)
    for rank in range(world.world_size):
        workers = {partner // per_worker for partner in world.partners(rank)}
        if not world.apart:
            assert workers == {rank // per_worker}


@given(fbd_worlds())
def test_ranks_apart_are_numbered_by_role(world: FbdWorld) -> None:
    roles = [world.role_of(rank) for rank in range(world.world_size)]
    by_role = [RankRole.BACKWARD] * world.backward_ranks + [RankRole.FORWARD] * world.forward_ranks
    assert (roles == by_role) or not world.apart
    assert not world.apart or world.rank_of(RankRole.FORWARD, 0) == world.backward_ranks


def test_numbers_of_known_worlds() -> None:
    forward, backward = RankRole.FORWARD, RankRole.BACKWARD
    pairs = fbd_world(tensor=2, pipeline=1, data=1)
    assert [pairs.partners(rank) for rank in range(4)] == [(1,), (0,), (3,), (2,)]
    merged = fbd_world(tensor=2, pipeline=2, data=1, merged=True)
    assert [merged.role_of(rank) for rank in range(6)] == [backward, backward, forward] * 2
    assert merged.partners(5) == (3, 4)
    by_data = fbd_world(tensor=1, pipeline=2, data=4, backward_per_forward=2)
    assert [by_data.role_rank(rank) for rank in range(12)] == [0, 1, 0, 2, 3, 1, 4, 5, 2, 6, 7, 3]
    apart = fbd_world(tensor=2, pipeline=1, data=2, merged=True, apart=True)
    assert [apart.partners(rank) for rank in range(6)] == [(4,), (4,), (5,), (5,), (0, 1), (2, 3)]
    with_replicas = fbd_world(tensor=2, pipeline=1, data=2, backward_per_forward=2)
    assert [with_replicas.role_rank(rank) for rank in range(6)] == [0, 2, 0, 1, 3, 1]


@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_divide_the_forward_ranks_too(tensor: int) -> None:
    with pytest.raises(TopologyError, match="expert: 4 does not divide context 1 x data 2"):
        FbdWorld(trained=Topology(tensor=tensor, data=4, expert=4), merged=False, backward_per_forward=2)


def test_a_fixed_world_trains_with_half_the_replicas() -> None:
    plain = Topology.of_world(16, tensor=2, pipeline=2)
    assert fbd_world_of(16, tensor=2, pipeline=2).trained.data == plain.data // 2
