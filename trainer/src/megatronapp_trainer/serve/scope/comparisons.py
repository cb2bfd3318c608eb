"""Comparisons of rank 0: two requests that generate together, and their record. Used in the event loop alone."""

import asyncio
import datetime
import secrets
from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from megatronapp_common import frames
from megatronapp_common.scope.comparison_requests import MAX_HEAD_NUMBERS, ComparisonRequest
from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.inference.errors import GenerationError
from megatronapp_trainer.inference.events import FinishedEvent, TokenEvent
from megatronapp_trainer.scope.comparison.commands import BeginComparison
from megatronapp_trainer.scope.comparison.comparison_service import BranchText, ComparisonService
from megatronapp_trainer.scope.comparison.row_results import RowResult
from megatronapp_trainer.serve.perturbation.named_recipes import perturbation_document
from megatronapp_trainer.serve.problems import http_error
from megatronapp_trainer.serve.request_broker import QueueEvent, RequestBroker, RequestHandle
from megatronapp_trainer.serve.scope.branch_record import ComparisonRecord
from megatronapp_trainer.serve.scope.capture_controller import refused
from megatronapp_trainer.serve.scope.open_limit import OpenLimit
from megatronapp_trainer.serve.scope.schemas import ListedComparison
from megatronapp_trainer.serve.served_model import ServedModel, new_seed

MAX_OPEN = 4
"""Comparisons and sweeps that are open at a time."""
MAX_STORED = 16
COLLECT_EVERY = 8
"""Compared tokens after which the ranks send their rows."""
LAST = 1
"""Number of the last `CollectRows` of a comparison."""
COLLECT_S = 60.0
"""Seconds that the last rows may take after both branches have ended."""


class OpenComparison:
    """A comparison with its requests."""

    def __init__(self, record: ComparisonRecord, ticket: RequestHandle) -> None:
        self.record = record
        self.ticket = ticket
        self.collected = asyncio.Event()
        """Set once the last rows are in the record."""


class ComparisonStore:
    """The newest comparisons of a server."""

    def __init__(self, service: ComparisonService, broker: RequestBroker) -> None:
        self._service = service
        self._broker = broker
        self._found: dict[str, OpenComparison] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = OpenLimit(MAX_OPEN, "comparisons")

    async def start(self, body: ComparisonRequest, model: ServedModel) -> str:
        """Begin a comparison; return its name.

        Raises HttpError, and as `RequestBroker.submit` does.
        """
        model.check_tokens(body.tokens, "tokens")
        self._check_size(body)
        with self._limit.reserved(len(self._tasks)):
            text, recipes, record = await anyio.to_thread.run_sync(self._prepare, body, model)
            self._start(body, text, recipes, record)
        return text.name

    def _prepare(
        self, body: ComparisonRequest, model: ServedModel
    ) -> tuple[BranchText, list[Recipe | None], ComparisonRecord]:
        """Tokenize and check, in a thread: of large recipes it takes seconds. Raises HttpError, RequestError."""
        recipes = [model.perturbations.choose(chosen) for chosen in (body.baseline, body.perturbation)]
        ids = model.ids_of(body.prompt)
        for field, recipe in zip(("baseline", "perturbation"), recipes, strict=True):
            with refused(field):
                self._service.check(recipe, len(ids))
        text = BranchText(
            name=secrets.token_hex(6),
            ids=ids,
            tokens=body.tokens,
            sampling=body.sampling,
            seed=new_seed(body.sampling.seed),
            top=min(body.top, model.vocab_size),
        )
        record = ComparisonRecord(
            text.name,
            body,
            seed=text.seed,
            prompt_tokens=len(text.ids),
            recipes=list(map(perturbation_document, recipes)),
            started_at=now(),
            text_of=None if model.tokenizer is None else model.text_of,
        )
        return text, recipes, record

    def _start(
        self, body: ComparisonRequest, text: BranchText, recipes: Sequence[Recipe | None], record: ComparisonRecord
    ) -> None:
        requests = [
            text.request(number, recipe, is_forced=number > 0 and body.mode == "teacher-forced")
            for number, recipe in enumerate(recipes)
        ]
        loop = asyncio.get_running_loop()

        def sink(number: int, rows: Sequence[RowResult]) -> None:
            record.add_rows(rows)
            if number == LAST:
                loop.call_soon_threadsafe(found.collected.set)

        self._service.begin(BeginComparison(name=text.name, drift=True, heads=body.heads), sink)
        try:
            found = OpenComparison(record, self._broker.submit(requests))
        except GenerationError:
            self._service.end(text.name)
            raise
        self._found[text.name] = found
        over = [name for name, known in self._found.items() if known.record.state not in {"queued", "running"}]
        for name in over[: max(0, len(self._found) - MAX_STORED)]:
            del self._found[name]
        task = asyncio.create_task(self._follow(found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def listed(self) -> list[ListedComparison]:
        """Return name and state of each, newest first."""
        found = ((known.record.name, known.record.state) for known in reversed(self._found.values()))
        return [ListedComparison(comparison=name, state=state) for name, state in found]

    async def frame(self, name: str) -> bytes:
        """Return a comparison so far as an encoded frame SCOPE_ANALYSIS. Raises HttpError."""
        record = self._get(name).record
        return await anyio.to_thread.run_sync(lambda: frames.encode(record.frame()))

    def cancel(self, name: str) -> None:
        """End both branches of a comparison. Raises HttpError for an unknown one."""
        self._broker.cancel(self._get(name).ticket)

    def _get(self, name: str) -> OpenComparison:
        if name not in self._found:
            hint = f"The newest {MAX_STORED} are stored."
            raise HttpError(404, "no-such-comparison", f"there is no comparison {name}", hint=hint)
        return self._found[name]

    def _check_size(self, body: ComparisonRequest) -> None:
        shard = self._service.shard
        most = MAX_HEAD_NUMBERS // (shard.num_layers * shard.num_heads)
        if body.heads and body.tokens > most:
            raise HttpError(
                422,
                "invalid-request",
                f"tokens: {body.tokens} tokens of {shard.num_layers} layers of {shard.num_heads} heads are too many",
                hint=f"Take at most {most} tokens, or heads: false.",
                param="tokens",
            )

    async def _follow(self, found: OpenComparison) -> None:
        """Collect events until both branches have ended, then the last rows."""
        record, ended = found.record, "done"
        left = len(found.ticket.ids)
        while left:
            match await found.ticket.get():
                case TokenEvent() as event:
                    record.state = "running"
                    branch = found.ticket.ids.index(event.request_id)
                    if record.add_token(branch, event) % COLLECT_EVERY == 0 and branch:
                        self._service.collect(record.name, 0)
                case QueueEvent(position=None) if record.state == "queued":
                    record.state = "running"
                case FinishedEvent(error=error, reason=reason):
                    left -= 1
                    if error is not None:
                        record.error, ended = error_document(http_error(error)), "failed"
                    elif reason == "cancelled" and ended == "done":
                        ended = "cancelled"
        if ended != "failed":
            self._service.collect(record.name, LAST)
            try:
                await asyncio.wait_for(found.collected.wait(), COLLECT_S)
            except TimeoutError:
                problem = HttpError(503, "engine-lost", "the ranks sent no rows", hint="See the server's log.")
                record.error, ended = error_document(problem), "failed"
        self._service.end(record.name)
        record.state = ended  # type: ignore[assignment] # one of three states


def error_document(error: HttpError) -> dict[str, Any]:
    """Return an error as states have it."""
    return {"code": error.code, "message": str(error), "hint": error.hint}


def now() -> str:
    """Return the time as states have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
