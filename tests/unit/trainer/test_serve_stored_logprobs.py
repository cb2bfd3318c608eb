"""Log-probabilities that answers hold in memory are bounded: of one answer (413), and of all together (429)."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.inference.errors import QueueFullError
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.openai import generation_requests
from megatronapp_trainer.serve.openai.generation_requests import chat_requests, completion_requests
from megatronapp_trainer.serve.openai.logprobs import MOST_ANSWER_LOGPROBS, count_logprobs
from megatronapp_trainer.serve.openai.schemas_chat import ChatRequest
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest
from megatronapp_trainer.serve.request_broker import MOST_OPEN_LOGPROBS, RequestBroker
from megatronapp_trainer.serve.served_model import ServedModel
from megatronapp_trainer.serve.statistics import ServerStatistics

TOKENS = 1 << 12
FITTING = MOST_ANSWER_LOGPROBS // (TOKENS * 2)
MODEL = ServedModel(
    name="m", created=0, capacity=2 * TOKENS, vocab_size=9, most_prompts=2, most_open=128, most_tokens=2 * TOKENS
)


def request_of(**fields: Any) -> tuple[CompletionRequest, list[GenerationRequest]]:
    body = CompletionRequest(**fields)
    return body, completion_requests(MODEL, body, "name", 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, 2 * 5 * 2),
        ({"echo": True, "logprobs": 0, "max_tokens": 3}, 2 * (5 + 3)),
        ({"logprobs": 4, "max_tokens": 3}, 2 * 3 * 5),
        ({"logprobs": 4, "max_tokens": 3, "stream": True}, 0),
        ({"echo": True, "max_tokens": 3}, 0),
    ],
)
def test_an_answer_holds_texts_by_tokens_by_candidates(fields: dict[str, Any], expected: int) -> None:
    assert count_logprobs(*request_of(prompt=[[1] * 5] * 2, **fields)) == expected


@pytest.mark.parametrize(
    ("fits", "over", "message"),
    [
        (
            {"prompt": [[1] * TOKENS] * FITTING},
            {"prompt": [[1] * TOKENS] * (FITTING + 1)},
            f"{FITTING + 1} texts of up",
        ),
        ({"prompt": [1] * TOKENS, "n": FITTING}, {"prompt": [1] * TOKENS, "n": FITTING + 1}, "a shorter prompt"),
        ({"prompt": [[1] * TOKENS] * FITTING}, {"prompt": [[1] * TOKENS] * FITTING, "logprobs": 2}, "and 2 of candid"),
    ],
)
def test_a_request_for_more_is_refused_with_what_to_send(
    fits: dict[str, Any], over: dict[str, Any], message: str
) -> None:
    common = {"echo": True, "logprobs": 1, "max_tokens": 0}
    assert count_logprobs(*request_of(**common, **fits)) == MOST_ANSWER_LOGPROBS
    with pytest.raises(HttpError) as caught:
        request_of(**(common | over))
    assert (caught.value.status, caught.value.param) == (413, "logprobs")
    assert message in f"{caught.value} {caught.value.hint}"
    assert f"an answer may hold {MOST_ANSWER_LOGPROBS} log-probabilities" in str(caught.value)


def test_generated_tokens_count_unless_they_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_requests, "chat_ids", lambda *_, **__: (1,))
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    with pytest.raises(HttpError, match=f"64 texts of up to {TOKENS} tokens") as caught:
        chat_requests(MODEL, ChatRequest(**fields, n=64, max_tokens=TOKENS), "name", 1)
    assert "fewer max_tokens, or stream: true" in caught.value.hint
    assert len(chat_requests(MODEL, ChatRequest(**fields, n=64, max_tokens=TOKENS, stream=True), "name", 1)) == 64


class IdleEngine:
    """Engine that takes requests and never works on them."""

    def submit(self, *requests: GenerationRequest) -> None:
        """Do nothing with the request."""

    def cancel(self, request_id: str) -> None:
        """Do nothing with the identifier."""

    def queue_position(self, request_id: str) -> int | None:
        """Return None, as no request waits."""


def with_broker(check: Callable[[RequestBroker], None]) -> None:
    async def run() -> None:
        broker = RequestBroker(most_open=9, statistics=ServerStatistics())
        engine: Any = IdleEngine()
        broker.open(engine)
        check(broker)

    asyncio.run(run())


def test_all_answers_together_are_bounded_until_they_are_sent() -> None:
    def check(broker: RequestBroker) -> None:
        names = iter(range(99))

        def submit(logprobs: int) -> Any:
            return broker.submit([GenerationRequest(id=f"r{next(names)}", prompt=(1,))], logprobs=logprobs)

        first, _ = submit(MOST_ANSWER_LOGPROBS), submit(MOST_OPEN_LOGPROBS - MOST_ANSWER_LOGPROBS)
        with pytest.raises(QueueFullError, match=f"this one would add 1, and the limit is {MOST_OPEN_LOGPROBS}"):
            submit(1)
        assert broker.statistics.refused == 1
        submit(0)
        broker.release(first)
        submit(MOST_ANSWER_LOGPROBS)

    with_broker(check)
