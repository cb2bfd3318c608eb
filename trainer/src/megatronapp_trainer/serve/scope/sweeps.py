"""Sweeps of rank 0: one reference, and a branch for each cell that reads its tokens. Used in the event loop alone."""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.comparison_requests import BranchState, SweepRequest
from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.protocol import build_frame
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.inference.errors import GenerationError, QueueFullError
from megatronapp_trainer.inference.events import FinishedEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.comparison.commands import BeginComparison
from megatronapp_trainer.scope.comparison.comparison_service import BranchText, ComparisonService
from megatronapp_trainer.scope.comparison.row_results import RowResult
from megatronapp_trainer.serve.problems import http_error
from megatronapp_trainer.serve.request_broker import RequestBroker, RequestHandle
from megatronapp_trainer.serve.scope.capture_controller import refused
from megatronapp_trainer.serve.scope.comparisons import COLLECT_S, MAX_STORED, error_document, now
from megatronapp_trainer.serve.scope.open_limit import OpenLimit
from megatronapp_trainer.serve.scope.schemas import ListedSweep
from megatronapp_trainer.serve.scope.sweep_cells import SweepCells, cell_value
from megatronapp_trainer.serve.served_model import ServedModel, new_seed

log = logging.getLogger(__name__)
MAX_OPEN = 2
RETRY_S = 0.5
"""Seconds between attempts to submit a cell while the queue is full."""


class CancelledSweepError(Exception):
    """The sweep was cancelled."""


@dataclasses.dataclass(kw_only=True, eq=False)
class SweepRecord:
    """A sweep and the values that are known."""

    name: str
    body: SweepRequest
    text: BranchText
    cells: SweepCells
    started_at: str
    model: ServedModel
    state: BranchState = "queued"
    error: dict[str, Any] | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens of the reference."""
    values: dict[int, float | None] = dataclasses.field(default_factory=dict)
    """Value of each cell that has been compared, by its number from 0."""
    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    """Name of the recipe of each cell that has been begun."""
    ticket: RequestHandle | None = None
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.rows: asyncio.Queue[Sequence[RowResult]] = asyncio.Queue()

    def frame(self) -> Frame:
        """Return the sweep so far as a frame SCOPE_ANALYSIS (docs/scope-protocol.md, section 6)."""
        body = self.body
        text_of = None if self.model.tokenizer is None else self.model.text_of
        header = {
            "kind": "sweep",
            "sweep": self.name,
            "state": self.state,
            "prompt": body.prompt,
            "metric": body.metric,
            "layers": list(body.axes.layers),
            "strengths": None if body.axes.strengths is None else list(body.axes.strengths),
            "positions": None if body.axes.positions is None else list(body.axes.positions),
            "done": len(self.values),
            "cells": len(self.cells),
            "error": self.error,
            "startedAt": self.started_at,
            "template": body.template.model_dump(mode="json", by_alias=True, exclude_unset=True),
            "seed": self.text.seed,
            "token": self._token(),
            "ids": self.ids,
            "texts": None if text_of is None else list(map(text_of, self.ids)),
            "values": self.cells.matrix(self.values),
            "digests": self.cells.matrix(self.digests),
        }
        return build_frame(FrameType.SCOPE_ANALYSIS, header)

    def _token(self) -> int | None:
        if self.body.metric != "logprobChange":
            return None
        return self.body.token if self.body.token is not None else next(iter(self.ids), None)


class SweepStore:
    """The newest sweeps of a server."""

    def __init__(self, service: ComparisonService, broker: RequestBroker) -> None:
        self._service = service
        self._broker = broker
        self._records: dict[str, SweepRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = OpenLimit(MAX_OPEN, "sweeps")

    async def start(self, body: SweepRequest, model: ServedModel) -> str:
        """Begin a sweep; return its name. Raises HttpError."""
        model.check_tokens(body.tokens, "tokens")
        if body.token is not None and body.token >= model.vocab_size:
            reason = f"token: there is no token {body.token}; the vocabulary has {model.vocab_size}"
            raise HttpError(422, "invalid-request", reason, param="token")
        with self._limit.reserved(len(self._tasks)):
            record, reference = await anyio.to_thread.run_sync(self._prepare, body, model)
            self._records[record.name] = record
            over = [name for name, known in self._records.items() if known.state not in {"queued", "running"}]
            for name in over[: max(0, len(self._records) - MAX_STORED)]:
                del self._records[name]
            task = asyncio.create_task(self._run(record, reference))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return record.name

    def _prepare(self, body: SweepRequest, model: ServedModel) -> tuple[SweepRecord, GenerationRequest]:
        """Tokenize and check, in a thread; return the record and the request of A. Raises HttpError, RequestError."""
        baseline = model.perturbations.choose(body.baseline)
        ids = model.ids_of(body.prompt)
        with refused("baseline"):
            self._service.check(baseline, len(ids))
        with refused("template"):
            cells = SweepCells(body)
            for number in cells.edges:
                self._service.check(cells.recipe(number), len(ids))
        text = BranchText(
            name=secrets.token_hex(6),
            ids=ids,
            tokens=body.tokens,
            sampling=body.sampling,
            seed=new_seed(body.sampling.seed),
            is_background=True,
        )
        record = SweepRecord(name=text.name, body=body, text=text, cells=cells, started_at=now(), model=model)
        return record, text.request(0, baseline, is_pair=False)

    def listed(self) -> list[ListedSweep]:
        """Return name and state of each, newest first."""
        return [ListedSweep(sweep=known.name, state=known.state) for known in reversed(self._records.values())]

    async def frame(self, name: str) -> bytes:
        """Return a sweep so far as an encoded frame SCOPE_ANALYSIS. Raises HttpError."""
        record = self._get(name)
        return await anyio.to_thread.run_sync(lambda: frames.encode(record.frame()))

    def cancel(self, name: str) -> None:
        """End a sweep after the step that is computed; the values that are known stay. Raises HttpError."""
        record = self._get(name)
        record.is_cancelled = True
        if record.ticket is not None:
            self._broker.cancel(record.ticket)

    def _get(self, name: str) -> SweepRecord:
        if name not in self._records:
            hint = f"The newest {MAX_STORED} are stored."
            raise HttpError(404, "no-such-sweep", f"there is no sweep {name}", hint=hint)
        return self._records[name]

    async def _run(self, record: SweepRecord, reference: GenerationRequest) -> None:
        loop = asyncio.get_running_loop()

        def sink(_number: int, rows: Sequence[RowResult]) -> None:
            loop.call_soon_threadsafe(record.rows.put_nowait, rows)

        settings = BeginComparison(name=record.name, lasting=True, watched=record.body.token)
        self._service.begin(settings, sink)
        ended: BranchState = "failed"
        try:
            record.ids = await self._generate(record, reference)
            for number in range(len(record.cells)):
                await self._compare(record, number, await anyio.to_thread.run_sync(_recipe_of, record, number))
            ended = "done"
        except CancelledSweepError:
            ended = "cancelled"
        except GenerationError as error:
            record.error = error_document(http_error(error))
        except HttpError as error:
            record.error = error_document(error)
        except TimeoutError:
            problem = HttpError(503, "engine-lost", "the ranks sent no rows", hint="See the server's log.")
            record.error = error_document(problem)
        except Exception:  # clients would take a failure without an error for a result
            log.exception("sweep %s failed", record.name)
            problem = HttpError(500, "sweep-failed", "a cell could not be computed", hint="See the server's log.")
            record.error = error_document(problem)
        finally:
            self._service.end(record.name)
            record.ticket = None
            record.state = ended

    async def _compare(self, record: SweepRecord, number: int, recipe: Recipe) -> None:
        """Let one cell read the tokens of the reference, and store its value."""
        chosen = await self._generate(record, record.text.forced_request(number + 1, recipe, record.ids))
        self._service.collect(record.name, number + 1)
        async with asyncio.timeout(COLLECT_S):
            rows = [row for row in await record.rows.get() if row.branch == number + 1]
        record.values[number] = cell_value(record.body.metric, rows, record.ids, chosen)

    async def _generate(self, record: SweepRecord, request: GenerationRequest) -> list[int]:
        """Return the tokens that a branch chooses. Raises CancelledSweepError, HttpError."""
        record.ticket = ticket = await self._submit(record, request)
        chosen: list[int] = []
        while True:
            match await ticket.get():
                case TokenEvent(token=token):
                    record.state = "running"
                    chosen.append(token)
                case FinishedEvent(error=error, reason=reason):
                    if error is not None:
                        raise http_error(error)
                    if reason == "cancelled":
                        raise CancelledSweepError
                    return chosen

    async def _submit(self, record: SweepRecord, request: GenerationRequest) -> RequestHandle:
        """Submit a request as soon as the queue takes it: requests of users go first."""
        while not record.is_cancelled:
            try:
                return self._broker.submit([request])
            except QueueFullError:
                await asyncio.sleep(RETRY_S)
            except GenerationError as error:
                raise http_error(error) from error
        raise CancelledSweepError


def _recipe_of(record: SweepRecord, number: int) -> Recipe:
    """Return the recipe of a cell, prepared for its submission, and store its digest; in a thread, as it takes long.

    Raises RecipeError, RequestError.
    """
    recipe = record.cells.recipe(number)
    record.model.perturbations.prepared(recipe)
    record.digests[number] = recipe.digest
    return recipe
