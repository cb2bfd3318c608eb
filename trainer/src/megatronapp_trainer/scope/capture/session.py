"""The rank's side of MegaScope: hears at step borders what to look at, looks, and hands frames to the publisher.

    session = CaptureSession(gang.stage, attempt=0, sink=publisher.post)
    session.attach(gang)

Rank 0 says what is wanted through the engine's commands (`leader.py`), so that every rank begins at the same step.
"""

import functools
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.device.place import sent_to
from megatronapp_trainer.hooks.hook_collector import HookCollector, SiteValues
from megatronapp_trainer.hooks.sites import Site, known_sites
from megatronapp_trainer.inference.forward_observer import StepContext
from megatronapp_trainer.inference.model.cuda_graphs import GraphCache
from megatronapp_trainer.inference.model_runner import ModelRunner
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.scope.capture import probe
from megatronapp_trainer.scope.capture.attention_recompute import bucket
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions, capture_spec_of
from megatronapp_trainer.scope.capture.captured_step import (
    CapturedStep,
    CapturePlan,
    DecodeValues,
    ReductionGraphFamily,
    ReductionResult,
    StepReads,
)
from megatronapp_trainer.scope.capture.commands import (
    TOPIC,
    BeginProbe,
    BeginRun,
    CaptureCommand,
    ChangeRun,
    EndRun,
    SetBasis,
)
from megatronapp_trainer.scope.capture.rank_shard import RankShard, pins_of, rank_shard_of
from megatronapp_trainer.scope.capture.reductions import (
    MOST_RECIPES,
    QUERIES,
    PcaBasis,
    PromptChunk,
    Reductions,
    active_sites,
    capture_specs_of,
    picture_name,
)
from megatronapp_trainer.scope.tracked_requests import (
    ModelSizes,
    TrackedRequest,
    TrackedRow,
    run_of,
    tracked_probe,
    tracked_run,
)
from megatronapp_trainer.scope.transfer.deferred_work import DeferredWork
from megatronapp_trainer.scope.transfer.device_copy import DeviceToHostCopier, NamedTensor, PackedBuffer, pack
from megatronapp_trainer.scope.transfer.part_frames import FrameSpec, StepFrames
from megatronapp_trainer.scope.transfer.publisher import ReadyFrames, Sink


class StepCapture:
    """One rank's watcher. Used in the thread of the engine alone."""

    def __init__(self, stage: ModelRunner, *, attempt: int, sink: Sink) -> None:
        layout = stage.layout
        self.share: RankShard = rank_shard_of(
            stage.model, layout, vocab_size=stage.vocab_size, max_length=stage.options.capacity
        )
        self._stage = stage
        self._rank = layout.rank
        self._attempt = attempt
        self._sink = sink
        self._seen = HookCollector(stage.model)
        self._looker = Reductions(self._seen, self.share, stage.cache.keys_LZTGD)
        self._prober = probe.ProbeReader(self._seen, self.share, self._looker)
        self._device = stage.cache.keys_LZTGD.device
        self._post = DeviceToHostCopier(self._device)
        self._tracked: dict[str, TrackedRequest] = {}
        self._ids: tuple[str, ...] = ()
        self._touched: list[TrackedRequest] = []
        self._step: CapturedStep | None = None
        self._graphs = GraphCache(enabled=self._device.type == "cuda" and stage.options.cuda_graphs)
        self._view: CapturePlan | None = None
        self._behind = DeferredWork()
        self._is_quiet = False
        """The last step was not looked at, and what was left before it is behind the next one."""
        self._check = functools.lru_cache(MOST_RECIPES)(self._tried)
        self._sizes = ModelSizes(layers=self.share.num_layers, heads=self.share.num_heads)

    def attach(self, gang: WorkerGroup) -> None:
        """Hear the commands of rank 0, and watch the stage from now on."""
        self._looker.warm_up()
        if self.waits_for_device:
            self._behind.set_scheduler(gang.lull.defer)
        gang.handle(TOPIC, self.handle)
        self._stage.watcher = self

    def detach(self) -> None:
        """Look no more: the model is as it was."""
        self._behind.flush()
        self._stage.watcher = None
        self._tracked.clear()
        self._seen.remove()
        self._post.wait()
        self._stage.forget_graphs()
        self._graphs.clear()

    def hello(self) -> Frame:
        """PUBLISHER of this rank."""
        share = self.share
        header: dict[str, Any] = {
            "rank": self._rank,
            "attempt": self._attempt,
            "coordinates": {"tp": share.tp, "pp": share.pp, "dp": 0},
            "layers": list(share.layers),
            "heads": list(share.heads),
            "keyHeads": list(share.key_heads),
            "mlp": list(share.mlp),
            "sites": known_sites(),
        }
        if self._rank == 0:
            header["model"] = share.model()
            header["layout"] = {"tensor": share.tensor_size, "pipeline": share.pipeline_size}
        return Frame(FrameType.SCOPE_PUBLISHER, header)

    @property
    def waits_for_device(self) -> bool:
        """The thread of the engine does in each step; on a CPU it computes itself."""
        return self._device.type == "cuda"

    def check(self, capture: CaptureSettings) -> None:
        """Raise what a run with this capture would raise: PlanError or ExpressionError. From any thread."""
        if (recipe := capture_spec_of(capture)) is not None:
            self._check(recipe)

    def _tried(self, recipe: CaptureSpec) -> None:
        PixelReductions(recipe, self.share, torch.device("cpu"))

    def handle(self, said: CaptureCommand) -> None:
        """A command of rank 0, at a step border."""
        self._ids = ()
        self._behind.flush()
        match said:
            case BeginRun():
                self.begin_run(said.run, said.capture, said.lengths)
            case ChangeRun():
                self.change(said.run, said.capture)
            case EndRun():
                self.end_run(said.run)
            case BeginProbe():
                found = tracked_probe(said.probe, said.sites, said.lengths, said.queries, said.stride)
                self._tracked[said.probe] = found
            case SetBasis():
                self._set_basis(said)

    def begin_run(self, run: str, capture: CaptureSettings, lengths: Sequence[int]) -> None:
        """Look at the samples `run-0`, .. with prompts of these lengths, from the next step on."""
        self._ids = ()
        self._tracked[run] = tracked_run(run, capture, lengths, self._sizes)

    def change(self, run: str, capture: CaptureSettings) -> None:
        """Look at something else from the next step on; unknown runs are fine."""
        if (tracked := self._tracked.get(run)) is not None:
            tracked.capture, tracked.recipe = capture, capture_spec_of(capture)

    def end_run(self, run: str) -> None:
        """Look no more; unknown runs are fine."""
        self._ids = ()
        self._behind.flush()
        self._tracked.pop(run, None)
        self._looker.drop(run)
        if not self._tracked:
            self._seen.remove()

    def _set_basis(self, said: SetBasis) -> None:
        first, end = self.share.layers
        own = [place for place, layer in enumerate(said.layers) if first <= layer < end]
        layers = tuple(said.layers[place] for place in own)
        self._looker.basis = PcaBasis(
            version=said.version,
            layers=layers,
            places=torch.tensor([layer - first for layer in layers], dtype=torch.int64, device=self._device),
            mean_L1H=torch.from_numpy(said.mean[own].copy())[:, None].to(self._device),
            axes_LHC=torch.from_numpy(said.axes[own].copy()).transpose(1, 2).contiguous().to(self._device),
        )
        self._post.wait()
        self._graphs.clear()

    def forget(self, looked: Hashable) -> None:
        """What was held by graphs of the stage is gone, and so are the reductions of it."""
        self._graphs.drop(lambda family: isinstance(family, ReductionGraphFamily) and family.active_sites == looked)

    # The calls of a stage, in the order of a step.

    def begin(self, sight: StepContext) -> Hashable:
        """What of this step is looked at; None: nothing."""
        plan = sight.plan
        if not self._tracked and self._is_quiet:
            return None
        self._behind.before_step(decode=plan.decode)
        if plan.decode and self._tracked:
            self._post.before_decode()
        else:
            self._post.before_prompts()
        touched = self._touched_by(plan) if self._tracked else []
        looked = [one for one in touched if one.is_probe or one.recipe is not None]
        if not looked:
            self._read(touched, plan)
            self._seen.begin({}, {})  # hooks that stay would take rows of an earlier step
            self._is_quiet = not self._tracked
            return None
        self._is_quiet = False
        if plan.decode:
            return self._begin_decode(sight, touched, looked)
        self._begin_prefill(sight, self._read(touched, plan))
        return "prompts"

    def _touched_by(self, plan: StepPlan) -> list[TrackedRequest]:
        """Whose tokens a plan reads: mostly of the same as the last one."""
        ids = tuple([segment.request_id for segment in plan.segments])
        if ids != self._ids:
            owners = {run_of(one)[0] for one in ids}
            self._ids, self._touched = ids, [one for name, one in self._tracked.items() if name in owners]
        return self._touched

    def _read(self, touched: Sequence[TrackedRequest], plan: StepPlan) -> StepReads:
        """Note what a plan reads; of runs that look at nothing the hub hears at once that this rank has none of it."""
        pairs = [(one, one.reads(plan)) for one in touched]
        for one, reads in pairs:
            one.advance(reads)
        self._announce_absent([(one, reads) for one, reads in pairs if not one.is_probe and one.recipe is None], plan)
        return [(one, reads) for one, reads in pairs if one.is_probe or one.recipe is not None]

    def collect(self) -> "dict[str, SiteValues] | DecodeValues":
        """Hold what reductions will read."""
        step = self._step
        assert step is not None
        kept = self._seen.take()
        if step.context.plan.decode:
            return DecodeValues(values=kept, positions_N=step.context.positions_N.clone())
        return kept

    def finish(self, found: "dict[str, SiteValues] | DecodeValues", _logits: torch.Tensor | None) -> None:
        """Leave behind what is done beside the model's own work: reduce, let the numbers travel, and the publisher
        send them. Tokens are chosen first."""
        step, self._step = self._step, None
        assert step is not None
        done = self._post.now()
        if isinstance(found, DecodeValues):
            self._behind.submit(lambda: self._finish_decode(step, found, done), of_prompts=False)
        else:
            told = self._describe_frames(step)
            self._behind.submit(lambda: self._finish_prompts(step, found, told, done), of_prompts=True)

    @torch.no_grad()
    def _finish_decode(self, step: CapturedStep, held: DecodeValues, done: "torch.cuda.Event | None") -> None:
        """What a decode step needs of reductions is a second CUDA graph."""
        arrival = self._post.send_step(lambda: self._reduced(step, held), (held, step.view), done)
        self._sink(StepFrames(arrival, self._describe_frames(step)))

    @torch.no_grad()
    def _finish_prompts(
        self,
        step: CapturedStep,
        kept: dict[str, SiteValues],
        told: Sequence[FrameSpec],
        done: "torch.cuda.Event | None",
    ) -> None:
        held = (kept, step, [self._looker.pixels_of(one) for one in step.recipes])
        arrival = self._post.send_prompts(lambda: self._reduce_prompts(step, kept), held, done)
        self._sink(StepFrames(arrival, told))

    def _reduce_prompts(self, step: CapturedStep, kept: dict[str, SiteValues]) -> PackedBuffer:
        self._seen.put(kept)
        parcel = pack(self._looker.prefill(step.works, step.context, step.count) + self._probed(step))
        self._seen.take()
        return parcel

    def _reduced(self, step: CapturedStep, held: DecodeValues) -> PackedBuffer:
        assert step.view is not None
        family = ReductionGraphFamily(active_sites=step.view.active_sites, recipes=step.view.recipes)
        key = (id(held), step.pin_places, step.attended)
        return self._graphs.run(family, key, lambda: self._reduce(step, held)).buffer

    def _reduce(self, step: CapturedStep, held: DecodeValues) -> "ReductionResult":
        self._seen.put(held.values)
        parcel = pack(self._looker.decode(held.positions_N, step.recipes, step.pin_places, step.attended))
        self._seen.take()
        return ReductionResult(
            buffer=parcel, decode_values=held, pixels=[self._looker.pixels_of(one) for one in step.recipes]
        )

    def _begin_decode(
        self, sight: StepContext, touched: Sequence[TrackedRequest], tracked: Sequence[TrackedRequest]
    ) -> Hashable:
        """Only what must be known before the step: the device waits meanwhile."""
        if self._view is None or not self._view.matches(tracked):
            self._view = self._viewed(tracked)
        view = self._view
        self._seen.set_sites(view.sites)
        self._seen.begin(view.picks, {})
        attended = bucket(max(segment.end for segment in sight.plan.segments), self._looker.most_keys)
        places = self._looker.set_pins(view.pins, view.most_pins, self._post.on_copy_stream)
        self._step = CapturedStep(
            context=sight,
            touched=touched,
            recipes=view.recipes,
            view=view,
            pin_places=places,
            attended=attended,
        )
        return view.active_sites

    def _viewed(self, tracked: Sequence[TrackedRequest]) -> "CapturePlan":
        recipes = tuple(dict.fromkeys(one.recipe for one in tracked if one.recipe is not None))
        (pins, most), sites = self._pins(tracked), self._sites(tracked)
        wanted = [{(pin.layer, pin.head) for pin in one.capture.pinned} if one.capture else set() for one in tracked]
        return CapturePlan(
            tracked=tuple(tracked),
            captures=tuple(one.capture for one in tracked),
            specs=tuple(one.recipe for one in tracked),
            recipes=recipes,
            pixels=[self._looker.pixels_of(one) for one in recipes],
            active_sites=frozenset().union(*map(active_sites, recipes)),
            sites=sites,
            picks=dict.fromkeys(sites),
            pins=pins,
            most_pins=most,
            groups=[recipes.index(one.recipe) if one.recipe is not None else 0 for one in tracked],
            pinned=[[(place, *pin) for place, pin in enumerate(pins) if pin in mine] for mine in wanted],
        )

    def _begin_prefill(self, sight: StepContext, looked: StepReads) -> None:
        tracked, rows = [one for one, _ in looked], [one.rows(reads, decode=False) for one, reads in looked]
        tokens = torch.tensor([row.token for part in rows for row in part], dtype=torch.int64)
        tokens_U = sent_to(self._device, tokens)
        works, place = [], 0
        for (one, reads), part in zip(looked, rows, strict=True):
            span = slice(place, place + len(part))
            works.append(PromptChunk(tracked=one, reads=reads, reported_rows=part, rows=span, tokens_U=tokens_U))
            place += len(part)
        self._seen.set_sites(self._sites(tracked))
        # Where all tokens are told, what the modules gave is kept as it is.
        are_all = [row.token for part in rows for row in part] == list(range(sight.rows))
        picks: dict[str, torch.Tensor | None] = dict.fromkeys(self._seen.names, None if are_all else tokens_U)
        picks[QUERIES.name] = None
        logit_tokens, logit_rows = _logit_rows(sight, rows)
        picks[probe.LOGITS] = sent_to(self._device, torch.tensor(logit_tokens, dtype=torch.int64))
        self._seen.begin(picks, probe.layers_of(works))
        self._step = CapturedStep(
            context=sight,
            recipes=capture_specs_of(works),
            works=works,
            count=place,
            logit_rows=logit_rows,
        )

    def _probed(self, step: CapturedStep) -> list[NamedTensor]:
        found: list[NamedTensor] = []
        for place, work in enumerate(step.works):
            if work.tracked.is_probe:
                group = len(step.recipes) + place
                found += self._prober.read(work, group, work.rows, step.logit_rows[place])
        return found

    def _sites(self, tracked: Sequence[TrackedRequest]) -> dict[str, Site]:
        found: dict[str, Site] = {}
        for one in tracked:
            found |= probe.sites_of(one.sites) if one.recipe is None else self._looker.sites(one.recipe)
        return found

    def _pins(self, tracked: Sequence[TrackedRequest]) -> tuple[list[tuple[int, int]], int]:
        looked = (one.capture for one in tracked if one.recipe is not None and one.recipe.attention)
        wanted = {(pin.layer, pin.head) for capture in looked if capture is not None for pin in capture.pinned}
        return pins_of(wanted, layers=self.share.layers, heads=self.share.heads)

    def _describe_frames(self, step: CapturedStep) -> list[FrameSpec]:
        """The frames of a step, in the order in which the hub should have them."""
        out: list[FrameSpec] = []
        if step.view is not None:
            for place, (one, reads) in enumerate(self._read(step.touched, step.context.plan)):
                out += self._describe_decode(step.view, place, one, one.rows(reads, decode=True))
        for place, work in enumerate(step.works):
            if work.tracked.is_probe:
                out.append(self._describe_probe(step, place, work))
            else:
                out += self._describe_prompts(step, work)
        return out

    def _describe_probe(self, step: CapturedStep, place: int, work: PromptChunk) -> FrameSpec:
        one, rows = work.tracked, work.reported_rows
        header = self._header(more=not one.all_read) | {"probe": one.name}
        group = len(step.recipes) + place
        return FrameSpec(group=group, header=header, rows=rows, select=range(len(rows)), is_probe=True)

    def _describe_decode(
        self, view: CapturePlan, place: int, one: TrackedRequest, rows: Sequence[TrackedRow]
    ) -> list[FrameSpec]:
        out, group, pinned = [], view.groups[place], view.pinned[place]
        for number in sorted({one.step_of(row) for row in rows}):
            part = [row for row in rows if one.step_of(row) == number]
            header = self._header(more=one.more(number, rows)) | {"run": one.name, "step": number}
            select = [row.token for row in part]
            out.append(FrameSpec(group=group, header=header, rows=part, select=select, pinned=pinned))
        return out

    def _describe_prompts(self, step: CapturedStep, work: PromptChunk) -> list[FrameSpec]:
        one, rows = work.tracked, work.reported_rows
        assert one.recipe is not None
        group = step.recipes.index(one.recipe)
        ended = [read for read in work.reads if read.ends and one.recipe.attention]
        header = self._header(more=True) | {"run": one.name, "step": 0}
        out = []
        for read in ended:
            row = TrackedRow(token=0, sample=read.sample, position=0)
            out.append(FrameSpec(group=group, header=header, rows=[row], atlas=picture_name(one, read)))
        if rows or one.all_read:
            select = range(work.rows.start, work.rows.stop)
            last = header | {"more": not one.all_read}
            out.append(FrameSpec(group=group, header=last, rows=rows, select=select))
        return out

    def _announce_absent(self, touched: StepReads, plan: StepPlan) -> None:
        """Of runs that look at nothing the hub hears that this rank has none of it."""
        frames = []
        for one, reads in touched:
            rows = one.rows(reads, decode=plan.decode)
            for number in sorted({one.step_of(row) for row in rows}):
                header = self._header(more=one.more(number, rows)) | {"run": one.name, "step": number, "rows": []}
                frames.append(Frame(FrameType.SCOPE_PART, header | {"tensors": []}))
        if frames:
            self._sink(ReadyFrames(frames))

    def _header(self, *, more: bool) -> dict[str, Any]:
        return {"rank": self._rank, "timeUs": time.time_ns() // 1000, "more": more}


def _logit_rows(sight: StepContext, rows: Sequence[Sequence[TrackedRow]]) -> tuple[list[int], list[slice]]:
    """Which of the plan's outputs are those of told rows, and where each run's are among them."""
    outputs = {output.row: place for place, output in enumerate(sight.plan.outputs)}
    chosen: list[int] = []
    slices = []
    for part in rows:
        found = [outputs[row.token] for row in part if row.token in outputs]
        slices.append(slice(len(chosen), len(chosen) + len(found)))
        chosen += found
    return chosen, slices
