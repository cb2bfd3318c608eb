"""Peers of a rank's channels, and the sizes of their messages."""

import dataclasses
import os

from megatronapp_common.names import Env
from megatronapp_common.topology import RankRole
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.fbd.orders import PassOrders
from megatronapp_trainer.fbd.stage import Stage
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

CONTROL_SLOTS = 16
WEIGHT_PART_BYTES = 4 << 20
"""Most bytes of parameters in a message: small enough that copying in and out overlap."""
NUMBER_BYTES = 8
"""Bytes of a command or credit."""
SUMMARY_BYTES = 64 << 10
"""Bytes of the summary of a step: room for random states of the host and of a device."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelPlan:
    """Peers of a rank and the sizes of their messages; ranks are those of the launcher."""

    rank: int
    unit: int
    """Forward rank of this rank and its partners."""
    partners: tuple[int, ...]
    """Backward ranks of a forward rank, or the forward rank of a backward rank."""
    leads: bool
    """True on backward ranks, which command their partner and give it credits."""
    neighbours: tuple[int, ...]
    """Ranks of the same role that hold the stages before and after."""
    activation: TensorSpec
    """Hidden states between two stages."""
    control_bytes: int
    """Bytes of the largest message that is no shipment; equal on all ranks of the job."""
    shipment_bytes: int
    """Bytes of the largest shipment of saved tensors."""
    shipments: int
    """Shipments that a backward rank has room for."""
    control_slots: int = CONTROL_SLOTS
    """Messages of one peer that are no shipments for which there is room at a time; equal on all ranks of the job."""
    deadline_s: float
    device: int | None
    threads: int
    address: str = ""
    """Address of this rank for peers on other nodes; UCX chooses a device if it is empty."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the ranks that exchange messages with this one: its partners, then its neighbours."""
        return (*self.partners, *self.neighbours)


def channel_plan(
    config: TrainerConfig, layout: Layout, stage: Stage, *, shipment_bytes: int, shipments: int, device: int | None
) -> ChannelPlan:
    """Return the channels of this rank, whose place in the pipeline is `stage`.

    Args:
        config: of this rank's role.
        layout: of this rank.
        stage: place of this rank.
        shipment_bytes: of the largest shipment of saved tensors.
        shipments: for which a backward rank has room.
        device: ordinal of this rank's CUDA device, None on the CPU.
    """
    assert layout.fbd is not None
    own, given = layout.global_rank, config.dpp.addresses
    partners = layout.fbd.partners(own)
    is_forward = layout.role is RankRole.FORWARD
    most_microbatches = config.most_microbatches(layout.trained_data_size)
    orders = PassOrders(stage.placement, config.dpp.schedule)
    control_slots = CONTROL_SLOTS
    if orders.are_dynamic:
        served = config.fbd.fbd_backward_per_forward
        control_slots = max(control_slots, orders.control_messages(most_microbatches, served))
    return ChannelPlan(
        rank=own,
        unit=own if is_forward else partners[0],
        partners=partners,
        leads=not is_forward,
        neighbours=tuple(sorted({stage.previous, stage.following} - {own})),
        activation=activation_spec(config, layout),
        control_bytes=max(whole_activation_spec(config).bytes, WEIGHT_PART_BYTES, SUMMARY_BYTES),
        shipment_bytes=shipment_bytes,
        shipments=shipments,
        control_slots=control_slots,
        deadline_s=60 * config.parallel.distributed_timeout_minutes,
        device=device,
        threads=config.dpp.threads,
        address=given[own] if given else os.environ.get(Env.ADDRESS, ""),
    )


def activation_spec(config: TrainerConfig, layout: Layout) -> TensorSpec:
    """Return the form of hidden states between stages: [S, B, H], under sequence parallelism a part of the sequence."""
    whole = whole_activation_spec(config)
    length = whole.shape[0] // (layout.tensor_size if config.parallel.sequence_parallel else 1)
    return TensorSpec((length, *whole.shape[1:]), whole.dtype)


def whole_activation_spec(config: TrainerConfig) -> TensorSpec:
    """Return the form of hidden states of the whole sequence."""
    dtype = config.precision.dtype
    return TensorSpec((config.model.seq_length, config.training.micro_batch_size, config.model.hidden_size), dtype)
