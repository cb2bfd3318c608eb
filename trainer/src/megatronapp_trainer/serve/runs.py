"""Runs of MegaScope: requests that outlive their HTTP request, until they end or are cancelled."""

import asyncio
import dataclasses
import datetime
import secrets
from typing import Literal

from megatronapp_common.scope.protocol_requests import Capture, RunRequest
from megatronapp_trainer.generate.events import FinishedEvent, TokenEvent
from megatronapp_trainer.generate.request import GenerationRequest
from megatronapp_trainer.serve.desk import Desk, QueueEvent, Ticket
from megatronapp_trainer.serve.problems import ApiError, api_error
from megatronapp_trainer.serve.schemas import Run

KEPT = 64
"""Newest runs that are told about."""
State = Literal["queued", "decoding", "done", "cancelled", "failed"]
ENDED = frozenset({"done", "cancelled", "failed"})


@dataclasses.dataclass(kw_only=True, eq=False)
class Record:
    """A run and what has come of it."""

    run: str
    body: RunRequest
    seed: int
    ticket: Ticket
    started_at: str
    state: State = "queued"
    error: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.capture: Capture = self.body.capture
        self.texts = [""] * len(self.body.prompts)
        self.ids: list[list[int]] = [[] for _ in self.body.prompts]
        self._open = len(self.body.prompts)

    async def follow(self) -> None:
        """Take over what comes until all prompts have ended."""
        while self._open:
            match await self.ticket.get():
                case TokenEvent() as event:
                    self._add(event)
                case FinishedEvent() as event:
                    self._end(event)
                case QueueEvent(position=None) if self.state == "queued":
                    self.state = "decoding"

    def shown(self) -> Run:
        """The run as the API tells it."""
        return Run(
            run=self.run,
            state=self.state,
            position=self.ticket.position if self.state == "queued" else None,
            prompts=list(self.body.prompts),
            capture=self.capture.model_dump(mode="json", by_alias=True),
            texts=self.texts,
            ids=self.ids,
            tokens=self.body.tokens,
            seed=self.seed,
            error=self.error,
            startedAt=self.started_at,
        )

    def _sample(self, request_id: str) -> int:
        return self.ticket.ids.index(request_id)

    def _add(self, event: TokenEvent) -> None:
        if self.state == "queued":
            self.state = "decoding"
        sample = self._sample(event.request_id)
        self.ids[sample].append(event.token)
        self.texts[sample] += event.text or ""

    def _end(self, event: FinishedEvent) -> None:
        self._open -= 1
        self.texts[self._sample(event.request_id)] += event.text or ""
        if event.error is not None:
            told = api_error(event.error)
            self.state, self.error = "failed", {"code": told.code, "message": str(told), "hint": told.hint}
        elif event.reason == "cancelled" and self.state != "failed":
            self.state = "cancelled"
        elif not self._open and self.state not in ENDED:
            self.state = "done"


class Runs:
    """The newest runs. Used in the event loop alone."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def new_id() -> str:
        """12 hex digits."""
        return secrets.token_hex(6)

    def start(self, run: str, body: RunRequest, seed: int, desk: Desk, requests: list[GenerationRequest]) -> Record:
        """Take a run. Raises as `Desk.submit` does."""
        ticket = desk.submit(requests)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = Record(run=run, body=body, seed=seed, ticket=ticket, started_at=now)
        self._records[run] = record
        while len(self._records) > KEPT:
            del self._records[next(iter(self._records))]
        task = asyncio.create_task(record.follow())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return record

    def newest_first(self) -> list[Record]:
        """All that are kept."""
        return list(reversed(self._records.values()))

    def get(self, run: str) -> Record:
        """The run of this id. Raises ApiError."""
        if run not in self._records:
            raise ApiError(404, "no-such-run", f"there is no run {run}", hint=f"The newest {KEPT} are kept.")
        return self._records[run]
