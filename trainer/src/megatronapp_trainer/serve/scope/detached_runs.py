"""Runs of MegaScope: requests that outlive their HTTP request, until they end or are cancelled."""

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from megatronapp_common import frames
from megatronapp_common.scope.analysis_requests import AnalysisRequest, LensRequest
from megatronapp_common.scope.protocol import ENDED_STATES, RunState
from megatronapp_common.scope.protocol_requests import (
    CaptureSettings,
    PerturbedTexts,
    ProbeRequest,
    RunRequest,
    ScoreRequest,
)
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.inference.errors import GenerationError
from megatronapp_trainer.inference.events import FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.openai.schemas_completions import RunStatus
from megatronapp_trainer.serve.perturbation.named_recipes import perturbation_document
from megatronapp_trainer.serve.problems import http_error
from megatronapp_trainer.serve.request_broker import PromptProgress, QueueEvent, RequestBroker, RequestHandle
from megatronapp_trainer.serve.scope.schemas import ReportedSample, RunDetail
from megatronapp_trainer.serve.served_model import ServedModel, utf16_units

if TYPE_CHECKING:
    from megatronapp_trainer.scope.analysis.analysis_service import AnalysisService
    from megatronapp_trainer.serve.scope.capture_controller import CaptureController
    from megatronapp_trainer.serve.scope.comparisons import ComparisonStore
    from megatronapp_trainer.serve.scope.sweeps import SweepStore

MAX_RUNS = 64
"""Limit of listed runs: the newest ones, and all that have not ended."""
Announce = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(kw_only=True, slots=True)
class GeneratedSample:
    """Text and tokens of one prompt so far, as sent in frames TOKENS."""

    units: int
    """UTF-16 units of the text so far, the prompt included."""
    ids: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    reason: str | None = None
    withheld: str = ""
    """Text of a prompt that has ended, of tokens that were not sent."""

    @property
    def text(self) -> str:
        """Return the text of all tokens."""
        return "".join(self.texts) + self.withheld

    def add(self, event: TokenEvent) -> None:
        """Append a generated token."""
        self.ids.append(event.token)
        self.texts.append(event.text or "")

    def end(self, event: FinishedEvent) -> None:
        """Note the end of the prompt."""
        self.reason = event.reason
        if self.texts and event.reason in {"stop", "length"}:
            self.texts[-1] += event.text or ""
        else:
            self.withheld = event.text or ""

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns over all tokens."""
        ends = list(itertools.accumulate(map(utf16_units, self.texts), initial=self.units))
        pairs = zip(self.texts, itertools.pairwise(ends), strict=True)
        return {
            "ids": list(self.ids),
            "texts": list(self.texts),
            "offsets": [list(pair) if text else None for text, pair in pairs],
            "finished": [None] * (len(self.ids) - 1) + [self.reason] * bool(self.ids),
        }


@dataclasses.dataclass(kw_only=True, eq=False)
class RunRecord:
    """A run with its samples and its state."""

    run: str
    body: RunRequest
    seed: int
    ticket: RequestHandle
    started_at: str
    prompts: Sequence[Mapping[str, Any]]
    """Text, ids and offsets of each prompt, as in frames."""
    announce: Announce
    perturbation: Mapping[str, Any] | None = None
    """Digest and recipe; None: the model as it is."""
    state: RunState = "queued"
    error: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.capture: CaptureSettings = self.body.capture
        self.samples = [GeneratedSample(units=utf16_units(text)) for text in self.body.prompts]
        self._open = len(self.body.prompts)
        self._ended: RunState = "done"
        """State of the run once all prompts have ended."""
        self._first_token_at: float | None = None

    async def follow(self) -> None:
        """Collect events until all prompts have ended, and announce each change of the state."""
        while self._open:
            before = self.state
            match item := await self.ticket.get():
                case TokenEvent():
                    self._add(item)
                case FinishedEvent():
                    self._end(item)
                case QueueEvent(position=None) if self.state == "queued":
                    self.state = "prefill"
            if self.state != before or isinstance(item, QueueEvent):
                self.announce(self.header())

    def header(self) -> dict[str, Any]:
        """Return the header of a frame RUN_STATE (docs/scope-protocol.md, frame 41)."""
        return {
            "run": self.run,
            "state": self.state,
            "position": self._position(),
            "prompts": list(self.prompts),
            "sampling": self.body.sampling.model_dump(mode="json", by_alias=True) | {"seed": self.seed},
            "capture": self.capture.model_dump(mode="json", by_alias=True),
            "tokens": self.body.tokens,
            "perturbation": self.perturbation,
            "error": self.error,
            "startedAt": self.started_at,
            "tokensPerSecond": self._tokens_per_second(),
            "steps": max(len(sample.ids) for sample in self.samples),
        }

    def shown(self) -> RunStatus:
        """Return the run in the form of the API."""
        return RunStatus(**self._shown())

    def detail(self) -> RunDetail:
        """Return the run with all that a hub needs which has lost it."""
        samples = [ReportedSample(**sample.columns()) for sample in self.samples]
        return RunDetail(**self._shown(), header=self.header(), samples=samples)

    def _shown(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "position": self._position(),
            "prompts": list(self.body.prompts),
            "capture": self.capture.model_dump(mode="json", by_alias=True),
            "texts": [sample.text for sample in self.samples],
            "ids": [list(sample.ids) for sample in self.samples],
            "tokens": self.body.tokens,
            "seed": self.seed,
            "perturbation": self.perturbation,
            "error": self.error,
            "startedAt": self.started_at,
        }

    def _position(self) -> int | None:
        return self.ticket.position if self.state == "queued" else None

    def _tokens_per_second(self) -> float | None:
        """Return the rate since the first token, whose own time is unknown."""
        count = sum(len(sample.ids) for sample in self.samples) - len(self.samples)
        if self._first_token_at is None or count < 1:
            return None
        return count / max(time.monotonic() - self._first_token_at, 1e-6)

    def _sample(self, request_id: str) -> GeneratedSample:
        return self.samples[self.ticket.ids.index(request_id)]

    def _add(self, event: TokenEvent) -> None:
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self.state = "decoding"
        self._sample(event.request_id).add(event)

    def _end(self, event: FinishedEvent) -> None:
        """End the run once all of its prompts have ended: until then their tokens may still be received."""
        self._open -= 1
        self._sample(event.request_id).end(event)
        if event.error is not None:
            error = http_error(event.error)
            self._ended, self.error = "failed", {"code": error.code, "message": str(error), "hint": error.hint}
        elif event.reason == "cancelled" and self._ended != "failed":
            self._ended = "cancelled"
        if not self._open:
            self.state = self._ended


class RunStore:
    """The newest runs. Used in the event loop alone."""

    def __init__(self, broker: RequestBroker) -> None:
        self.captures: CaptureController | None = None
        """Captures of MegaScope, if there is a hub."""
        self.analyses: AnalysisService | None = None
        """Analyses of texts, if there is a hub."""
        self.comparisons: ComparisonStore | None = None
        """Comparisons of branches, if there is a hub."""
        self.sweeps: SweepStore | None = None
        """Sweeps of perturbations, if there is a hub."""
        self._broker = broker
        self._records: dict[str, RunRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def new_id() -> str:
        """Return 12 random hex digits."""
        return secrets.token_hex(6)

    def start(
        self, run: str, body: RunRequest, seed: int, model: ServedModel, requests: list[GenerationRequest]
    ) -> RunRecord:
        """Start a run.

        Raises as `RequestBroker.submit` does, and HttpError for a capture that the model cannot give.
        """
        prompts = [
            model.describe_prompt(text, request.prompt) for text, request in zip(body.prompts, requests, strict=True)
        ]
        with contextlib.nullcontext() if self.captures is None else self.captures.quiet():
            record = RunRecord(
                run=run,
                body=body,
                seed=seed,
                ticket=self._submit(self._with_capture(run, body, model, requests)),
                started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                prompts=prompts,
                announce=self._announce,
                perturbation=perturbation_document(requests[0].perturbation),
            )
            record.announce(record.header())
        self._records[run] = record
        self._forget_oldest()
        self._follow(record.follow())
        return record

    def _forget_oldest(self) -> None:
        """Drop the oldest runs that have ended: the others are limited by the prompts that may be open."""
        over = [run for run, record in self._records.items() if record.state in ENDED_STATES]
        for run in over[: max(0, len(self._records) - MAX_RUNS)]:
            del self._records[run]

    def _with_capture(
        self, run: str, body: RunRequest, model: ServedModel, requests: list[GenerationRequest]
    ) -> list[GenerationRequest]:
        if self.captures is None:
            return requests
        units = [utf16_units(text) for text in body.prompts]
        text_of = None if model.tokenizer is None else model.text_of
        return self.captures.begin(run, body.capture, requests, units, text_of)

    def cancel(self, run: str) -> None:
        """End a run. Raises HttpError for an unknown one."""
        self._broker.cancel(self.get(run).ticket)

    def change(self, run: str, capture: CaptureSettings) -> RunRecord:
        """Change the capture of a run. Raises HttpError."""
        record = self.get(run)
        if self.captures is not None and record.state not in ENDED_STATES:
            self.captures.change(run, capture)
        record.capture = capture
        self._announce(record.header())
        return record

    async def probe(self, body: ProbeRequest, model: ServedModel) -> str:
        """Read known tokens once more; returns the probe's id. Waiting prompts have precedence.

        Raises HttpError, and as `RequestBroker.submit` does.
        """
        self._needed()
        await _prepare(body.perturbation, model)
        probe, requests = self._needed().probe(body)
        requests = [dataclasses.replace(request, is_background=True) for request in requests]
        self._follow(_drain(self._submit(requests)))
        return probe

    async def scores(self, body: ScoreRequest, model: ServedModel) -> bytes:
        """Score the tokens of a text but the first; the answer is a frame SCOPE_TOKENS.

        Waiting prompts have precedence. Raises HttpError, and as `RequestBroker.submit` does.
        """
        self._needed()
        from megatronapp_trainer.scope.coordinator import perturbed_fields
        from megatronapp_trainer.scope.scores import scores_frame

        await _prepare(body.perturbation, model)
        request = GenerationRequest(
            id=f"{self.new_id()}-0",
            prompt=body.ids,
            max_new_tokens=0,
            temperature=0,
            prompt_logprobs=True,
            measures=min(body.candidates, model.vocab_size),
            is_background=True,
            **perturbed_fields(body.perturbation, 0),
        )
        events = await _readings(self._broker.submit([request]))
        text_of = None if model.tokenizer is None else model.text_of
        return await anyio.to_thread.run_sync(lambda: frames.encode(scores_frame(events, text_of)))

    async def analyze(self, body: AnalysisRequest, model: ServedModel) -> bytes:
        """Analyze a text; the answer is a frame SCOPE_ANALYSIS.

        Waiting prompts have precedence. Raises HttpError, and as `RequestBroker.submit` does.
        """
        self._needed()
        assert self.analyses is not None  # there is a hub
        from megatronapp_trainer.serve.scope.capture_controller import refused

        if isinstance(body, LensRequest):
            await _prepare(body.perturbation, model)
        analyses = self.analyses
        with refused("analysis"):
            name, request = analyses.begin(body)
        try:
            await _readings(self._broker.submit([request]))
            text_of = None if model.tokenizer is None else model.text_of
            return await anyio.to_thread.run_sync(lambda: frames.encode(analyses.frame(name, body, text_of)))
        finally:
            analyses.end(name)

    def set_basis(self, data: bytes) -> None:
        """Let ranks project on these axes. Raises HttpError."""
        self._needed().set_basis(data)

    def newest_first(self) -> list[RunRecord]:
        """Return all stored runs, newest first."""
        return list(reversed(self._records.values()))

    def get(self, run: str) -> RunRecord:
        """Return the run with this id. Raises HttpError."""
        if run not in self._records:
            raise HttpError(404, "no-such-run", f"there is no run {run}", hint=f"The newest {MAX_RUNS} are stored.")
        return self._records[run]

    def needed_comparisons(self) -> "ComparisonStore":
        """Return the comparisons. Raises HttpError without a hub."""
        self._needed()
        assert self.comparisons is not None  # there is a hub
        return self.comparisons

    def needed_sweeps(self) -> "SweepStore":
        """Return the sweeps. Raises HttpError without a hub."""
        self._needed()
        assert self.sweeps is not None  # there is a hub
        return self.sweeps

    def _needed(self) -> "CaptureController":
        if self.captures is None:
            hint = "Serve with the pages (spec.analyzer.enabled)."
            raise HttpError(409, "nothing-looks", "this server has no hub that could show it", hint=hint)
        return self.captures

    def _submit(self, requests: list[GenerationRequest]) -> RequestHandle:
        try:
            return self._broker.submit(requests)
        except GenerationError:
            if self.captures is not None:
                self.captures.forget(requests)
            raise

    def _announce(self, header: Mapping[str, Any]) -> None:
        if self.captures is not None:
            self.captures.announce(header)

    def _follow(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _prepare(perturbation: PerturbedTexts | None, model: ServedModel) -> None:
    """Compute the digest of a recipe and the tokens of its sources in a thread: of a large one it takes long.

    Raises RequestError.
    """
    if perturbation is not None:
        await anyio.to_thread.run_sync(model.perturbations.prepared, perturbation.recipe)


async def _readings(ticket: RequestHandle) -> list[PromptEvent]:
    """Collect the events of all positions of one prompt. Raises HttpError if it ended early."""
    found: list[PromptEvent] = []
    while True:
        match await ticket.get():
            case PromptProgress(readings=readings):
                found += readings
            case FinishedEvent(error=error) as ended:
                if error is not None:
                    raise http_error(error)
                if ended.reason == "cancelled":
                    raise HttpError(503, "cancelled", "the text was not read to its end", hint="Ask again.")
                return found


async def _drain(ticket: RequestHandle) -> None:
    """Discard the events of a probe, whose results the ranks send to the hub."""
    left = len(ticket.ids)
    while left:
        left -= isinstance(await ticket.get(), FinishedEvent)
