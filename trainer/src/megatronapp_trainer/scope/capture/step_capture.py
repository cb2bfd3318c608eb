"""Capture of one rank: observes forward passes and gives frames to the publisher.

    capture = StepCapture(group.runner, attempt=0, sink=publisher.post)
    capture.attach(group)

Rank 0 requests what is captured through commands of the engine (`coordinator`), so that every rank begins at the same
step. In a forward pass nothing waits for the device: reductions, copies and frames follow in idle time.
"""

import functools
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet

import torch

from megatronapp_common.frames import Frame
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.device.place import sent_to
from megatronapp_trainer.hooks.forward_observer import DISCARD, ForwardResult, StepContext
from megatronapp_trainer.hooks.hook_collector import HookCollector, SiteValues
from megatronapp_trainer.scope.capture import probe
from megatronapp_trainer.scope.capture.attention_recompute import bucket
from megatronapp_trainer.scope.capture.capture_plan import CapturePlan, capture_plan_of, sites_of
from megatronapp_trainer.scope.capture.captured_step import (
    CapturedStep,
    DecodeValues,
    ReductionGraphFamily,
    ReductionResult,
    StepReads,
)
from megatronapp_trainer.scope.capture.command_handler import CommandHandler
from megatronapp_trainer.scope.capture.commands import TOPIC
from megatronapp_trainer.scope.capture.frame_describer import FrameDescriber
from megatronapp_trainer.scope.capture.observed_runner import ObservedGroup, ObservedRunner
from megatronapp_trainer.scope.capture.rank_shard import rank_shard_of
from megatronapp_trainer.scope.capture.reductions import QUERIES, PromptChunk, Reductions, capture_specs_of
from megatronapp_trainer.scope.capture.tracked_requests import RequestTracker, TrackedRequest
from megatronapp_trainer.scope.transfer.deferred_work import DeferredWork
from megatronapp_trainer.scope.transfer.device_copy import DeviceToHostCopier, NamedTensor, PackedBuffer, pack
from megatronapp_trainer.scope.transfer.part_frames import FrameSpec, StepFrames, TrackedRow
from megatronapp_trainer.scope.transfer.publisher import ReadyFrames, Sink


class StepCapture:
    """The forward observer of one rank. Used in the engine's thread only."""

    def __init__(self, runner: ObservedRunner, *, attempt: int, sink: Sink) -> None:
        layout = runner.layout
        self.shard = rank_shard_of(runner.model, layout, vocab_size=runner.vocab_size, max_length=runner.capacity)
        self._runner = runner
        self._attempt = attempt
        self._sink = sink
        self._device = runner.keys_LZTGD.device
        self._collector = HookCollector(runner.model)
        self._reductions = Reductions(self._collector, self.shard, runner.keys_LZTGD)
        self._prober = probe.ProbeReader(self._collector, self.shard, self._reductions)
        self._copier = DeviceToHostCopier(self._device)
        self._graphs = GraphCache(enabled=runner.uses_graphs)
        self._deferred = DeferredWork()
        self._frames = FrameDescriber(layout.global_rank)
        self._tracker = RequestTracker()
        self.commands = CommandHandler(
            self.shard,
            tracker=self._tracker,
            collector=self._collector,
            reductions=self._reductions,
            copier=self._copier,
            deferred=self._deferred,
            graphs=self._graphs,
        )
        self._step: CapturedStep | None = None
        self._plan: CapturePlan | None = None
        self._discarded = set[str]()
        """Requests that ended before the last step, if it was planned ahead."""
        self._is_quiet = False
        """The last step was not captured, and the next one waits for all that was left before it."""

    def attach(self, group: ObservedGroup) -> None:
        """Observe the runner and take commands of rank 0 from now on."""
        self._reductions.warm_up()
        if self.waits_for_device:
            self._deferred.set_scheduler(group.idle_window.defer)
        group.handle(TOPIC, self.commands.handle)
        group.handle(DISCARD, self.discard)
        self._runner.observer = self

    def detach(self) -> None:
        """Stop observing and remove all hooks."""
        self._deferred.flush()
        self._runner.observer = None
        self._tracker.clear()
        self._collector.remove()
        self._copier.wait()
        self._runner.forget_graphs()
        self._graphs.clear()

    def hello(self) -> Frame:
        """Build the PUBLISHER frame of this rank."""
        return self._frames.publisher(self.shard, self._attempt)

    @property
    def waits_for_device(self) -> bool:
        """True if the engine's thread waits for the device in each step; on a CPU it computes itself."""
        return self._device.type == "cuda"

    def step_begin(self, step: StepContext, /) -> Hashable:
        """Begin a step; return the key of what is captured of it, None if nothing is."""
        self._discarded = set()
        if self._tracker.is_empty and self._is_quiet:
            return None
        self._deferred.before_step(decode=step.decode)
        if step.decode and not self._tracker.is_empty:
            self._copier.before_decode(is_last_sent=self._deferred.is_empty)
        else:
            self._copier.before_prompts()
        touched = self._tracker.touched_by(step.segments)
        captured = [request for request in touched if request.is_captured]
        if not captured:
            read = functools.partial(self._read, touched, step, self._discarded)
            if step.is_ahead and touched:
                self._deferred.submit(read, of_prompts=False, is_ahead=True)
            else:
                read()
            self._collector.begin({}, {})  # hooks that stay would take rows of an earlier step
            self._is_quiet = self._tracker.is_empty
            return None
        self._is_quiet = False
        if step.decode:
            return self._begin_decode(step, touched, captured)
        self._begin_prefill(step, self._read(touched, step))
        return "prompts"

    def collect(self) -> dict[str, SiteValues] | DecodeValues:
        """Hold what reductions will read."""
        assert self._step is not None
        values = self._collector.take()
        if self._step.context.decode:
            return DecodeValues(values=values, positions_N=self._step.context.positions_N.clone())
        return values

    def step_end(self, result: ForwardResult, /) -> None:
        """Defer what is done in parallel with the model's own work: reduce, copy, and give frames to the publisher."""
        step, self._step = self._step, None
        assert step is not None
        launched = self._copier.now()
        if step.plan is not None:
            plan = step.plan
            self._deferred.submit(
                lambda: self._finish_decode(step, plan, result.collected, launched),
                of_prompts=False,
                is_ahead=step.context.is_ahead,
            )
        else:
            specs = self._frames.prompt_frames(step)
            self._deferred.submit(
                lambda: self._finish_prompts(step, result.collected, specs, launched), of_prompts=True
            )

    def discard(self, request_ids: Sequence[str]) -> None:
        """Report no row of these requests of the last step, which was planned ahead and which they ended before."""
        self._discarded.update(request_ids)

    def settle(self) -> None:
        """Launch the reductions of earlier steps that wait for an idle window."""
        self._deferred.flush()

    def forget(self, key: Hashable) -> None:
        """Drop the reductions that read what graphs of the runner with this key held."""
        self._graphs.drop(lambda family: isinstance(family, ReductionGraphFamily) and family.active_sites == key)

    def _read(
        self, touched: Sequence[TrackedRequest], step: StepContext, discarded: AbstractSet[str] = frozenset()
    ) -> StepReads:
        """Advance these requests; return what the step reads of captured ones, and report the others as absent."""
        segments = [segment for segment in step.segments if segment.request_id not in discarded]
        pairs = [(request, request.reads(segments)) for request in touched]
        for request, reads in pairs:
            request.advance(reads)
        uncaptured = [(request, reads) for request, reads in pairs if not request.is_captured]
        if frames := self._frames.absent_frames(uncaptured, decode=step.decode):
            self._sink(ReadyFrames(frames))
        return [(request, reads) for request, reads in pairs if request.is_captured]

    def _begin_decode(
        self, step: StepContext, touched: Sequence[TrackedRequest], captured: Sequence[TrackedRequest]
    ) -> Hashable:
        # Only what must be known before the step: the device waits meanwhile.
        if self._plan is None or not self._plan.matches(captured):
            self._plan = capture_plan_of(captured, self._reductions, self.shard)
        plan = self._plan
        self._collector.set_sites(plan.sites)
        self._collector.begin(plan.picks, {})
        attended = bucket(max(segment.end for segment in step.segments), self._reductions.most_keys)
        places = self._reductions.set_pins(plan.pins, plan.most_pins, self._copier.on_copy_stream)
        self._step = CapturedStep(
            context=step,
            touched=touched,
            recipes=plan.recipes,
            plan=plan,
            pin_places=places,
            attended=attended,
            discarded=self._discarded,
        )
        return plan.active_sites

    def _begin_prefill(self, step: StepContext, captured: StepReads) -> None:
        rows = [request.rows(reads, decode=False) for request, reads in captured]
        tokens = [row.token for part in rows for row in part]
        tokens_U = sent_to(self._device, torch.tensor(tokens, dtype=torch.int64))
        works, place = [], 0
        for (request, reads), part in zip(captured, rows, strict=True):
            span = slice(place, place + len(part))
            works.append(PromptChunk(tracked=request, reads=reads, reported_rows=part, rows=span, tokens_U=tokens_U))
            place += len(part)
        self._collector.set_sites(sites_of([request for request, _ in captured], self._reductions))
        # If all tokens are reported, what the modules gave is kept without a copy of some rows.
        are_all = tokens == list(range(step.rows))
        picks: dict[str, torch.Tensor | None] = dict.fromkeys(self._collector.names, None if are_all else tokens_U)
        picks[QUERIES.name] = None
        logit_tokens, logit_rows = _logit_rows(step, rows)
        picks[probe.LOGITS] = sent_to(self._device, torch.tensor(logit_tokens, dtype=torch.int64))
        self._collector.begin(picks, probe.layers_of(works))
        self._step = CapturedStep(
            context=step,
            recipes=capture_specs_of(works),
            works=works,
            count=place,
            logit_rows=logit_rows,
        )

    @torch.no_grad()
    def _finish_decode(
        self, step: CapturedStep, plan: CapturePlan, values: DecodeValues, launched: "torch.cuda.Event | None"
    ) -> None:
        reads = self._read(step.touched, step.context, step.discarded)
        if not any(segments for _, segments in reads):
            return
        copy = self._copier.send_step(lambda: self._replay_reductions(step, plan, values), (values, plan), launched)
        self._sink(StepFrames(copy, self._frames.decode_frames(plan, reads)))

    @torch.no_grad()
    def _finish_prompts(
        self,
        step: CapturedStep,
        values: dict[str, SiteValues],
        specs: Sequence[FrameSpec],
        launched: "torch.cuda.Event | None",
    ) -> None:
        inputs = (values, step, [self._reductions.pixels_of(recipe) for recipe in step.recipes])
        copy = self._copier.send_prompts(lambda: self._reduce_prompts(step, values), inputs, launched)
        self._sink(StepFrames(copy, specs))

    def _reduce_prompts(self, step: CapturedStep, values: dict[str, SiteValues]) -> PackedBuffer:
        self._collector.put(values)
        buffer = pack(self._reductions.prefill(step.works, step.context, step.count) + self._probed(step))
        self._collector.take()
        return buffer

    def _probed(self, step: CapturedStep) -> list[NamedTensor]:
        tensors: list[NamedTensor] = []
        for place, chunk in enumerate(step.works):
            if chunk.tracked.is_probe:
                group = len(step.recipes) + place
                tensors += self._prober.read(chunk, group, chunk.rows, step.logit_rows[place])
        return tensors

    def _replay_reductions(self, step: CapturedStep, plan: CapturePlan, values: DecodeValues) -> PackedBuffer:
        """Run the reductions of a decode step as a second CUDA graph, after that of the forward pass."""
        family = ReductionGraphFamily(active_sites=plan.active_sites, recipes=plan.recipes)
        key = (id(values), step.pin_places, step.attended)
        return self._graphs.run(family, key, lambda: self._reduce(step, values)).buffer

    def _reduce(self, step: CapturedStep, values: DecodeValues) -> ReductionResult:
        self._collector.put(values.values)
        buffer = pack(self._reductions.decode(values.positions_N, step.recipes, step.pin_places, step.attended))
        self._collector.take()
        pixels = [self._reductions.pixels_of(recipe) for recipe in step.recipes]
        return ReductionResult(buffer=buffer, decode_values=values, pixels=pixels)


def _logit_rows(step: StepContext, rows: Sequence[Sequence[TrackedRow]]) -> tuple[list[int], list[slice]]:
    """Return which output rows are reported, and the places of each run among them."""
    outputs = {row: place for place, row in enumerate(step.output_rows)}
    chosen: list[int] = []
    slices = []
    for part in rows:
        places = [outputs[row.token] for row in part if row.token in outputs]
        slices.append(slice(len(chosen), len(chosen) + len(places)))
        chosen += places
    return chosen, slices
