"""Assembly of a rank's tracer: ring, recorder, communicators, faults."""

import json
import logging
import os
import pathlib
import time

import torch
from megatron.core import parallel_state
from torch import distributed as dist

import megatronapp_native as native
from megatronapp_common.names import Env, ShmFile
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_common.trace import Flag
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scan.cost import span_cost_ns
from megatronapp_trainer.scan.device import DeviceRecorder
from megatronapp_trainer.scan.faults import FaultPlan, InjectedFault
from megatronapp_trainer.scan.garbage import GarbageListener
from megatronapp_trainer.scan.metadata import Communicator, communicators, ring_metadata
from megatronapp_trainer.scan.nccl_transfers import (
    PROBE_ELEMENTS,
    NcclTransfers,
    PluginLog,
    SlotOf,
    communicator_of,
    slots_of_group,
)
from megatronapp_trainer.scan.observer import ScanObserver
from megatronapp_trainer.scan.recorder import Recorder, TraceRing
from megatronapp_trainer.scan.run_context import RunContext
from megatronapp_trainer.scan.stall import DeviceStall, host_stall
from megatronapp_trainer.scan.windows.agreement import LevelAgreement, PackedLevels
from megatronapp_trainer.scan.windows.budget import TracingCost, WindowBudget
from megatronapp_trainer.scan.windows.layer_spans import LayerSpans
from megatronapp_trainer.scan.windows.plan import WindowPlan
from megatronapp_trainer.scan.windows.rank_file import RankFile
from megatronapp_trainer.scan.windows.rank_marks import RankMarks, RankPlace
from megatronapp_trainer.scan.windows.recorder import WindowRecorder
from megatronapp_trainer.scan.windows.tensor_collectives import TensorCollectives

COST_RECORDS = 1024

log = logging.getLogger(__name__)


class NullRing:
    """Replaces a ring that could not be created: training continues without a trace."""

    def record(self, *_fields: int) -> None:
        """Drop the record: there is no ring."""

    def open_span(self, *_fields: int) -> None:
        """Ignore the span: there is no ring."""

    def close_span(self) -> None:
        """Ignore the span: there is no ring."""

    def heartbeat(self) -> None:
        """Do nothing, as there is no ring."""

    def clock_pair(self) -> None:
        """Do nothing, as there is no ring."""

    def close(self, unlink: bool, /) -> None:
        """Do nothing, as there is no ring."""


def assemble(context: RunContext) -> ScanObserver:
    """Return the observer of this rank, its ring created.

    Raises UsageError for invalid faults.
    """
    layout = context.layout
    table = communicators(layout, _groups())
    plan = FaultPlan(layout.global_rank, _faults(context.config.logging.faults, layout.global_world_size))
    cost_ns = _record_cost_ns(_ring_path(context))
    recorder = _recorder(_ring(context, table, cost_ns), plan, on_device=torch.cuda.is_available())
    stall = host_stall
    if torch.cuda.is_available():
        stall = DeviceStall()
        stall.calibrate()
    return ScanObserver(
        recorder=recorder,
        table=table,
        plan=plan,
        control=DocumentReader(_shm_path(ShmFile.CONTROL)),
        stall=stall,
        host_stall=host_stall,
        layout=layout,
        stops=native.StopMeter(),
        garbage=GarbageListener(monotonic_ns=native.monotonic_ns),
        nccl=_nccl_transfers(recorder.ring, layout, table) if context.config.logging.trace_nccl else None,
        windows=_windows(context, table, recorder, cost_ns),
    )


def _windows(
    context: RunContext, table: list[Communicator], recorder: Recorder, cost_ns: float | None
) -> WindowRecorder:
    """Return what records parts of passes, with the tensor group of this rank, if it has one."""
    flags = context.config.logging
    tensor = next((communicator for communicator in table if communicator.kind == "tp"), None)
    collectives = None
    if tensor is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        collectives = TensorCollectives(recorder, group, tensor.slot)
    members = [context.layout.global_rank] if tensor is None else tensor.members
    return WindowRecorder(
        WindowPlan(members, flags.trace_windows),
        collectives=collectives,
        layers=None if context.config.fbd.enabled else LayerSpans(recorder, context.chunks),
        agreement=None if context.config.fbd.enabled else _agreement(context.layout),
        file=_rank_file(context, table),
        budget=WindowBudget(flags.trace_budget / 100, cost_ns),
        cost=_tracing_cost(_ring_path(context), flags.trace_budget / 100, cost_ns),
    )


def _tracing_cost(path: pathlib.Path, limit: float, cost_ns: float | None) -> TracingCost | None:
    """Return what watches the cost of all records; None where it is not known, or without a ring."""
    if cost_ns is None or not path.exists():
        return None
    return TracingCost(limit, cost_ns, lambda: native.RingReader(str(path)).info().head)


def _agreement(layout: Layout) -> LevelAgreement:
    """Return the agreement on windows of the control page; ranks of a tensor group have successive numbers."""
    members = layout.tensor_size
    return LevelAgreement(PackedLevels(layout.world_size // members, members), layout.rank // members)


def _rank_file(context: RunContext, table: list[Communicator]) -> RankFile | None:
    """Return the file of this rank with `--trace-dir`; None without, or without a ring to read."""
    folder, layout = context.config.logging.trace_dir, context.layout
    path = _ring_path(context)
    if folder is None or not path.exists():
        return None
    place = RankPlace(
        data=layout.data_rank * layout.context_size + layout.context_rank,
        pipeline=layout.pipeline_rank,
        tensor=layout.tensor_rank,
        rank=layout.global_rank,
        local_rank=layout.local_rank,
    )
    return RankFile(
        pathlib.Path(folder) / place.file_name,
        RankMarks(place, table),
        open_ring=lambda: native.RingReader(str(path)),
        real_offset_ns=lambda: time.time_ns() - native.monotonic_ns(),
    )


def _process_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups in which this rank runs collectives, by the kind of their communicator."""
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "mp": parallel_state.get_model_parallel_group(),
    }
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    if embedding is not None and parallel_state.is_rank_in_embedding_group():
        groups["embed"] = embedding
    return groups


def _groups() -> dict[str, list[int]]:
    """Return the ranks, within torch.distributed, of the groups in which this rank runs collectives."""
    return {kind: dist.get_process_group_ranks(group) for kind, group in _process_groups().items()}


def _nccl_transfers(ring: TraceRing, layout: Layout, table: list[Communicator]) -> NcclTransfers:
    """Return the transfers of NCCL, whose communicators one reduction of each group identifies, before training."""
    log = PluginLog()
    pairs = {(c.members[0], c.members[1]): c.slot for c in table if c.kind == "p2p"}
    slots = {c.kind: c.slot for c in table if c.kind != "p2p"}
    found: dict[int, SlotOf] = {}
    groups = _process_groups() | {"pp": parallel_state.get_pipeline_model_parallel_group()}
    for kind, group in groups.items():
        if group.size() > 1:
            probe = torch.zeros(PROBE_ELEMENTS[kind], device="cuda")
            dist.all_reduce(probe, group=group)
            members = [layout.global_rank_of(rank) for rank in dist.get_process_group_ranks(group)]
            found[communicator_of(log, probe.nbytes)] = slots_of_group(
                slots.get(kind), pairs, members, layout.global_rank
            )
    return NcclTransfers(ring, log, found)


def _faults(text: str | None, world_size: int) -> list[InjectedFault]:
    try:
        documents = json.loads(text) if text else []
    except json.JSONDecodeError as error:
        raise UsageError(f"--faults: not JSON: {error}") from error
    faults = [InjectedFault.from_json(document) for document in documents]
    for fault in faults:
        if not 0 <= fault.rank < world_size:
            raise UsageError(f"--faults: rank {fault.rank} does not exist; ranks are 0 to {world_size - 1}")
    return faults


def _shm_path(suffix: str) -> pathlib.Path:
    directory = os.environ.get(Env.SHM_DIR, "/dev/shm")
    prefix = os.environ.get(Env.SHM_PREFIX) or f"megatronapp-{os.getpid()}"
    return pathlib.Path(directory) / f"{prefix}.{suffix}"


def _ring_path(context: RunContext) -> pathlib.Path:
    return _shm_path(ShmFile.RANK_RING.format(rank=context.layout.global_rank))


def _ring(context: RunContext, table: list[Communicator], cost_ns: float | None) -> TraceRing:
    path = _ring_path(context)
    attempt = int(os.environ.get(Env.ATTEMPT, "0"))
    metadata = ring_metadata(context, table, cost_ns)
    try:
        ring: TraceRing = native.RingWriter(str(path), context.config.logging.trace_capacity, attempt, metadata)
    except native.RingError as error:
        log.warning("tracing is off on rank %d: %s", context.layout.global_rank, error)
        return NullRing()
    return ring


def _record_cost_ns(path: pathlib.Path) -> float | None:
    """Measure the cost of a record in ns, with a temporary ring next to the real one, which no agent reads."""
    on_device = torch.cuda.is_available()
    try:
        scratch: TraceRing = native.RingWriter(str(path.with_suffix(".cost")), COST_RECORDS, 0, b"{}")
    except native.RingError as error:
        log.warning("the cost of a record is not measured: %s", error)
        return None
    recorder = _recorder(scratch, FaultPlan(0, []), on_device=on_device)
    cost_ns = span_cost_ns(recorder, native.monotonic_ns, torch.cuda.synchronize if on_device else lambda: None)
    recorder.finish()
    scratch.close(True)
    return cost_ns


def _recorder(ring: TraceRing, plan: FaultPlan, *, on_device: bool) -> Recorder:
    injected = int(Flag.INJECTED)

    def on_length(kind: int, flags: int, own_ns: int) -> None:
        if not flags & injected:
            plan.observe(kind, own_ns)

    def host_recorder(ring: TraceRing) -> Recorder:
        return Recorder(ring, monotonic_ns=native.monotonic_ns, run_queue_ns=native.run_queue_ns, on_length=on_length)

    if not on_device:
        return host_recorder(ring)
    device = torch.cuda.current_device()
    try:
        recorder = native.DeviceRecorder(ring if isinstance(ring, native.RingWriter) else None, device)
    except native.RingError as error:
        log.warning("tracing is off on this rank: %s", error)
        ring.close(True)  # a ring without records would look like a rank that hangs
        return host_recorder(NullRing())
    return DeviceRecorder(
        ring,
        native=recorder,
        current_stream=lambda: torch._C._cuda_getCurrentRawStream(device),
        monotonic_ns=native.monotonic_ns,
        run_queue_ns=native.run_queue_ns,
        on_length=on_length,
    )
