"""Runs of MegaScope: requests that outlive their HTTP request, until they end or are cancelled."""

import asyncio
import dataclasses
import datetime
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatronapp_common.scope.protocol_requests import Capture, Probe, RunRequest
from megatronapp_trainer.generate.errors import GenerationError
from megatronapp_trainer.generate.events import FinishedEvent, TokenEvent
from megatronapp_trainer.generate.request import GenerationRequest
from megatronapp_trainer.serve.desk import Desk, QueueEvent, Ticket
from megatronapp_trainer.serve.model import ServedModel, utf16_units
from megatronapp_trainer.serve.problems import ApiError, api_error
from megatronapp_trainer.serve.schemas import Run

if TYPE_CHECKING:
    from megatronapp_trainer.serve.looking import Looking

KEPT = 64
"""Newest runs that are told about."""
State = Literal["queued", "prefill", "decoding", "done", "cancelled", "failed"]
ENDED = frozenset({"done", "cancelled", "failed"})
Tell = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(kw_only=True, eq=False)
class Record:
    """A run and what has come of it."""

    run: str
    body: RunRequest
    seed: int
    ticket: Ticket
    started_at: str
    prompts: Sequence[Mapping[str, Any]]
    """As frames tell them: text, ids, offsets."""
    tell: Tell
    state: State = "queued"
    error: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.capture: Capture = self.body.capture
        self.texts = [""] * len(self.body.prompts)
        self.ids: list[list[int]] = [[] for _ in self.body.prompts]
        self._open = len(self.body.prompts)
        self._first_token_at: float | None = None

    async def follow(self) -> None:
        """Take over what comes until all prompts have ended, and tell whenever the state is another."""
        self.tell(self.header())
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
                self.tell(self.header())

    def header(self) -> dict[str, Any]:
        """Of a frame RUN_STATE (docs/scope-protocol.md, frame 41)."""
        return {
            "run": self.run,
            "state": self.state,
            "position": self._position(),
            "prompts": list(self.prompts),
            "sampling": self.body.sampling.model_dump(mode="json", by_alias=True) | {"seed": self.seed},
            "capture": self.capture.model_dump(mode="json", by_alias=True),
            "tokens": self.body.tokens,
            "error": self.error,
            "startedAt": self.started_at,
            "tokensPerSecond": self._tokens_per_second(),
        }

    def shown(self) -> Run:
        """The run as the API tells it."""
        return Run(
            run=self.run,
            state=self.state,
            position=self._position(),
            prompts=list(self.body.prompts),
            capture=self.capture.model_dump(mode="json", by_alias=True),
            texts=self.texts,
            ids=self.ids,
            tokens=self.body.tokens,
            seed=self.seed,
            error=self.error,
            startedAt=self.started_at,
        )

    def _position(self) -> int | None:
        return self.ticket.position if self.state == "queued" else None

    def _tokens_per_second(self) -> float | None:
        """Since the first token, which says nothing about itself."""
        count = sum(map(len, self.ids)) - len(self.ids)
        if self._first_token_at is None or count < 1:
            return None
        return count / max(time.monotonic() - self._first_token_at, 1e-6)

    def _sample(self, request_id: str) -> int:
        return self.ticket.ids.index(request_id)

    def _add(self, event: TokenEvent) -> None:
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        if self.state not in ENDED:
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

    def __init__(self, desk: Desk) -> None:
        self.looking: Looking | None = None
        """MegaScope, where there is a hub to look for."""
        self._desk = desk
        self._records: dict[str, Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def new_id() -> str:
        """12 hex digits."""
        return secrets.token_hex(6)

    def start(
        self, run: str, body: RunRequest, seed: int, model: ServedModel, requests: list[GenerationRequest]
    ) -> Record:
        """Take a run. Raises as `Desk.submit` does, and ApiError for a capture that the model cannot give."""
        if self.looking is not None:
            requests = self.looking.begin(run, body.capture, requests, [utf16_units(text) for text in body.prompts])
        record = Record(
            run=run,
            body=body,
            seed=seed,
            ticket=self._submit(requests),
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            prompts=[model.told(text, one.prompt) for text, one in zip(body.prompts, requests, strict=True)],
            tell=self._tell,
        )
        self._records[run] = record
        while len(self._records) > KEPT:
            del self._records[next(iter(self._records))]
        self._follow(record.follow())
        return record

    def cancel(self, run: str) -> None:
        """End a run. Raises ApiError for one that is not known."""
        self._desk.cancel(self.get(run).ticket)

    def change(self, run: str, capture: Capture) -> Record:
        """Look at something else. Raises ApiError."""
        record = self.get(run)
        if self.looking is not None and record.state not in ENDED:
            self.looking.change(run, capture)
        record.capture = capture
        self._tell(record.header())
        return record

    def probe(self, wanted: Probe) -> str:
        """Read known tokens once more; the probe's id. Raises ApiError, and as `Desk.submit` does."""
        probe, requests = self._needed().probe(wanted)
        self._follow(_drain(self._submit(requests)))
        return probe

    def set_basis(self, data: bytes) -> None:
        """Let ranks project on these axes. Raises ApiError."""
        self._needed().set_basis(data)

    def newest_first(self) -> list[Record]:
        """All that are kept."""
        return list(reversed(self._records.values()))

    def get(self, run: str) -> Record:
        """The run of this id. Raises ApiError."""
        if run not in self._records:
            raise ApiError(404, "no-such-run", f"there is no run {run}", hint=f"The newest {KEPT} are kept.")
        return self._records[run]

    def _needed(self) -> "Looking":
        if self.looking is None:
            hint = "Serve with the pages (spec.analyzer.enabled)."
            raise ApiError(409, "nothing-looks", "this server has no hub that could show it", hint=hint)
        return self.looking

    def _submit(self, requests: list[GenerationRequest]) -> Ticket:
        try:
            return self._desk.submit(requests)
        except GenerationError:
            if self.looking is not None:
                self.looking.forget(requests)
            raise

    def _tell(self, header: Mapping[str, Any]) -> None:
        if self.looking is not None:
            self.looking.tell(header)

    def _follow(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _drain(ticket: Ticket) -> None:
    """What a probe finds goes to the hub by itself."""
    left = len(ticket.ids)
    while left:
        left -= isinstance(await ticket.get(), FinishedEvent)
