"""Worlds of MegaFBD, and the traffic of their ranks: strategies and sizes of tests."""

from hypothesis import strategies as st

from megatronapp_common.topology import FbdWorld, RankRole, Topology
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.fbd.channels.expected import TrafficManifest
from megatronapp_trainer.fbd.channels.messages import Traffic
from megatronapp_trainer.fbd.stage import stage_of
from megatronapp_trainer.parallel.layout import Layout

SAVED_BYTES, ACTIVATION_BYTES = 640, 96
SHIPMENTS = (1, 2, 3)
"""Shipments of a pass by chunk."""
WEIGHT_MESSAGES = 3


@st.composite
def worlds(draw: st.DrawFn) -> FbdWorld:
    """Ranks of both roles, of each kind of unit."""
    merged = draw(st.booleans())
    served = 1 if merged else draw(st.integers(1, 3))
    trained = Topology(
        tensor=draw(st.integers(1, 3)), data=served * draw(st.integers(1, 2)), pipeline=draw(st.integers(1, 4))
    )
    return FbdWorld(trained=trained, merged=merged, backward_per_forward=served, apart=draw(st.booleans()))


def layout_at(world: FbdWorld, rank: int, chunks: int) -> Layout:
    role = world.role_of(rank)
    topology = world.topology_of(role)
    return Layout(
        rank=world.role_rank(rank),
        world_size=topology.world_size,
        local_rank=0,
        tensor_size=topology.tensor,
        pipeline_size=topology.pipeline,
        virtual_size=chunks,
        role=role,
        fbd=world,
    )


def manifest_of(world: FbdWorld, rank: int, chunks: int) -> TrafficManifest:
    """Manifest of a rank. A chunk ships one message more than the one before, of another size to each partner."""
    layout = layout_at(world, rank, chunks)
    partners = world.partners(rank)
    is_forward = layout.role is RankRole.FORWARD
    unit = partners if is_forward else world.partners(partners[0])
    senders = unit if world.merged else unit[:1]
    backward = partners if is_forward else (rank,)
    sizes = {
        partner: tuple(
            Traffic(SHIPMENTS[chunk], (1 + unit.index(own)) * (1 + chunk) * SAVED_BYTES) for chunk in range(chunks)
        )
        for partner, own in zip(partners, backward, strict=True)
    }
    return TrafficManifest(
        is_forward=is_forward,
        stage=stage_of(layout),
        partners=partners,
        replicas=len(partners) if is_forward and not world.merged else 1,
        activation_bytes=ACTIVATION_BYTES,
        shipments={ShipMode.SAVED: sizes},
        weights={
            partner: Traffic(WEIGHT_MESSAGES, 100 + own)
            for partner, own in zip(partners, backward, strict=True)
            if own in senders
        },
    )
