"""No cycle of waits between the ranks of both roles, in generated layouts, with generated delays, credits and slots."""

import random

from fbd_step_simulation import simulate_step
from fbd_worlds import manifest_of, worlds
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.topology import FbdWorld
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.fbd.channels.commands import Command, Order
from megatronapp_trainer.fbd.channels.expected import expected_traffic


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
    assert not any(route.queued for route in network.routes.values())
    order = Order(Command.TRAIN, count, sends_weights=True, ship=ShipMode.SAVED)
    expected = {
        (rank, peer, kind): traffic.messages
        for rank in range(world.world_size)
        for (peer, kind), traffic in expected_traffic(manifest_of(world, rank, chunks), order).sent.items()
        if traffic.messages
    }
    assert network.sent == expected
