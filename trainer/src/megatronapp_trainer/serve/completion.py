"""From the engine's events to the answers of /v1/completions, whole or in pieces."""

import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Sequence

from megatronapp_trainer.generate.events import FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.serve.desk import Gone, QueueEvent, Ticket
from megatronapp_trainer.serve.model import ServedModel
from megatronapp_trainer.serve.problems import api_error, error_body
from megatronapp_trainer.serve.schemas import Choice, Completion, Logprobs, StreamOptions, Usage

KEEP_ALIVE_S = 10.0
DONE = "data: [DONE]\n\n"


class GoneError(Exception):
    """The client has hung up; nobody is left to answer. Never leaves this package."""


@dataclasses.dataclass(kw_only=True)
class Answer:
    """What has come so far of one request over HTTP."""

    model: ServedModel
    name: str
    created: int
    seed: int
    ids: Sequence[str]
    """Of the engine's requests, in the order of the choices."""
    with_logprobs: bool
    prompts: int
    """Number of different prompts, whose tokens count once."""

    def __post_init__(self) -> None:
        self._index = {request_id: index for index, request_id in enumerate(self.ids)}
        self._told = [0] * len(self.ids)
        self._open = set(self.ids)
        self._prompt_tokens: dict[int, int] = {}
        self._generated = 0

    @property
    def is_complete(self) -> bool:
        """All texts have ended."""
        return not self._open

    def piece(self, event: TokenEvent | FinishedEvent) -> Choice:
        """The event as a piece of its text. Raises GenerationError where the text ended by an error."""
        index = self._index[event.request_id]
        if isinstance(event, FinishedEvent):
            return self._last(index, event)
        text = event.text or ""
        self._generated += 1
        logprobs = self._logprobs(event, self._told[index]) if self.with_logprobs else None
        self._told[index] += len(text)
        return Choice(index=index, text=text, token_ids=[event.token], logprobs=logprobs, finish_reason=None)

    def completion(self, choices: list[Choice], usage: Usage | None = None) -> Completion:
        """An answer, or a chunk of one, with these texts."""
        return Completion(
            id=self.name, created=self.created, model=self.model.name, seed=self.seed, choices=choices, usage=usage
        )

    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        copies = len(self.ids) // self.prompts
        prompt = sum(self._prompt_tokens.get(place * copies, 0) for place in range(self.prompts))
        return Usage(prompt_tokens=prompt, completion_tokens=self._generated, total_tokens=prompt + self._generated)

    def _last(self, index: int, event: FinishedEvent) -> Choice:
        self._open.discard(event.request_id)
        self._prompt_tokens[index] = event.prompt_tokens
        if event.error is not None or event.reason == "error":
            assert event.error is not None
            raise event.error
        matched = list(event.matched) if isinstance(event.matched, tuple) else event.matched
        return Choice(index=index, text=event.text or "", token_ids=[], finish_reason=event.reason, stop_reason=matched)

    def _logprobs(self, event: TokenEvent, offset: int) -> Logprobs:
        tokens = [one.token for one in event.candidates]
        values = [one.logprob for one in event.candidates]
        return Logprobs(
            tokens=[self.model.text_of(event.token)],
            token_ids=[event.token],
            token_logprobs=[event.logprob],
            top_logprobs=[dict(zip(self.model.names_of(tokens), values, strict=True))],
            top_token_ids=[tokens],
            text_offset=[offset],
        )


async def whole(answer: Answer, ticket: Ticket) -> Completion:
    """The answer once all texts have ended. Raises GenerationError, GoneError."""
    pieces: dict[int, list[Choice]] = {index: [] for index in range(len(answer.ids))}
    while not answer.is_complete:
        item = await ticket.get()
        if isinstance(item, Gone):
            raise GoneError
        if isinstance(item, TokenEvent | FinishedEvent):
            piece = answer.piece(item)
            pieces[piece.index].append(piece)
    return answer.completion([_joined(parts) for parts in pieces.values()], answer.usage())


async def stream(answer: Answer, ticket: Ticket, options: StreamOptions) -> AsyncIterator[str]:
    """Server-sent events until all texts have ended, one of them by an error, or the client is gone."""
    if ticket.position is not None:
        yield _queue_event(answer, QueueEvent(ticket.position), options)
    while not answer.is_complete:
        item = await ticket.get(KEEP_ALIVE_S)
        match item:
            case Gone():
                return
            case None:
                yield ": still there\n\n"
            case QueueEvent():
                yield _queue_event(answer, item, options)
            case PromptEvent():
                pass
            case _:
                try:
                    yield _event(answer.completion([answer.piece(item)]).model_dump_json())
                except Exception as error:
                    yield _failure(error)
                    return
    if options.include_usage:
        yield _event(answer.completion([], answer.usage()).model_dump_json())
    yield DONE


def _failure(error: Exception) -> str:
    from megatronapp_trainer.generate.errors import GenerationError

    if not isinstance(error, GenerationError):
        raise error
    return _event(json.dumps(error_body(api_error(error))), name="error")


def _queue_event(answer: Answer, event: QueueEvent, options: StreamOptions) -> str:
    if options.include_queue:
        return _event(json.dumps({"id": answer.name, "position": event.position}), name="queue")
    return ": generating\n\n" if event.position is None else f": queue {event.position}\n\n"


def _event(data: str, name: str | None = None) -> str:
    first = "" if name is None else f"event: {name}\n"
    return f"{first}data: {data}\n\n"


def _joined(parts: list[Choice]) -> Choice:
    last = parts[-1]
    found = [part.logprobs for part in parts if part.logprobs is not None]
    logprobs = None
    if found:
        logprobs = Logprobs(
            **{name: list(itertools.chain.from_iterable(getattr(one, name) for one in found)) for name in _LISTS}
        )
    return last.model_copy(
        update={
            "text": "".join(part.text for part in parts),
            "token_ids": [token for part in parts for token in part.token_ids],
            "logprobs": logprobs,
        }
    )


_LISTS = tuple(Logprobs.model_fields)
