"""Shipments: the segments of one or more groups of saved tensors as one message, whose size is known beforehand."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.device.place import sent_to
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind, Traffic
from megatronapp_trainer.fbd.graph.backward_graph import BackwardGraph
from megatronapp_trainer.fbd.graph.recorder import ForwardRecorder, RecordedSegment
from megatronapp_trainer.fbd.graph.region_states import RegionStates
from megatronapp_trainer.fbd.graph.saved_tensors import SavedTensors, SegmentMemory
from megatronapp_trainer.fbd.graph.slicing import PassSlicer
from megatronapp_trainer.hooks.transfer_observer import PassKey
from megatronapp_trainer.pipeline.transport.tensor_transport import MessagePart, TensorSpec

ALIGNMENT = 64
"""Bytes; any dtype may begin there, and copies are fast."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShipmentLayout:
    """Places of the segments of a pass: the number of the shipment of each, and its first byte there.

    After the segments the last shipment has the states of the checkpointed regions, if these are shipped.
    """

    sizes: tuple[int, ...]
    """Bytes of each shipment."""
    last_groups: tuple[int, ...]
    """Group with which each shipment is complete."""
    places: tuple[tuple[int, int], ...]
    """Shipment and offset by segment."""
    lengths: tuple[int, ...]
    """Bytes by segment."""
    state_places: tuple[tuple[int, int], ...] | None
    """Offset in the last shipment, and bytes, of each state; None if no states are shipped."""
    ends_with_report: bool
    """True for a chunk whose report of the loss is sent after its shipments."""

    @property
    def traffic(self) -> Traffic:
        """Return messages and bytes of a pass."""
        return Traffic(len(self.sizes), sum(self.sizes))

    def announced(self, shipment: int, microbatch: int, chunk: int) -> PassKey | None:
        """Return the pass that is complete with a shipment, for traces; None if more of it follows."""
        is_last = shipment == len(self.sizes) - 1 and not self.ends_with_report
        return shipped_pass(microbatch, chunk) if is_last else None


def shipment_layout(
    saved: SavedTensors, states: Sequence[RegionStates] | None, *, ends_with_report: bool
) -> ShipmentLayout:
    """Distribute the segments of a pass: whole groups in order, as many together as the largest group has bytes.

    `states`: of the checkpointed regions; None if they are not shipped, as their regions draw no random numbers.
    """
    groups = range(1 + max(saved.groups, default=0))
    group_bytes = [
        sum(_aligned(segment.bytes) for segment in saved.segments if segment.group == group) for group in groups
    ]
    state_bytes = [state.numel() for region in states or () for state in region.tensors]
    group_bytes[-1] += sum(map(_aligned, state_bytes))
    limit = max(group_bytes)
    sizes, last_groups = [0], [0]
    shipment_of = []
    for group, size in enumerate(group_bytes):
        if sizes[-1] and sizes[-1] + size > limit:
            sizes.append(0)
            last_groups.append(group)
        sizes[-1] += size
        last_groups[-1] = group
        shipment_of.append(len(sizes) - 1)
    ends = [0] * len(sizes)
    places = []
    for segment in saved.segments:
        shipment = shipment_of[segment.group]
        places.append((shipment, ends[shipment]))
        ends[shipment] += _aligned(segment.bytes)
    state_places = []
    for size in state_bytes:
        state_places.append((ends[-1], size))
        ends[-1] += _aligned(size)
    lengths = tuple(segment.bytes for segment in saved.segments)
    return ShipmentLayout(
        tuple(sizes),
        tuple(last_groups),
        tuple(places),
        lengths,
        None if states is None else tuple(state_places),
        ends_with_report,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """A backward rank to which a chunk's saved tensors go."""

    partner: int
    layout: ShipmentLayout
    segments: tuple[tuple[int, ...], ...]
    """Segments of its shipments by group."""
    slicer: PassSlicer | None
    """Divides what a whole model saves; None: the backward rank saves the same."""


class ShipmentSender:
    """Ships what the forward passes of a chunk save."""

    def __init__(
        self, channel: Channel, recorder: ForwardRecorder, destinations: list[Destination], *, chunk: int
    ) -> None:
        self._channel = channel
        self._recorder = recorder
        self._destinations = {destination.partner: destination for destination in destinations}
        self._chunk = chunk

    @contextlib.contextmanager
    def shipping(self, partners: Sequence[int], step: int, microbatch: int) -> Iterator[None]:
        """Send what the pass within the context saves, each shipment as soon as it is complete."""
        key = MessageKey(MessageKind.SAVED, step, microbatch, self._chunk)
        passes = [_ShippedPass(self._channel, self._destinations[partner], key) for partner in partners]

        def ship(group: int, segments: list[RecordedSegment]) -> None:
            for shipped in passes:
                shipped.add(group, segments)

        with self._recorder.recording(ship) as states:
            yield
        for shipped in passes:
            shipped.finish(states)


class _ShippedPass:
    """Shipments of one pass to one backward rank, gathered from where the tensors are."""

    def __init__(self, channel: Channel, destination: Destination, key: MessageKey) -> None:
        self._channel = channel
        self._destination = destination
        self._layout = destination.layout
        self._is_cuda = channel.device.type == "cuda"
        self._key = key
        self._shipment = 0
        self._parts: list[MessagePart] = []
        """Parts of the shipment that is not complete yet."""

    def add(self, group: int, segments: list[RecordedSegment]) -> None:
        """Take what a group of slots holds; send the shipment if it is complete, but for the last one.

        The memory of the segments is not written after this. The transport keeps it until it is copied.
        """
        layout, slicer = self._layout, self._destination.slicer
        numbers = self._destination.segments[group]
        if slicer is not None:
            self._add_slices(slicer, group, segments, numbers)
        else:
            for number, segment in zip(numbers, segments, strict=True):
                start = layout.places[number][1]
                if segment.owner.is_cuda == self._is_cuda:
                    self._parts.append(MessagePart(start, segment.address, segment.bytes, segment.owner))
                else:
                    self._add_tensor(start, segment.flat())
        if group == layout.last_groups[self._shipment] and self._shipment < len(layout.sizes) - 1:
            self._send()

    def _add_slices(
        self, slicer: PassSlicer, group: int, segments: list[RecordedSegment], numbers: Sequence[int]
    ) -> None:
        """Take the rank's parts of what a whole model saves: as they are where that is possible, otherwise copied."""
        layout, filled = self._layout, {}
        for number in numbers:
            length, start = layout.lengths[number], layout.places[number][1]
            found = slicer.source_range(number)
            source = None if found is None else segments[found.segment]
            if found is not None and source is not None and source.owner.is_cuda == self._is_cuda:
                self._parts.append(MessagePart(start, source.address + found.offset, length, source.owner))
            else:
                filled[number] = torch.empty(length, dtype=torch.uint8, device=self._channel.device)
        if not filled:
            return
        slicer.fill(group, functools.cache(lambda place: self._placed(segments[place].flat())), filled)
        for number, part in filled.items():
            self._add_tensor(layout.places[number][1], part)

    def finish(self, states: Sequence[RegionStates]) -> None:
        """Send the last shipment, with the states of the checkpointed regions if these are shipped."""
        if self._layout.state_places is not None:
            found = (state for region in states for state in region.tensors)
            for (start, _), state in zip(self._layout.state_places, found, strict=True):
                self._add_tensor(start, state)
        self._send()

    def _add_tensor(self, start: int, tensor: torch.Tensor) -> None:
        self._parts.append(self._channel.part(start, self._placed(tensor)))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the memory that is sent from, without waiting for a device."""
        device = self._channel.device
        return tensor if tensor.device == device else sent_to(device, tensor)

    def _send(self) -> None:
        layout, shipment = self._layout, self._shipment
        self._channel.send_parts(
            self._destination.partner,
            self._key._replace(part=shipment),
            self._parts,
            layout.sizes[shipment],
            layout.announced(shipment, self._key.item, self._key.chunk),
        )
        self._shipment += 1
        self._parts = []


def destination_of(
    partner: int, saved: SavedTensors, layout: ShipmentLayout, slicer: PassSlicer | None = None
) -> Destination:
    """Return a backward rank with what its graph saves."""
    segments: list[list[int]] = [[] for _ in range(1 + max(saved.groups, default=0))]
    for number, segment in enumerate(saved.segments):
        segments[segment.group].append(number)
    return Destination(partner, layout, tuple(map(tuple, segments)), slicer)


class ShipmentReceiver:
    """Runs a chunk's graph backward on what has been shipped."""

    def __init__(self, graph: BackwardGraph, layout: ShipmentLayout, *, chunk: int) -> None:
        self._graph = graph
        self._layout = layout
        self._chunk = chunk
        self._on_host = [number for number, segment in enumerate(graph.saved.segments) if segment.on_host]
        self._shipments: list[torch.Tensor] = []
        self._copies: torch.cuda.Stream | None = None
        """Stream of copies from a device to the host, which do not wait for passes before them."""

    @property
    def traffic(self) -> Traffic:
        """Return messages and bytes of a pass."""
        return self._layout.traffic

    def messages(self, step: int, microbatch: int) -> list[tuple[MessageKey, TensorSpec, PassKey | None]]:
        """Return keys and forms of the shipments of a pass, in order; with the last one the pass."""
        key = MessageKey(MessageKind.SAVED, step, microbatch, self._chunk)
        return [
            (
                key._replace(part=shipment),
                TensorSpec((size,), torch.uint8),
                self._layout.announced(shipment, microbatch, self._chunk),
            )
            for shipment, size in enumerate(self._layout.sizes)
        ]

    @property
    def taken(self) -> int:
        """Return the shipments taken of the pass whose backward pass runs next."""
        return len(self._shipments)

    def take(self, shipment: torch.Tensor) -> None:
        """Take the next shipment of the pass whose backward pass runs next."""
        self._shipments.append(shipment)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Run backward on the shipments taken, and return them. Returns the gradient of the chunk's input, if any."""
        shipments, self._shipments = self._shipments, []
        segments = [SegmentMemory(shipments[shipment], start) for shipment, start in self._layout.places]
        with self._copying_to_host(shipments[-1].device):
            for number in self._on_host:
                flat, start = segments[number]
                segments[number] = SegmentMemory(flat[start : start + self._layout.lengths[number]].cpu())
            states = self._states(shipments[-1])
        return self._graph.backward(segments, states, gradient)

    def _copying_to_host(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Copy from a device within the context without waiting for its passes: shipments have arrived as a whole."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._copies)

    def _states(self, shipment: torch.Tensor) -> list[RegionStates]:
        """Return the states of the pass's checkpointed regions; those of the first pass if none are shipped."""
        places = self._layout.state_places
        if places is None:
            return self._graph.region_states
        values = iter([shipment[start : start + size].to("cpu", copy=True) for start, size in places])
        return [region.replaced([next(values) for _ in region.tensors]) for region in self._graph.region_states]


def shipped_pass(microbatch: int, chunk: int) -> PassKey:
    """Return the forward pass that shipments are of, as traces name it."""
    return PassKey(RecordKind.FORWARD, chunk, microbatch)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
