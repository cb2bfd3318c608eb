"""Conversion of events to answers, without a model: names of candidates, and clients that do not read."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


def model() -> Any:
    from tokenizers import Tokenizer, decoders, models

    from megatronapp_trainer.data import tokenizer as ours
    from megatronapp_trainer.serve.served_model import ServedModel

    vocab = {"a": 0, "b": 1, "<0xE3>": 2, "<0x61>": 3, "id:0": 4, "</s>": 5, "c": 6}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return ServedModel(
        name="m",
        created=0,
        capacity=8,
        vocab_size=len(vocab),
        most_prompts=2,
        most_open=2,
        most_tokens=8,
        tokenizer=ours.Tokenizer(backend),
    )


MODEL = model()


@given(st.permutations(range(7)))
def test_no_candidate_is_lost_where_texts_are_the_same(tokens: list[int]) -> None:
    names = MODEL.names_of(tokens)
    assert len(set(names)) == len(names)
    first = min(tokens.index(0), tokens.index(3))
    assert names[first] == "a", "the likelier of two keeps the text"
    assert names[tokens.index(2)] == "id:2"
    assert names[tokens.index(6)] == "c"


def answer_of(prompts: int) -> tuple[Any, Any, list[Any]]:
    """An answer, its ticket, and the tickets that were cancelled."""
    from megatronapp_trainer.inference.request import GenerationRequest
    from megatronapp_trainer.serve.openai.completion import CompletionResponse
    from megatronapp_trainer.serve.request_broker import RequestHandle

    cancelled: list[Any] = []
    requests = [GenerationRequest(id=f"r{index}", prompt=(1,)) for index in range(prompts)]
    answer = CompletionResponse(model=MODEL, name="n", seed=1, requests=requests, with_logprobs=True, prompts=prompts)
    return answer, RequestHandle(requests, cancelled.append), cancelled


def token(request_id: str, index: int) -> Any:
    from megatronapp_trainer.inference.events import TokenEvent
    from megatronapp_trainer.inference.model.sampling import TokenCandidate

    top = (TokenCandidate(token=3, logprob=-0.5), TokenCandidate(token=0, logprob=-0.7))
    return TokenEvent(request_id=request_id, index=index, token=3, logprob=-0.5, candidates=top, text="a", logits=None)


def test_two_tokens_with_the_same_text_are_both_reported() -> None:
    async def logprobs_of_answer() -> Any:
        answer, _, _ = answer_of(1)
        return answer.text_chunks(token("r0", 0))[0].logprobs

    logprobs = asyncio.run(logprobs_of_answer())
    assert logprobs.top_logprobs == [{"a": -0.5, "id:0": -0.7}]
    assert logprobs.top_token_ids == [[3, 0]]


@pytest.mark.parametrize("prompts", [1, 2])
def test_unread_events_are_bounded_and_end_with_their_reason(prompts: int) -> None:
    from megatronapp_trainer.serve.openai.completion import stream
    from megatronapp_trainer.serve.openai.schemas_completions import StreamOptions
    from megatronapp_trainer.serve.request_broker import MAX_BUFFERED

    async def left_unread() -> tuple[list[str], list[Any], Any]:
        answer, ticket, cancelled = answer_of(prompts)
        for index in range(MAX_BUFFERED + 10):
            ticket.put([token(f"r{index % prompts}", index)])
        await asyncio.sleep(0)
        return [data async for data in stream(answer, ticket, StreamOptions())], cancelled, ticket

    streamed, cancelled, ticket = asyncio.run(left_unread())
    assert cancelled == [ticket], "generation ends, once"
    assert len(streamed) == MAX_BUFFERED + 1
    name, data = streamed[-1].splitlines()[:2]
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "slow-reader"


def test_a_prompt_with_its_candidates_is_written_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatronapp_trainer.inference.events import FinishedEvent
    from megatronapp_trainer.serve.openai.completion import CompletionResponse, stream, whole
    from megatronapp_trainer.serve.openai.schemas_completions import Completion, StreamOptions
    from megatronapp_trainer.serve.served_model import PromptEcho

    written: list[int] = []
    dump = Completion.model_dump_json

    def noted(self: Completion) -> str:
        written.append(threading.get_ident())
        return dump(self)

    monkeypatch.setattr(Completion, "model_dump_json", noted)

    async def answered(streamed: bool) -> None:
        plain, ticket, _ = answer_of(1)
        echo = PromptEcho(ids=(1,), text="b", offsets=(0,))
        answer = CompletionResponse(
            model=MODEL, name="n", seed=1, requests=plain.requests, with_logprobs=True, echoes=[echo]
        )
        ended = FinishedEvent(request_id="r0", reason="length", prompt_tokens=1, generated_tokens=1)
        ticket.put([token("r0", 0), ended])
        if streamed:
            assert "".join([data async for data in stream(answer, ticket, StreamOptions())]).count("data: ") == 4
        else:
            assert json.loads(await whole(answer, ticket))["choices"][0]["text"] == "ba"

    asyncio.run(answered(streamed=True))
    asyncio.run(answered(streamed=False))
    assert len(written) == 4
    assert threading.get_ident() not in written
