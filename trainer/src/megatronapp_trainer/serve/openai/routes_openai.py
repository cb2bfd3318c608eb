"""The routes of OpenAI's interface."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.serve.dependencies import BrokerOf, ModelOf
from megatronapp_trainer.serve.openai.chat_response import ChatResponse
from megatronapp_trainer.serve.openai.completion import ClientDisconnectedError, CompletionResponse, stream, whole
from megatronapp_trainer.serve.openai.event_schemas import streamed
from megatronapp_trainer.serve.openai.generation_requests import (
    chat_requests,
    completion_requests,
    echoes_of,
    prompts_of,
)
from megatronapp_trainer.serve.openai.logprobs import count_logprobs
from megatronapp_trainer.serve.openai.schemas_chat import ChatChunk, ChatCompletion, ChatRequest
from megatronapp_trainer.serve.openai.schemas_completions import (
    Completion,
    CompletionRequest,
    GenerationBody,
    ModelCard,
    ModelList,
    Problem,
    StreamOptions,
)
from megatronapp_trainer.serve.request_broker import Disconnected, RequestBroker, RequestHandle
from megatronapp_trainer.serve.served_model import ServedModel, new_seed

router = APIRouter()
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 404, 408, 409, 413, 421, 422, 429, 500, 503)
}
POSITION = "X-Queue-Position"
DISCONNECTED_STATUS = 499
"""Status that nginx logs for a request whose client has disconnected; no client receives it."""


@router.get("/v1/models", responses=ANSWERS)
async def models(model: ModelOf) -> ModelList:
    """List the model that is served."""
    return ModelList(data=[_card(model)])


@router.get("/v1/models/{name:path}", responses=ANSWERS)
async def one_model(name: Annotated[str, Path(max_length=256)], model: ModelOf) -> ModelCard:
    """Return the model of this name."""
    if name != model.name:
        raise HttpError(404, "no-such-model", f"there is no model of this name, only {model.name}", param="model")
    return _card(model)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=ANSWERS | streamed(Completion),
)
async def complete(request: Request, body: CompletionRequest, model: ModelOf, broker: BrokerOf) -> Response:
    """Continue one or more prompts."""
    name, seed = f"cmpl-{secrets.token_hex(12)}", new_seed(body.seed)
    requests = await anyio.to_thread.run_sync(completion_requests, model, body, name, seed)
    echoes = await anyio.to_thread.run_sync(echoes_of, model, body, requests) if body.echo else ()
    answer = CompletionResponse(
        model=model,
        name=name,
        seed=seed,
        requests=requests,
        with_logprobs=body.with_logprobs,
        prompts=len(prompts_of(body)),
        echoes=echoes,
    )
    return await respond(request, body, answer, broker)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=ANSWERS | streamed(ChatChunk),
)
async def chat(request: Request, body: ChatRequest, model: ModelOf, broker: BrokerOf) -> Response:
    """Answer messages, which the model's chat template makes a prompt."""
    name, seed = f"chatcmpl-{secrets.token_hex(12)}", new_seed(body.seed)
    requests = await anyio.to_thread.run_sync(chat_requests, model, body, name, seed)
    answer = ChatResponse(model=model, name=name, seed=seed, requests=requests, with_logprobs=body.with_logprobs)
    return await respond(request, body, answer, broker)


async def respond(
    request: Request, body: GenerationBody, answer: CompletionResponse, broker: RequestBroker
) -> Response:
    """Generate, and send the answer whole or as a stream. Raises as `RequestBroker.submit` does."""
    ticket = broker.submit(answer.requests, logprobs=count_logprobs(body, answer.requests))
    headers = {POSITION: str(ticket.position or 0)}
    if body.stream:
        return EventStream(stream(answer, ticket, body.stream_options or StreamOptions()), broker, ticket, headers)
    with cancelled_on_disconnect(request.receive, broker, ticket):
        try:
            content = await whole(answer, ticket)
        except ClientDisconnectedError:
            return Response(status_code=DISCONNECTED_STATUS)
    return Response(content, headers=headers, media_type="application/json")


class EventStream(Response):
    """Server-sent events; requests of a disconnected client are cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], broker: RequestBroker, ticket: RequestHandle, headers: dict[str, str]
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._broker, self._ticket = events, broker, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as soon as it is available."""
        with cancelled_on_disconnect(receive, self._broker, self._ticket):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def cancelled_on_disconnect(receive: Receive, broker: RequestBroker, ticket: RequestHandle) -> Iterator[None]:
    """Watch for a disconnect of the client inside the context; on exit open requests are cancelled."""
    listener = asyncio.create_task(_until_disconnected(receive, ticket))
    try:
        yield
    finally:
        listener.cancel()
        broker.release(ticket)


async def _until_disconnected(receive: Receive, ticket: RequestHandle) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.put([Disconnected()])


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=model.created,
        max_model_len=model.capacity,
        vocab_size=model.vocab_size,
        has_tokenizer=model.tokenizer is not None,
    )
