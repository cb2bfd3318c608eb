"""Observer of a rank's loop: writes spans to the ring, applies faults of the manifest and the control document."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from megatronapp_common.shared_documents import DocumentReader
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, PASS_KINDS, TIMED_KINDS, Flag, Metric, PassFlag, RecordKind
from megatronapp_trainer.hooks.step_observer import StepMetrics
from megatronapp_trainer.hooks.transfer_observer import PassKey
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.transport import Transport
from megatronapp_trainer.scan.commands import CommandReader
from megatronapp_trainer.scan.faults import FaultPlan, commanded_faults
from megatronapp_trainer.scan.garbage import GarbageListener
from megatronapp_trainer.scan.metadata import GROUP_OF_KIND, Communicator
from megatronapp_trainer.scan.nccl_transfers import NcclTransfers
from megatronapp_trainer.scan.peers import PeerCounters
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark
from megatronapp_trainer.scan.task_transfers import TaskTransfers
from megatronapp_trainer.scan.traced_transport import TracedTransport
from megatronapp_trainer.scan.windows.plan import commanded_windows
from megatronapp_trainer.scan.windows.recorder import WindowRecorder
from megatronapp_trainer.scan.windows.tensor_collectives import TensorCollectives

HOST_KINDS = frozenset({RecordKind.DATA, RecordKind.EVALUATE, RecordKind.CHECKPOINT, RecordKind.PAUSE, RecordKind.GC})
"""Kinds of work that run on the host also where there is a device."""


class SpanWriter:
    """Begins and ends spans of one rank; spans of different kinds may enclose each other."""

    def __init__(self, recorder: Recorder, table: list[Communicator]) -> None:
        self.recorder = recorder
        slots = {communicator.kind: communicator.slot for communicator in table if communicator.kind != "p2p"}
        self._slots = {kind: slots[group] for kind, group in GROUP_OF_KIND.items() if group in slots}
        self._ordinals: Counter[RecordKind] = Counter()
        self._open: dict[RecordKind, tuple[RecordKey, TimeMark]] = {}

    def begin_step(self, step: int) -> None:
        """Restart the ordinals, which count from 0 in every step."""
        self.recorder.begin_step(step)
        self._ordinals.clear()

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, flags: int = 0) -> None:
        """Begin a span of this kind."""
        ordinal = 0
        if kind not in TIMED_KINDS:  # the recorder writes another number there
            ordinal = self._ordinals[kind]
            self._ordinals[kind] = ordinal + 1
        fields = RecordKey(kind, microbatch, chunk, self._slots.get(kind, NO_COMM), ordinal, flags)
        enter = self.recorder.host_enter if kind in HOST_KINDS else self.recorder.enter
        self._open[kind] = fields, enter(fields)

    def mark_of(self, kind: RecordKind) -> TimeMark:
        """Return when the open span of this kind began."""
        return self._open[kind][1]

    def end(self, kind: RecordKind, flags: int = 0) -> None:
        """End the span of this kind."""
        fields, mark = self._open.pop(kind)
        if flags:
            fields = fields._replace(flags=fields.flags | flags)
        if kind in HOST_KINDS:
            self.recorder.host_leave(fields, mark)
        else:
            self.recorder.leave(fields, mark)


class StopMeter(Protocol):
    """Methods used of `megatronapp_native.StopMeter`."""

    def take(self) -> Sequence[tuple[int, int]]:
        """Return begin and end, in ns, of the times since the last call in which this process was stopped."""

    def close(self) -> None:
        """End the measurement of stops."""


class ScanObserver:
    """The `StepObserver` of the tracer."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        table: list[Communicator],
        plan: FaultPlan,
        control: DocumentReader,
        stall: Callable[[int], None],
        host_stall: Callable[[int], None],
        layout: Layout,
        stops: StopMeter,
        garbage: GarbageListener,
        windows: WindowRecorder,
        nccl: NcclTransfers | None = None,
    ) -> None:
        self._recorder = recorder
        self._layout = layout
        self._is_reporter = layout.is_reporter
        self._spans = SpanWriter(recorder, table)
        pairs = {(c.members[0], c.members[1]): c.slot for c in table if c.kind == "p2p"}
        self._peers = PeerCounters(layout.global_rank, pairs)
        self.transfers = TaskTransfers(layout.global_rank, pairs, recorder=recorder, withheld_ns=self._withhold_ns)
        self._plan = plan
        self._control = control
        self._stall = stall
        self._host_stall = host_stall
        self._stops = stops
        self._garbage = garbage
        self._nccl = nccl
        self._windows = windows
        self._commands = CommandReader(
            control,
            (
                lambda page: plan.command(commanded_faults(page)),
                lambda page: windows.plan.command(commanded_windows(page)),
            ),
        )

    @property
    def collectives(self) -> TensorCollectives | None:
        """Return what records collectives over the tensor group; None on a rank without tensor parallelism."""
        return self._windows.collectives

    def observes_parts(self, *, anywhere: bool) -> bool:
        """Return True if a window covers the step on this rank's tensor group, or with `anywhere` on some group."""
        return self._windows.is_covered(anywhere=anywhere)

    def announcement(self) -> Sequence[float]:
        """Return what this rank knows of windows in the next step."""
        return self._windows.announcement()

    def agreed(self, sums: Sequence[float]) -> None:
        """Take what all ranks know of windows in the next step."""
        self._windows.agreed(sums)

    def wrap_transport(self, transport: Transport) -> Transport:
        """Wrap the transport in one that records its transfers."""
        return TracedTransport(transport, recorder=self._recorder, peers=self._peers, withhold=self._withhold)

    def step_begin(self, step: int) -> None:
        """Begin a loop iteration: apply commands and faults."""
        self._commands.read()
        self._garbage.attach()
        self._record_collections()
        self._plan.begin_step(step)
        self._windows.step_begin(step)
        self._peers.begin_step()
        self.transfers.begin_step()
        self._spans.begin_step(step)
        if self._nccl is not None:
            self._nccl.begin_step(step, self._recorder.host_mark().time_ns)
        self._spans.begin(RecordKind.STEP, 0, NO_MICROBATCH)

    def step_end(self, metrics: StepMetrics | None) -> None:
        """A loop iteration has ended. The reporting rank alone writes its samples; a forward rank has none."""
        if metrics is not None and self._is_reporter:
            for metric, value in _samples(metrics):
                self._recorder.metric(metric, value)
        self._record_collections()
        self._spans.end(RecordKind.STEP, Flag.SKIPPED_UPDATE if metrics is not None and metrics.skipped else 0)
        self._record_stops()
        self._recorder.ring.clock_pair()

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        """Begin a span; a host fault stalls before a forward pass."""
        if kind not in PASS_KINDS:
            if kind is RecordKind.GC:
                self._garbage.is_paused = True  # the loop collects, within this span
            self._spans.begin(kind, chunk, microbatch)
            return
        if kind is RecordKind.FORWARD and self._plan.is_active and (stall_ns := self._plan.host_stall_ns()):
            self._inject(self._host_stall, stall_ns)
        self.transfers.take(PassKey(kind, chunk, microbatch))
        self._spans.begin(kind, chunk, microbatch, PassFlag.EARLY if early else 0)
        self._windows.pass_begin(kind, chunk, microbatch)

    def end(self, kind: RecordKind) -> None:
        """End a span; a compute fault stretches it first."""
        flags = 0
        if kind in PASS_KINDS:
            self._windows.pass_end()
            if self._plan.is_active:
                flags = self._stretch(kind)
        elif kind is RecordKind.GC:
            self._garbage.is_paused = False
        self._spans.end(kind, flags)

    def work(self, microbatch: int, *, tokens: int, pairs: int) -> None:
        """Write the work of a microbatch, once for each replica."""
        if self._layout.is_first_stage and self._layout.tensor_rank == 0:
            self._recorder.work(microbatch, tokens=tokens, pairs=pairs)

    def validation(self, loss: float) -> None:
        """Write a sample of the validation loss."""
        if self._is_reporter:
            self._recorder.metric(Metric.VALIDATION_LOSS, loss)

    def heartbeat(self) -> None:
        """Store in the ring that this rank lives."""
        self._recorder.ring.heartbeat()

    def close(self) -> None:
        """Write pending spans and mark the ring as closed."""
        self._record_stops()
        self._stops.close()
        self._record_collections()
        self._garbage.close()
        if self._nccl is not None:
            self._nccl.finish()
        self._recorder.finish()
        self._windows.close()
        self._recorder.ring.close(False)
        self._control.close()

    def _record_stops(self) -> None:
        """Record the times in which this process was stopped, under the step in which they became known."""
        for start_ns, end_ns in self._stops.take():
            self._recorder.interval(RecordKey(RecordKind.STOPPED), start_ns, end_ns - start_ns)

    def _record_collections(self) -> None:
        """Record the garbage collections since the last call; those between two steps count for the one before."""
        for start_ns, end_ns in self._garbage.take():
            self._recorder.interval(RecordKey(RecordKind.GC), start_ns, end_ns - start_ns)

    def _stretch(self, kind: RecordKind) -> int:
        own_ns = self._recorder.own_ns(self._spans.mark_of(kind)) or self._plan.usual_ns(kind)
        stall_ns = self._plan.compute_stall_ns(own_ns)
        if not stall_ns:
            return 0
        self._inject(self._stall, stall_ns)
        return Flag.INJECTED

    def _withhold_ns(self, source: int) -> int:
        """Return for how long a fault withholds a message of a rank."""
        return self._plan.withhold_ns(source) if self._plan.is_active else 0

    def _withhold(self, source: int) -> bool:
        stall_ns = self._withhold_ns(source)
        if stall_ns:
            self._inject(self._stall, stall_ns)
        return bool(stall_ns)

    def _inject(self, stall: Callable[[int], None], stall_ns: int) -> None:
        start_ns = self._recorder.host_mark().time_ns
        stall(stall_ns)
        self._recorder.interval(RecordKey(RecordKind.FAULT, flags=Flag.INJECTED), start_ns, stall_ns)


def _samples(metrics: StepMetrics) -> list[tuple[Metric, float]]:
    samples = [
        (Metric.LOSS, metrics.loss),
        (Metric.LEARNING_RATE, metrics.learning_rate),
        (Metric.TOKENS_PER_SECOND, metrics.tokens_per_second),
        (Metric.TFLOPS_PER_GPU, metrics.tflops_per_gpu),
        (Metric.CONSUMED_SAMPLES, float(metrics.consumed_samples)),
    ]
    if metrics.grad_norm is not None:
        samples.append((Metric.GRAD_NORM, metrics.grad_norm))
    return samples
