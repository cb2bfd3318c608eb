"""Conversion of the engine's events to answers of /v1/completions and /v1/chat/completions, whole or as a stream."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import anyio.to_thread
from pydantic import BaseModel

from megatronapp_trainer.inference.events import FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.inference.model.sampling import TokenCandidate
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.openai.schemas_completions import (
    Choice,
    Completion,
    Logprobs,
    QueueNotice,
    StreamOptions,
    Usage,
)
from megatronapp_trainer.serve.perturbation.named_recipes import applied
from megatronapp_trainer.serve.problems import error_body, http_error
from megatronapp_trainer.serve.request_broker import Disconnected, PromptProgress, QueueEvent, RequestHandle
from megatronapp_trainer.serve.served_model import PromptEcho, ServedModel

KEEP_ALIVE_S = 10.0
DONE = "data: [DONE]\n\n"
Made = TypeVar("Made")


class ClientDisconnectedError(Exception):
    """The client has disconnected; there is no one to answer. Never leaves this package."""


@dataclasses.dataclass(kw_only=True)
class CompletionResponse:
    """State of the answer to one HTTP request."""

    model: ServedModel
    name: str
    seed: int
    requests: Sequence[GenerationRequest]
    """Request of each choice, in their order."""
    with_logprobs: bool
    prompts: int = 1
    """Number of different prompts, whose tokens are counted once."""
    echoes: Sequence[PromptEcho] = ()
    """Prompt of each text, where texts begin with it."""

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.perturbation = applied(self.requests[0].perturbation)
        self.ids = tuple(request.id for request in self.requests)
        self._index = {request_id: index for index, request_id in enumerate(self.ids)}
        self._reported = [0] * len(self.ids)
        self._readings: list[list[PromptEvent]] = [[] for _ in self.ids]
        self._echoed: set[int] = set()
        self._open = set(self.ids)
        self._prompt_tokens: dict[int, int] = {}
        self._generated = 0

    @property
    def is_complete(self) -> bool:
        return not self._open

    def text_chunks(self, item: PromptProgress | TokenEvent | FinishedEvent) -> list[Choice]:
        """Return the item as chunks of its text: none of a part of a prompt, two if the prompt is sent first.

        Raises GenerationError if the text ended by an error.
        """
        index = self._index[item.request_id]
        if isinstance(item, PromptProgress):
            self._readings[index] += item.readings
            return []
        choice = self._last(index, item) if isinstance(item, FinishedEvent) else self._next(index, item)
        if not self.echoes or index in self._echoed:
            return [choice]
        self._echoed.add(index)
        return [self._prompt(index), choice]

    def whole(self, choices: list[Choice]) -> BaseModel:
        """Return the answer with these texts."""
        return self.chunk(choices, self.usage())

    def chunk(self, choices: list[Choice], usage: Usage | None = None) -> BaseModel:
        """Return a chunk of a stream with these texts."""
        return Completion(
            id=self.name,
            created=self.created,
            model=self.model.name,
            seed=self.seed,
            choices=choices,
            usage=usage,
            perturbation=self.perturbation,
        )

    def usage(self) -> Usage:
        """Return the numbers of tokens so far."""
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

    def _next(self, index: int, event: TokenEvent) -> Choice:
        text = event.text or ""
        self._generated += 1
        offset = self._reported[index] + (len(self.echoes[index].text) if self.echoes else 0)
        self._reported[index] += len(text)
        logprobs = None
        if self.with_logprobs:
            logprobs = _transposed([self._scored(event.token, event.logprob, event.candidates, offset)])
        return Choice(index=index, text=text, token_ids=[event.token], logprobs=logprobs, finish_reason=None)

    def _prompt(self, index: int) -> Choice:
        """Return the prompt as the first chunk of its text. Position i predicts token i + 1."""
        echo, before = self.echoes[index], {event.index + 1: event for event in self._readings[index]}
        logprobs = None
        if self.with_logprobs:
            scored = [
                self._scored(token, event.logprob, event.candidates, offset)
                if (event := before.get(place)) is not None
                else _LogprobColumns(self.model.names_of([token])[0], token, None, None, None, offset)
                for place, (token, offset) in enumerate(zip(echo.ids, echo.offsets, strict=True))
            ]
            logprobs = _transposed(scored)
        self._readings[index].clear()
        return Choice(index=index, text=echo.text, token_ids=list(echo.ids), logprobs=logprobs, finish_reason=None)

    def _scored(
        self, token: int, logprob: float | None, candidates: Sequence[TokenCandidate], offset: int
    ) -> "_LogprobColumns":
        tokens, values = [candidate.token for candidate in candidates], [candidate.logprob for candidate in candidates]
        names = self.model.names_of(tokens if token in tokens else [*tokens, token])
        name = names[tokens.index(token) if token in tokens else -1]
        return _LogprobColumns(name, token, logprob, dict(zip(names, values, strict=False)), tokens, offset)


class _LogprobColumns(NamedTuple):
    """One entry of each list of `Logprobs`, in their order."""

    tokens: str
    token_ids: int
    token_logprobs: float | None
    top_logprobs: dict[str, float] | None
    top_token_ids: list[int] | None
    text_offset: int


def _transposed(scored: Sequence[_LogprobColumns]) -> Logprobs:
    columns = zip(*scored, strict=True)
    return Logprobs(**dict(zip(_LogprobColumns._fields, map(list, columns), strict=True)))


async def whole(answer: CompletionResponse, ticket: RequestHandle) -> str:
    """Return the answer as JSON once all texts have ended.

    Raises GenerationError, ClientDisconnectedError.
    """
    choices: dict[int, list[Choice]] = {index: [] for index in range(len(answer.ids))}
    while not answer.is_complete:
        item = await ticket.get()
        if isinstance(item, Disconnected):
            raise ClientDisconnectedError
        if isinstance(item, PromptProgress | TokenEvent | FinishedEvent):
            for choice in await _computed(answer, functools.partial(answer.text_chunks, item)):
                choices[choice.index].append(choice)
    return await anyio.to_thread.run_sync(_whole_json, answer, choices.values())


async def stream(answer: CompletionResponse, ticket: RequestHandle, options: StreamOptions) -> AsyncIterator[str]:
    """Yield server-sent events until all texts have ended, one of them by an error, or the client is disconnected."""
    if ticket.position is not None:
        yield _queue_event(answer, QueueEvent(ticket.position), options)
    while not answer.is_complete:
        item = await ticket.get(KEEP_ALIVE_S)
        match item:
            case Disconnected():
                return
            case None:
                yield ": still there\n\n"
            case QueueEvent():
                yield _queue_event(answer, item, options)
            case _:
                try:
                    for event in await _computed(answer, functools.partial(_choice_events, answer, item)):
                        yield event
                except Exception as error:
                    yield _failure(error)
                    return
    if options.include_usage:
        yield _event(answer.chunk([], answer.usage()).model_dump_json())
    yield DONE


async def _computed(answer: CompletionResponse, work: Callable[[], Made]) -> Made:
    """Run `work` on an item; outside the event loop's thread if it may be a whole prompt with its candidates."""
    return await anyio.to_thread.run_sync(work) if answer.echoes else work()


def _whole_json(answer: CompletionResponse, choices: Iterable[list[Choice]]) -> str:
    return answer.whole([_joined(parts) for parts in choices]).model_dump_json()


def _choice_events(answer: CompletionResponse, item: PromptProgress | TokenEvent | FinishedEvent) -> list[str]:
    return [_event(answer.chunk([choice]).model_dump_json()) for choice in answer.text_chunks(item)]


def _failure(error: Exception) -> str:
    from megatronapp_trainer.inference.errors import GenerationError

    if not isinstance(error, GenerationError):
        raise error
    return _event(json.dumps(error_body(http_error(error))), name="error")


def _queue_event(answer: CompletionResponse, event: QueueEvent, options: StreamOptions) -> str:
    if options.include_queue:
        return _event(QueueNotice(id=answer.name, position=event.position).model_dump_json(), name="queue")
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
            **{name: list(itertools.chain.from_iterable(getattr(choice, name) for choice in found)) for name in _LISTS}
        )
    return last.model_copy(
        update={
            "text": "".join(part.text for part in parts),
            "token_ids": [token for part in parts for token in part.token_ids],
            "logprobs": logprobs,
        }
    )


_LISTS = tuple(Logprobs.model_fields)
