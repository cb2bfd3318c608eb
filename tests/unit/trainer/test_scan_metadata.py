"""The communicator table of every rank: both ends of a pipeline pair know the same directed pairs."""

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import parse
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scan.metadata import communicators, directed_pairs, ring_metadata
from megatronapp_trainer.scan.peers import PeerCounters
from megatronapp_trainer.scan.run_context import RunContext

sizes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))


def layout(rank: int, tensor: int, pipeline: int, data: int) -> Layout:
    return Layout(
        rank=rank,
        world_size=tensor * pipeline * data,
        local_rank=0,
        tensor_size=tensor,
        pipeline_size=pipeline,
        virtual_size=1,
    )


@given(sizes=sizes)
def test_both_ends_hold_the_same_pairs(sizes: tuple[int, int, int]) -> None:
    tensor, pipeline, data = sizes
    world = tensor * pipeline * data
    pairs_of_rank = {rank: set(directed_pairs(layout(rank, *sizes))) for rank in range(world)}
    for rank, pairs in pairs_of_rank.items():
        for source, destination in pairs:
            assert rank in (source, destination)
            assert (source, destination) in pairs_of_rank[source] & pairs_of_rank[destination]
            assert abs(source - destination) % (tensor * data) == 0


@given(sizes=sizes)
def test_neighbours_are_a_single_stage_apart(sizes: tuple[int, int, int]) -> None:
    tensor, pipeline, data = sizes
    for rank in range(tensor * pipeline * data):
        me = layout(rank, *sizes)
        stages = {layout(peer, *sizes).pipeline_rank for pair in directed_pairs(me) for peer in pair} - {
            me.pipeline_rank
        }
        around = {(me.pipeline_rank + 1) % pipeline, (me.pipeline_rank - 1) % pipeline} - {me.pipeline_rank}
        assert stages == around


def test_slots_are_places_and_lonely_groups_are_left_out() -> None:
    table = communicators(layout(0, 1, 2, 2), {"tp": [0], "dp": [0, 1], "mp": [0, 2]})
    assert [(communicator.slot, communicator.kind, communicator.members) for communicator in table] == [
        (0, "p2p", (2, 0)),
        (1, "p2p", (0, 2)),
        (2, "dp", (0, 1)),
        (3, "mp", (0, 2)),
    ]


def test_the_ring_has_the_place_among_the_ranks_of_the_experts() -> None:
    base = dataclasses.replace(layout(3, 1, 1, 4), expert_size=2)
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    config = parse([*sizes.split(), *["--train-iters", "1", "--lr", "1", "--mock-data", "--vocab-size", "8"]])
    context = RunContext(layout=base, config=config, device_name="cpu", chunks=[], num_microbatches=1)
    document = json.loads(ring_metadata(context, [], None))
    assert (document["layout"]["expert"], document["coordinates"]["ep"]) == (2, 1)


def test_the_ring_has_the_place_among_the_ranks_of_a_sequence() -> None:
    base = dataclasses.replace(layout(5, 2, 2, 2), context_size=2, world_size=8)
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    config = parse([*sizes.split(), *["--train-iters", "1", "--lr", "1", "--mock-data", "--vocab-size", "8"]])
    context = RunContext(layout=base, config=config, device_name="cpu", chunks=[], num_microbatches=1)
    document = json.loads(ring_metadata(context, [], None))
    assert (document["layout"]["context"], document["layout"]["data"]) == (2, 1)
    assert document["coordinates"] == {"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 1}
    assert directed_pairs(base) == [(1, 5), (5, 1)]


def test_messages_are_counted_per_directed_pair_and_step() -> None:
    peers = PeerCounters(0, {(0, 2): 1, (2, 0): 0})
    assert [peers.next_message(name, 2) for name in ("send_next", "recv_next", "send_next")] == [(1, 0), (0, 0), (1, 1)]
    peers.begin_step()
    assert peers.next_message("send_prev", 2) == (1, 0)
