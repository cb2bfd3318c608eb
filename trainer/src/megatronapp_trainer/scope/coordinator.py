"""Rank 0's side of MegaScope: turns runs and probes into requests of the engine, and its events into TOKENS frames."""

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack
from megatronapp_common.scope.protocol_requests import CaptureSettings, PerturbedTexts, ProbeRequest
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.sites import ATTENTION, site_of
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.inference.model.token_statistics import TokenStatistics
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.capture.capture_spec import check_capture
from megatronapp_trainer.scope.capture.commands import TOPIC, BeginProbe, BeginRun, ChangeRun, EndRun, SetBasis
from megatronapp_trainer.scope.capture.probe import LOGITS
from megatronapp_trainer.scope.capture.step_capture import StepCapture
from megatronapp_trainer.scope.capture.tracked_requests import request_id, run_of
from megatronapp_trainer.scope.transfer.publisher import DropPolicy, FrameJob, ReadyFrames, Sink

UNIT_TEMPERATURE = 5
"""Place of temperature 1 among those of `partition`."""
TextOf = Callable[[int], str]
"""Text of a single token; U+FFFD if it is no whole character."""
_TOKEN_BYTES = 256
"""Approximate size of a row of TOKENS without its candidates."""


@dataclasses.dataclass(kw_only=True)
class _CoordinatedRun:
    """State of a run or probe on rank 0."""

    capture: CaptureSettings | None
    lengths: Sequence[int]
    open: set[int]
    ends: list[int]
    """UTF-16 units of each sample's text so far."""
    text_of: TextOf | None = None
    tokens: dict[int, dict[int, TokenEvent]] = dataclasses.field(default_factory=dict)
    """Tokens that have not been sent yet, by step and sample."""
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    """Why samples have ended."""

    def due(self) -> list[int]:
        """Return the complete steps: every open sample has its token."""
        return [step for step, arrived in sorted(self.tokens.items()) if self.open <= set(arrived)]

    def end(self, sample: int, event: FinishedEvent) -> None:
        """End a sample; text that was held back until now is added to its last token."""
        self.reasons[sample] = event.reason
        self.open.discard(sample)
        steps = [step for step, arrived in self.tokens.items() if sample in arrived]
        if event.text and steps and event.reason in {"stop", "length"}:
            last = self.tokens[max(steps)]
            last[sample] = dataclasses.replace(last[sample], text=(last[sample].text or "") + event.text)

    def offset(self, sample: int, text: str) -> list[int] | None:
        """Return the range of the next text in its sample; None for a token that ends no character."""
        if not text:
            return None
        start = self.ends[sample]
        self.ends[sample] += len(text.encode("utf-16-le")) // 2
        return [start, self.ends[sample]]


class CaptureCoordinator:
    """Used by the thread of HTTP (runs and probes) and that of the engine (`observe`)."""

    def __init__(self, engine: Engine, capture: StepCapture, sink: Sink) -> None:
        self._engine = engine
        self._capture = capture
        self._sink = sink
        self._runs: dict[str, _CoordinatedRun] = {}
        self._lock = threading.Lock()

    def begin_run(
        self,
        run: str,
        capture: CaptureSettings,
        requests: Sequence[GenerationRequest],
        *,
        ends: Sequence[int] = (),
        text_of: TextOf | None = None,
    ) -> list[GenerationRequest]:
        """Capture a run on all ranks. Returns its requests, which the caller submits to the engine afterwards.

        Args:
            run: its id.
            capture: what is captured.
            requests: one for each prompt.
            ends: UTF-16 units of each prompt's text, for offsets; none: 0.
            text_of: of candidates; called in the thread that sends. None: they have no texts.

        Raises:
            CaptureError: a pinned head that the model does not have.
            ReductionPlanError: pixels that do not fit the model.
            FilterError: a filter that cannot be computed on it.
        """
        self._check(capture)
        lengths = tuple(len(request.prompt) for request in requests)
        starts = list(ends) or [0] * len(lengths)
        with self._lock:
            samples = set(range(len(lengths)))
            self._runs[run] = _CoordinatedRun(
                capture=capture, lengths=lengths, open=samples, ends=starts, text_of=text_of
            )
        self._engine.command(TOPIC, BeginRun(run=run, capture=capture, lengths=lengths))
        wants = capture.states.probabilities
        vocabulary = self._capture.shard.vocabulary
        return [
            dataclasses.replace(
                request,
                id=request_id(run, sample),
                group=run,
                measures=min(capture.candidates, vocabulary) if wants else 0,
            )
            for sample, request in enumerate(requests)
        ]

    def change(self, run: str, capture: CaptureSettings) -> None:
        """Change the capture of a run from the next step on; the number of candidates stays. Raises as `begin_run`."""
        self._check(capture)
        self._engine.command(TOPIC, ChangeRun(run=run, capture=capture))

    def probe(self, body: ProbeRequest) -> tuple[str, list[GenerationRequest]]:
        """A probe's id, and the requests that bring it: they go to the engine as any others and generate nothing.

        Raises CaptureError for a site, layer or head that there is not.
        """
        self._check_probe(body)
        probe, lengths = secrets.token_hex(6), tuple(map(len, body.ids))
        known = _CoordinatedRun(capture=None, lengths=lengths, open=set(range(len(lengths))), ends=[0] * len(lengths))
        with self._lock:
            self._runs[probe] = known
        command = BeginProbe(probe=probe, lengths=lengths, sites=body.sites, queries=body.queries, stride=body.stride)
        self._engine.command(TOPIC, command)
        all_logits = any(site.site == LOGITS for site in body.sites)
        return probe, [
            GenerationRequest(
                id=request_id(probe, text),
                prompt=ids,
                max_new_tokens=0,
                prompt_logprobs=all_logits,
                temperature=0,
                **perturbed_fields(body.perturbation, text),
            )
            for text, ids in enumerate(body.ids)
        ]

    def set_basis(self, frame: Frame) -> None:
        """A frame SCOPE_BASIS: parts carry `pca` from the next step on. Raises CaptureError, FrameError."""
        tensors = {tensor.name: tensor.data for tensor in unpack(frame)}
        layers, version = frame.header.get("layers"), frame.header.get("version")
        if not isinstance(layers, list) or not isinstance(version, int) or not {"mean", "basis"} <= set(tensors):
            raise CaptureError("a basis has version, layers, and tensors mean and basis")
        mean, axes, hidden = tensors["mean"], tensors["basis"], self._capture.shard.hidden
        fits = mean.shape == (len(layers), hidden) and axes.ndim == 3 and axes.shape[::2] == (len(layers), hidden)
        if not fits or mean.dtype != np.float32 or axes.dtype != np.float32:
            raise CaptureError(f"a basis of shape {axes.shape} does not fit {len(layers)} layers of {hidden} numbers")
        command = SetBasis(version=version, layers=tuple(layers), mean=np.array(mean), axes=np.array(axes))
        self._engine.command(TOPIC, command)

    def run_state(self, header: Mapping[str, Any]) -> None:
        """Send a frame RUN_STATE with this header."""
        self._sink(ReadyFrames([Frame(FrameType.SCOPE_RUN_STATE, header)]))

    def observe(self, events: Sequence[Event]) -> None:
        """Send the tokens of a step of the engine, and end the runs whose samples have all ended.

        A step is sent when every open sample has its token.
        """
        with self._lock:
            step_tokens = self._taken(events)
            over = [run for run, tracked in self._runs.items() if not tracked.open]
            for run in over:
                del self._runs[run]
        if step_tokens:
            self._sink(_TokenFrames(step_tokens))
        for run in over:
            self._engine.command(TOPIC, EndRun(run=run))

    def _taken(self, events: Sequence[Event]) -> "list[_StepTokens]":
        for event in events:
            run, sample = run_of(event.request_id)
            if (known := self._runs.get(run)) is None:
                continue
            if isinstance(event, TokenEvent):
                known.tokens.setdefault(event.index, {})[sample] = event
            elif isinstance(event, FinishedEvent):
                known.end(sample, event)
        return [_collect_tokens(run, step, known) for run, known in self._runs.items() for step in known.due()]

    def _check(self, capture: CaptureSettings) -> None:
        shard = self._capture.shard
        for place, pin in enumerate(capture.pinned):
            if pin.layer >= shard.num_layers or pin.head >= shard.num_heads:
                raise CaptureError(
                    f"pinned.{place}: there is no layer {pin.layer}, head {pin.head}; the model has {shard.num_layers} "
                    f"layers of {shard.num_heads} heads"
                )
        check_capture(capture, shard)

    def _check_probe(self, body: ProbeRequest) -> None:
        shard = self._capture.shard
        if not body.ids or not all(body.ids):
            raise CaptureError("ids: there is nothing to read; give one list of tokens or more, none of them empty")
        for place, probe_site in enumerate(body.sites):
            site = None if probe_site.site == ATTENTION else site_of(probe_site.site)
            heads = shard.num_key_heads if site is not None and site.axis.value == "keyHeads" else shard.num_heads
            beyond_layers = any(layer >= shard.num_layers for layer in probe_site.layers)
            if beyond_layers or any(head >= heads for head in probe_site.heads or ()):
                raise CaptureError(
                    f"sites.{place}: {probe_site.site} has {shard.num_layers} layers and {heads} heads, from 0 on"
                )


def perturbed_fields(perturbation: PerturbedTexts | None, text: int) -> dict[str, Any]:
    """Return the fields of a GenerationRequest that reads a text with the perturbation of its run."""
    if perturbation is None:
        return {}
    return {
        "perturbation": perturbation.recipe,
        "sample": perturbation.samples[text],
        "prompt_length": perturbation.prompt_lengths[text],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StepTokens:
    """The tokens of one step."""

    header: Mapping[str, Any]
    events: Sequence[TokenEvent]
    """Empty: the distributions are not sent."""
    text_of: TextOf | None

    def frame(self) -> Frame:
        """Build the frame TOKENS."""
        if not self.events:
            return build_frame(FrameType.SCOPE_TOKENS, self.header)
        header = dict(self.header)
        if self.text_of is not None:
            header["topTexts"] = [list(self._texts(event, self.text_of)) for event in self.events]
        return build_frame(FrameType.SCOPE_TOKENS, header, _distributions(self.events))

    @staticmethod
    def _texts(event: TokenEvent, text_of: TextOf) -> Iterator[str]:
        assert event.measures is not None
        return (text_of(int(token)) for token in event.measures.get().tokens.tolist())


def _collect_tokens(run: str, step: int, known: _CoordinatedRun) -> _StepTokens:
    """The tokens of the run's next step."""
    arrived = sorted(known.tokens.pop(step).items())
    texts = [event.text or "" for _, event in arrived]
    header = {
        "run": run,
        "step": step,
        "rows": [[sample, known.lengths[sample] - 1 + step] for sample, _ in arrived],
        "ids": [event.token for _, event in arrived],
        "texts": texts,
        "offsets": [known.offset(sample, text) for (sample, _), text in zip(arrived, texts, strict=True)],
        "finished": [known.reasons.get(sample) for sample, _ in arrived],
    }
    wants = known.capture is not None and known.capture.states.probabilities
    return _StepTokens(header=header, events=[event for _, event in arrived] if wants else (), text_of=known.text_of)


class _TokenFrames:
    """TOKENS frames, made in the thread that sends."""

    def __init__(self, steps: Sequence[_StepTokens]) -> None:
        self._steps = steps

    @property
    def kind(self) -> DropPolicy:
        """Policy of small frames."""
        return DropPolicy.NEWS

    @property
    def nbytes(self) -> int:
        """About what they will take."""
        events = [event.measures for step in self._steps for event in step.events]
        rows = sum(len(step.header["ids"]) for step in self._steps)
        return _TOKEN_BYTES * rows + sum(16 * measures.count for measures in events if measures is not None)

    def split(self) -> Sequence[FrameJob]:
        """Return this job: all of it is dropped alike."""
        return [self]

    def ready(self) -> bool:
        """Return true once the distributions are on the host."""
        events = (event.measures for step in self._steps for event in step.events)
        return all(measures is None or measures.ready() for measures in events)

    def build(self) -> list[Frame]:
        """Build one frame for each step."""
        return [step.frame() for step in self._steps]

    def marks(self) -> Sequence[Frame]:
        """Return nothing: a hub that misses tokens requests them from rank 0."""
        return ()


def _distributions(events: Sequence[TokenEvent]) -> list[Tensor]:
    """Build tensors of the distributions that tokens were chosen from."""
    measures = [event.measures.get() for event in events if event.measures is not None]
    assert len(measures) == len(events)
    return distributions(measures, [event.logprob for event in events])


def distributions(measures: Sequence[TokenStatistics], logprobs: Sequence[float]) -> list[Tensor]:
    """Tensors of rows with these measures, whose tokens had these log-probabilities."""
    partition, logs, ids = (
        np.stack([getattr(measure, name) for measure in measures]) for name in ("partition", "logprobs", "tokens")
    )
    totals = partition[:, UNIT_TEMPERATURE]
    return [
        Tensor("top.id", "u32", ids.astype("<u4")),
        Tensor("top.p", "f16", np.exp(logs).astype("<f2")),
        Tensor("top.logit", "f32", (logs + totals[:, None]).astype("<f4")),
        Tensor("partition", "f32", partition.astype("<f4")),
        Tensor("surprise", "f32", -np.array(logprobs, "<f4")),
        Tensor("entropy", "f32", np.array([measure.entropy for measure in measures], "<f4")),
    ]
