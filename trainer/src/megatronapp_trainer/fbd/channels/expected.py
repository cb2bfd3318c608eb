"""Messages and bytes of a command, known before it and compared at its end, on both ends of each channel."""

import dataclasses
from collections.abc import Collection, Mapping

from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.commands import Order
from megatronapp_trainer.fbd.channels.messages import MessageCounts, MessageKind, Traffic
from megatronapp_trainer.fbd.channels.plan import NUMBER_BYTES, SUMMARY_BYTES
from megatronapp_trainer.fbd.stage import Stage

REPORT_BYTES = 8
"""Bytes of the loss of a microbatch, float32 [2]."""
TrafficByKind = dict[tuple[int, MessageKind], Traffic]
"""Messages and bytes by peer and kind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrafficManifest:
    """Sizes by which the traffic of a rank follows from a command; equal for the whole run."""

    is_forward: bool
    stage: Stage
    partners: tuple[int, ...]
    replicas: int = 1
    """Model replicas whose microbatches a forward rank runs; 1 on backward ranks."""
    activation_bytes: int
    """Bytes of hidden states between two stages, and of their gradients."""
    shipments: Mapping[ShipMode, Mapping[int, tuple[Traffic, ...]]]
    """Shipments of a pass by mode and partner, of each chunk."""
    weights: Mapping[int, Traffic]
    """Traffic of the weights by the partner that sends or receives them."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedTraffic:
    """Messages and bytes of one command."""

    sent: TrafficByKind
    received: TrafficByKind


def expected_traffic(manifest: TrafficManifest, order: Order) -> ExpectedTraffic:
    """Return what a rank sends and receives from a command, included, to the next one."""
    between_roles = _between_roles(manifest, order)
    from_backward = {MessageKind.COMMAND, MessageKind.WEIGHTS}
    to_forward = {key: traffic for key, traffic in between_roles.items() if key[1] in from_backward}
    to_backward = {key: traffic for key, traffic in between_roles.items() if key[1] not in from_backward}
    following, previous = _between_stages(manifest, order)
    if manifest.is_forward:
        return ExpectedTraffic(to_backward | following, to_forward | previous)
    return ExpectedTraffic(to_forward | following, to_backward | previous)


def _between_roles(manifest: TrafficManifest, order: Order) -> TrafficByKind:
    """Return the traffic with each partner, in both directions."""
    placement, microbatches = manifest.stage.placement, order.num_microbatches
    trains = order.trains
    chunks = range(placement.chunks)
    found: TrafficByKind = {}
    for partner in manifest.partners:
        credits = microbatches * placement.chunks if trains else 0
        found[partner, MessageKind.COMMAND] = Traffic(1, NUMBER_BYTES).times(1 + credits)
        if order.sends_weights and partner in manifest.weights:
            found[partner, MessageKind.WEIGHTS] = manifest.weights[partner]
        if manifest.stage.is_last(placement.chunks - 1):
            found[partner, MessageKind.REPORT] = Traffic(1, REPORT_BYTES).times(microbatches)
        if trains:
            of_pass = manifest.shipments[order.ship][partner]
            found[partner, MessageKind.SAVED] = Traffic(
                microbatches * sum(of_pass[chunk].messages for chunk in chunks),
                microbatches * sum(of_pass[chunk].bytes for chunk in chunks),
            )
            found[partner, MessageKind.SUMMARY] = Traffic(1, SUMMARY_BYTES)
    return found


def _between_stages(manifest: TrafficManifest, order: Order) -> tuple[TrafficByKind, TrafficByKind]:
    """Return what is sent to other stages of the role, and what they send.

    Hidden states go to the stage after, gradients to the stage before.
    """
    stage = manifest.stage
    chunks = range(stage.placement.chunks)
    first, last = sum(map(stage.is_first, chunks)), sum(map(stage.is_last, chunks))
    passes = order.num_microbatches * manifest.replicas
    if manifest.is_forward:
        kind, target, source, ends, begins = MessageKind.ACTIVATION, stage.following, stage.previous, last, first
    else:
        kind, target, source, ends, begins = MessageKind.GRADIENT, stage.previous, stage.following, first, last
        passes *= order.trains
    each = Traffic(1, manifest.activation_bytes)
    sent = {(target, kind): each.times(passes * (len(chunks) - ends))}
    received = {(source, kind): each.times(passes * (len(chunks) - begins))}
    return sent, received


def refuse_other_traffic(
    found: MessageCounts,
    expected: TrafficByKind,
    *,
    step: int,
    sent: bool,
    without: Collection[MessageKind] = (),
) -> None:
    """Raise TransferError, naming kind and rank, if messages or bytes are not those expected.

    Args:
        found: what this rank has counted since the command.
        expected: of the whole command.
        step: number of the command.
        sent: whether this rank has sent the messages; it has received them if not.
        without: kinds that are not compared yet.
    """
    for peer, kind in sorted(set(expected) | found.counted):
        due, here = expected.get((peer, kind), Traffic()), found.of(peer, kind)
        if here != due and kind not in without:
            direction = "sent to" if sent else "received from"
            raise TransferError(
                f"command {step}: {here.messages} messages of {kind.name.lower()} with {here.bytes} bytes were "
                f"{direction} rank {peer}, and the step has {due.messages} with {due.bytes}"
            )
