"""No cycle of waits between the ranks of both roles, in generated layouts, with generated delays, credits and slots."""

import dataclasses
import random

from fbd_step_simulation import Network, simulate_step
from fbd_worlds import manifest_of, worlds
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.topology import FbdWorld
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.fbd.channels.commands import Command, Order
from megatronapp_trainer.fbd.channels.expected import expected_traffic
from megatronapp_trainer.fbd.orders import PassOrders
from megatronapp_trainer.pipeline.planning.tasks import Placement


@given(worlds(), st.data())
def test_no_step_ends_in_a_cycle_of_waits(world: FbdWorld, data: st.DataObject) -> None:
    """All ranks end, and have sent the messages that are known beforehand."""
    pipeline = world.trained.pipeline
    chunks = data.draw(st.integers(1, 3)) if pipeline > 1 else 1
    count = data.draw(st.integers(1, 7)) if chunks == 1 else pipeline * data.draw(st.integers(1, 3))
    network = simulate_step(
        world,
        chunks,
        count,
        random.Random(data.draw(st.integers(0, 1 << 32))),
        split=data.draw(st.booleans()),
        control_slots=data.draw(st.integers(1, 16)),
    )
    check_traffic(network, world, chunks, count)


@given(worlds(), st.sampled_from(["auto", "dfc", "bfc"]), st.data())
def test_no_step_of_ranks_that_choose_ends_in_a_cycle_of_waits(
    world: FbdWorld, schedule: str, data: st.DataObject
) -> None:
    """With as many slots as such ranks take for messages that are no shipments."""
    world = dataclasses.replace(
        world,
        trained=dataclasses.replace(world.trained, tensor=1, pipeline=data.draw(st.integers(2, 3))),
        merged=False,
    )
    placement = Placement(world.trained.pipeline, data.draw(st.integers(1, 3)))
    count = data.draw(st.integers(1, 7)) if placement.chunks == 1 else placement.ranks * data.draw(st.integers(1, 8))
    network = simulate_step(
        world,
        placement.chunks,
        count,
        random.Random(data.draw(st.integers(0, 1 << 32))),
        split=True,
        control_slots=PassOrders(placement, schedule).control_messages(count, world.backward_per_forward),
        schedule=schedule,
    )
    check_traffic(network, world, placement.chunks, count)


def check_traffic(network: Network, world: FbdWorld, chunks: int, count: int) -> None:
    """Check that all messages were delivered, and that they are those known beforehand."""
    assert not any(route.queued for route in network.routes.values())
    order = Order(Command.TRAIN, count, sends_weights=True, ship=ShipMode.SAVED)
    expected = {
        (rank, peer, kind): traffic.messages
        for rank in range(world.world_size)
        for (peer, kind), traffic in expected_traffic(manifest_of(world, rank, chunks), order).sent.items()
        if traffic.messages
    }
    assert network.sent == expected
