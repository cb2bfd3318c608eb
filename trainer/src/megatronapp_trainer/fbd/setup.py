"""Start of forward and of backward ranks: the graphs of both, their agreement, and the connections between them.

A backward rank publishes where the training begins, builds the graph of its chunks, and waits for its forward rank to
say what its passes save; both then connect.
"""

import dataclasses
from collections.abc import Callable

import torch

from megatronapp_common.topology import FbdWorld, RankRole
from megatronapp_trainer.checkpoint import random_states
from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.fbd.backward_schedule import BackwardSchedule
from megatronapp_trainer.fbd.channels.agreement import agree
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.commands import Split
from megatronapp_trainer.fbd.channels.expected import TrafficManifest
from megatronapp_trainer.fbd.channels.plan import channel_plan
from megatronapp_trainer.fbd.channels.start import StartExchange, exchange_key
from megatronapp_trainer.fbd.commanded_perturbation import CommandedPerturbation
from megatronapp_trainer.fbd.example_passes import ExamplePasses
from megatronapp_trainer.fbd.forward_rank import ForwardRank, Replica
from megatronapp_trainer.fbd.graph.recorder import ForwardRecorder
from megatronapp_trainer.fbd.graph.region_states import RegionStates
from megatronapp_trainer.fbd.graph.saved_tensors import SavedTensors
from megatronapp_trainer.fbd.graph.shipments import (
    Destination,
    ShipmentLayout,
    ShipmentReceiver,
    ShipmentSender,
    destination_of,
    shipment_layout,
)
from megatronapp_trainer.fbd.graph.slicing import PassSlicer, TensorPlace, slot_slices, weight_part
from megatronapp_trainer.fbd.orders import PassOrders
from megatronapp_trainer.fbd.remote_data import remote_iterators
from megatronapp_trainer.fbd.ship_modes import recompute_final_norms
from megatronapp_trainer.fbd.stage import Stage, stage_of
from megatronapp_trainer.fbd.tuning.ship_tuner import Publishing, ShipTuner
from megatronapp_trainer.fbd.weights import weight_traffic
from megatronapp_trainer.hooks.boundary_control import BoundaryControl
from megatronapp_trainer.hooks.probe_texts import ProbeTexts
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.worlds import shared_store
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.split_backward import install_split_backward
from megatronapp_trainer.pipeline.task_clocks import DeviceTaskClock, HostTaskClock, TaskClock
from megatronapp_trainer.pipeline.task_random import TaskRandom
from megatronapp_trainer.training.build import TrainingRun, build_iterators, observe_megatron


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Place in the data and random states at which a training begins; from a backward rank to its forward rank."""

    iteration: int
    consumed_samples: int
    order_samples: int | None
    states: dict[str, object]
    """Random states of the backward rank, which its checkpoint has or its seed gives."""
    on_gpu: bool
    """True if the backward rank runs on a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Evaluations for which a forward rank has samples."""

    splits: frozenset[Split]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Saved tensors that the graph of a chunk needs on a backward rank."""

    saved: SavedTensors
    states: tuple[RegionStates, ...] | None
    """Random states of its checkpointed regions, those of other passes have the same form; None if none are shipped."""


def begin_backward(run: TrainingRun) -> DataIterators:
    """Say where the training begins. Returns iterators that name the samples that forward ranks read."""
    layout, exchange = run.layout, _exchange(run.layout)
    state: TrainState = run.state
    exchange.put(
        "start",
        Start(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            order_samples=state.order_samples,
            states=random_states.capture(),
            on_gpu=run.device.is_cuda,
        ),
    )
    (partner,) = _world(layout).partners(layout.global_rank)
    hello: Hello = exchange.get("hello", partner)
    return remote_iterators(hello.splits)


def build_backward_schedule(
    run: TrainingRun, observer: StepObserver | None, publishing: Publishing, *, request_stop: Callable[[], None]
) -> BackwardSchedule:
    """Build the graphs of a backward rank's chunks and connect it; call `begin_backward` before.

    `publishing`: ways to users of the run.

    Raises:
        PeerLostError: a rank did not connect.
    """
    config, layout = run.config, run.layout
    stage = stage_of(layout)
    forward_on_cpu = config.fbd.fbd_forward_on_cpu
    if forward_on_cpu:
        recompute_final_norms(run.state.chunks)
    stores = install_split_backward(run.state.chunks)  # before the graphs, which call the layers as they are then
    receivers: dict[ShipMode, list[ShipmentReceiver]] = {}
    graphs: dict[ShipMode, list[Graph]] = {}
    layouts: list[ShipmentLayout] = []
    ship_bytes = {}
    for mode, built in ExamplePasses(run, stage).graphs().items():
        graphs[mode] = []
        receivers[mode] = []
        for chunk, graph in enumerate(built):
            states = None if forward_on_cpu else tuple(graph.region_states)
            graphs[mode].append(Graph(saved=graph.saved, states=states))
            layouts.append(shipment_layout(graph.saved, states, ends_with_report=stage.is_last(chunk)))
            receivers[mode].append(ShipmentReceiver(graph, layouts[-1], chunk=chunk))
        ship_bytes[mode] = sum(sum(layout.sizes) for layout in layouts[-len(built) :])
    _exchange(layout).put("graphs", graphs)
    channel = _connect(run, stage, layouts, observer)
    if observer is not None:
        observe_megatron(run, observer)
    clock: TaskClock = DeviceTaskClock() if run.device.is_cuda else HostTaskClock()
    context = ScheduleContext(
        config=config,
        layout=layout,
        core_config=run.core_config,
        chunks=run.state.chunks,
        optimizer=run.state.optimizer,
        transport=None,
        evaluation_transport=None,
        family=model_family(config),
        observer=observer,
    )
    return BackwardSchedule(
        context,
        stage,
        channel,
        receivers,
        orders=_orders(run, stage),
        stores=stores,
        tuner=ShipTuner(ship_bytes, _world(layout), clock, publishing, forward_on_cpu=forward_on_cpu),
        manifest=_backward_manifest(run, stage, channel, receivers),
        weight_version=lambda: run.state.iteration,
        request_stop=request_stop,
    )


def build_forward_rank(
    run: TrainingRun,
    open_observer: Callable[[TrainingRun], StepObserver | None],
    *,
    stop_requested: Callable[[], bool],
    open_control: Callable[[StepObserver | None], BoundaryControl | None] = lambda _: None,
    capture: TrainingCapture | None = None,
    probes: ProbeTexts | None = None,
    perturbation: CommandedPerturbation | None = None,
) -> ForwardRank:
    """Connect a forward rank to its backward ranks, whose weights it gets with the first command.

    `open_observer` opens the observer of the run once it is known where the training begins, `open_control` its
    control, if it obeys orders; `capture` captures steps, `probes` reads texts, `perturbation` knows of perturbations.

    Raises:
        UsageError: a backward rank has another kind of device, and no flag says so.
        TransferError: the graphs of backward ranks need other tensors than passes here save.
        PeerLostError: a rank did not connect.
    """
    config, layout, stage, exchange = run.config, run.layout, stage_of(run.layout), _exchange(run.layout)
    if config.fbd.fbd_forward_on_cpu:
        recompute_final_norms(run.state.chunks)
    learned = ExamplePasses(run, stage).saved_tensors()
    partners = _world(layout).partners(layout.global_rank)
    starts: list[Start] = [exchange.get("start", partner) for partner in partners]
    for partner, start in zip(partners, starts, strict=True):
        refuse_other_device(
            layout.global_rank,
            partner,
            on_gpu=run.device.is_cuda,
            partner_on_gpu=start.on_gpu,
            may_differ=config.fbd.fbd_forward_on_cpu,
        )
    replicas = _replicas(run, partners, starts)
    splits = {Split.VALIDATION: replicas[0].iterators.valid, Split.TEST: replicas[0].iterators.test}
    exchange.put("hello", Hello(splits=frozenset(split for split, found in splits.items() if found is not None)))
    destinations = _destinations(run, stage, learned)
    run.state.iteration, run.state.consumed_samples = starts[0].iteration, starts[0].consumed_samples
    observer = open_observer(run)
    found = [destination for of_mode in destinations.values() for of_chunk in of_mode for destination in of_chunk]
    channel = _connect(run, stage, [destination.layout for destination in found], observer)
    if capture is not None:
        capture.begin()
    return ForwardRank(
        run,
        stage,
        channel,
        replicas,
        _senders(run, channel, learned, destinations),
        orders=_orders(run, stage),
        manifest=_forward_manifest(run, stage, channel, destinations),
        iteration=starts[0].iteration,
        observer=observer,
        stop_requested=stop_requested,
        control=open_control(observer),
        capture=capture,
        probes=probes,
        perturbation=perturbation,
    )


def _senders(
    run: TrainingRun,
    channel: Channel,
    learned: dict[ShipMode, list[SavedTensors]],
    destinations: dict[ShipMode, list[list[Destination]]],
) -> dict[ShipMode, list[ShipmentSender]]:
    """Return the senders of saved tensors, by mode one for each chunk."""
    return {
        mode: [
            ShipmentSender(channel, ForwardRecorder(module, saved), destinations[mode][chunk], chunk=chunk)
            for chunk, (module, saved) in enumerate(zip(run.state.chunks, of_chunks, strict=True))
        ]
        for mode, of_chunks in learned.items()
    }


def _replicas(run: TrainingRun, partners: tuple[int, ...], starts: list[Start]) -> list[Replica]:
    """Return the replicas that a forward rank serves, with their data from where the training begins."""
    config, layout = run.config, run.layout
    groups = [partners] if _world(layout).merged else [(partner,) for partner in partners]
    return [
        Replica(
            partners=group,
            iterators=_iterators(config, layout, group[0], start),
            states=_states(config, start),
            random=TaskRandom() if config.dpp.use_dpp and config.model.has_dropout else None,
        )
        for group, start in zip(groups, starts, strict=False)
    ]


def refuse_other_device(rank: int, partner: int, *, on_gpu: bool, partner_on_gpu: bool, may_differ: bool) -> None:
    """Raise UsageError if a forward rank and its backward rank have devices of two kinds, except for a CPU and a GPU
    where `may_differ` (`--fbd-forward-on-cpu`).
    """
    if on_gpu and not partner_on_gpu:
        raise UsageError(
            f"forward rank {rank} has a GPU, and its backward rank {partner} has none; give backward ranks GPUs, or "
            "take the CPU for all ranks (CUDA_VISIBLE_DEVICES= set to nothing)"
        )
    if partner_on_gpu and not on_gpu and not may_differ:
        raise UsageError(
            f"forward rank {rank} has no GPU, and its backward rank {partner} has one; write --fbd-forward-on-cpu "
            "(in a manifest fbd.forward with gpusPerNode: 0), or give each rank a GPU"
        )


def _states(config: TrainerConfig, start: Start) -> dict[str, object]:
    """Return the random states with which the first pass of a replica begins.

    Those of a GPU are no states of a CPU, which keeps its own: no pass draws numbers from them.
    """
    if config.fbd.fbd_forward_on_cpu:
        return random_states.capture() | random_states.of_host(start.states)
    return start.states


def _backward_manifest(
    run: TrainingRun, stage: Stage, channel: Channel, receivers: dict[ShipMode, list[ShipmentReceiver]]
) -> TrafficManifest:
    world, (partner,) = _world(run.layout), channel.partners
    sends_weights = world.merged or world.partners(partner)[0] == run.layout.global_rank
    return TrafficManifest(
        is_forward=False,
        stage=stage,
        partners=(partner,),
        activation_bytes=channel.activation.bytes,
        shipments={
            mode: {partner: tuple(receiver.traffic for receiver in of_mode)} for mode, of_mode in receivers.items()
        },
        weights={partner: weight_traffic(_parameters(run))} if sends_weights else {},
    )


def _forward_manifest(
    run: TrainingRun, stage: Stage, channel: Channel, destinations: dict[ShipMode, list[list[Destination]]]
) -> TrafficManifest:
    partners, is_merged = channel.partners, _world(run.layout).merged
    senders = partners if is_merged else partners[:1]
    parts = {
        partner: [weight_part(parameter, place, len(senders)) for parameter in _parameters(run)]
        for place, partner in enumerate(senders)
    }
    return TrafficManifest(
        is_forward=True,
        stage=stage,
        partners=partners,
        replicas=1 if is_merged else len(partners),
        activation_bytes=channel.activation.bytes,
        shipments={
            mode: {
                partner: tuple(of_chunk[place].layout.traffic for of_chunk in of_mode)
                for place, partner in enumerate(partners)
            }
            for mode, of_mode in destinations.items()
        },
        weights={partner: weight_traffic(own) for partner, own in parts.items()},
    )


def _parameters(run: TrainingRun) -> list[torch.nn.Parameter]:
    return [parameter for chunk in run.state.chunks for parameter in chunk.parameters()]


def _destinations(
    run: TrainingRun, stage: Stage, learned: dict[ShipMode, list[SavedTensors]]
) -> dict[ShipMode, list[list[Destination]]]:
    """Return the partners of a forward rank by mode and chunk. Raises TransferError as `_destination` does."""
    exchange = _exchange(run.layout)
    graphs: dict[int, dict[ShipMode, list[Graph]]] = {
        partner: exchange.get("graphs", partner) for partner in _world(run.layout).partners(run.layout.global_rank)
    }
    return {
        mode: [
            [
                _destination(run, saved, partner, built[mode][chunk], ends_with_report=stage.is_last(chunk))
                for partner, built in graphs.items()
            ]
            for chunk, saved in enumerate(of_chunks)
        ]
        for mode, of_chunks in learned.items()
    }


def _destination(
    run: TrainingRun, saved: SavedTensors, partner: int, graph: Graph, *, ends_with_report: bool
) -> Destination:
    """Return a partner with what its graph of a chunk needs. Raises TransferError if that is not saved here."""
    world, layout = _world(run.layout), run.layout
    shipments = shipment_layout(graph.saved, graph.states, ends_with_report=ends_with_report)
    if not world.merged:
        saved.refuse_other(graph.saved, rank=partner)
        return destination_of(partner, graph.saved, shipments)
    place = TensorPlace(
        rank=world.partners(layout.global_rank).index(partner),
        ranks=world.trained.tensor,
        micro_batch_size=run.config.training.micro_batch_size,
        vocabulary=run.padded_vocab_size,
    )
    slicer = PassSlicer(saved, graph.saved, slot_slices(saved, graph.saved, place))
    return destination_of(partner, graph.saved, shipments, slicer)


def _connect(run: TrainingRun, stage: Stage, layouts: list[ShipmentLayout], observer: StepObserver | None) -> Channel:
    """Connect this rank; collective over both roles. Raises UsageError for too little memory, or no path to a peer."""
    config, exchange = run.config, _exchange(run.layout)
    most = _orders(run, stage).places(config.most_microbatches(run.layout.trained_data_size), stage.rank)
    plan = channel_plan(
        config,
        run.layout,
        stage,
        shipment_bytes=max(size for shipments in layouts for size in shipments.sizes),
        shipments=most * max(len(shipments.sizes) for shipments in layouts),
        device=torch.cuda.current_device() if run.device.is_cuda else None,
    )
    return Channel(plan, agree(plan, exchange), exchange, None if observer is None else observer.transfers)


def _iterators(config: TrainerConfig, layout: Layout, partner: int, start: Start) -> DataIterators:
    """Open the samples of a partner's replica."""
    world = _world(layout)
    replica = dataclasses.replace(
        layout,
        rank=world.role_rank(partner),
        local_rank=layout.local_rank_in_role,  # of forward ranks, too, some rank checks and builds for its node
        world_size=world.trained.world_size,
        tensor_size=world.trained.tensor,
        role=RankRole.BACKWARD,
    )
    return build_iterators(config, replica, start.consumed_samples, order_samples=start.order_samples)


def _orders(run: TrainingRun, stage: Stage) -> PassOrders:
    return PassOrders(stage.placement, run.config.dpp.schedule)


def _world(layout: Layout) -> FbdWorld:
    world = layout.fbd
    assert world is not None
    return world


def _exchange(layout: Layout) -> StartExchange:
    return StartExchange(shared_store(), layout.global_rank, layout.global_world_size, key=exchange_key())
