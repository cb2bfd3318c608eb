"""Real server with a tiny model, queried by common clients."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from served_model import POSITIONS, TEMPLATE, ModelServer, started, write_model

from megatronapp_trainer.data.chat_template import ChatTemplate

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}]
TEXT = "<system>be brief\n<user>hello world\n<a>"
MOST = 40


@pytest.fixture(scope="module")
def server(
    run_ranks: Callable[..., list[Any]], forkserver: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    model = tmp_path_factory.mktemp("model")
    run_ranks(1, make, str(model))
    arguments = f"--max-batch-size 2 --max-tokens {MOST} --tokenizer-file {model / 'tokenizer.json'}"
    folder, python = tmp_path_factory.mktemp("server"), forkserver.python()
    with started(folder, pathlib.Path(model), *arguments.split(), python=python) as server:
        yield server


def make(folder: str) -> None:
    write_model(folder)


@pytest.fixture
def http(server: ModelServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: ModelServer, http: httpx.Client) -> Iterator[openai.OpenAI]:
    key = http.headers["Authorization"].removeprefix("Bearer ")
    direct = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=direct, max_retries=0) as client:
        yield client


def test_completions_with_nulls_and_with_scored_prompts(client: openai.OpenAI) -> None:
    nothing: Any = None
    completion = client.completions.create(
        model="tiny", prompt="hello", max_tokens=nothing, n=nothing, temperature=0, stop=nothing, presence_penalty=0.0
    )
    assert completion.choices[0].finish_reason in {"length", "stop"}
    scored = client.completions.create(model="tiny", prompt="hello world", echo=True, logprobs=2, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert scored.choices[0].text == "hello world"
    first: Any = logprobs.token_logprobs[0]
    assert first is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert [len(candidates) for candidates in logprobs.top_logprobs[1:]] == [2] * (len(logprobs.token_logprobs) - 1)


def test_an_error_is_printed_with_its_hint(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match=r"there is no model gpt-9, only tiny\. Write tiny, or leave model out"
    ):
        client.completions.create(model="gpt-9", prompt="hello")
    with pytest.raises(
        openai.UnprocessableEntityError, match=r"messages\.0\.content: must be a string or a list of parts"
    ):
        wrong: Any = [{"role": "user", "content": 5}]
        client.chat.completions.create(model="tiny", messages=wrong)
    with pytest.raises(
        openai.UnprocessableEntityError, match="tools: a list is not supported: there are no tools; send"
    ):
        tool: Any = {"type": "function", "function": {"name": "f"}}
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])


def test_messages_are_the_prompt_that_the_template_makes_of_them(client: openai.OpenAI, http: httpx.Client) -> None:
    assert ChatTemplate(text=TEMPLATE).render(MESSAGES, add_generation_prompt=True) == TEXT
    plain = client.completions.create(model="tiny", prompt=TEXT, temperature=1, seed=5, max_tokens=9)
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1, seed=5, max_completion_tokens=9, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    assert (chat.choices[0].message.role, chat.object) == ("assistant", "chat.completion")
    assert chat.usage == plain.usage
    scored = chat.choices[0].logprobs
    assert scored is not None and scored.content is not None
    for scored_token in scored.content:
        assert scored_token.bytes == (
            None if scored_token.token.startswith("id:") else list(scored_token.token.encode())
        )
    assert all(len(scored_token.top_logprobs) == 3 and scored_token.logprob < 0 for scored_token in scored.content)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    counted = http.post("/tokenize", json={"messages": parts}).json()
    assert counted["tokens"] == http.post("/tokenize", json={"prompt": "<user>a\nb\n<a>"}).json()["tokens"]


def test_a_chat_answer_continues_the_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)
    history = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=4).usage is not None


def test_without_a_length_an_answer_has_the_most_that_the_server_gives(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == MOST


def test_a_stream_of_chat_gives_the_same_answer(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 12, "n": 2}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)


def test_what_clients_send_by_default_changes_nothing(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 6, "logprobs": True}
    completion = client.chat.completions.create(
        **body,
        store=False,
        metadata={"run": "1"},
        service_tier="auto",
        reasoning_effort="none",
        modalities=["text"],
        parallel_tool_calls=False,
        logit_bias={},
        stop="",
        extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "stop_token_ids": [299]},
    )
    assert completion.choices == client.chat.completions.create(**body).choices
    with pytest.raises(openai.UnprocessableEntityError, match=r"min_p: 0\.1 is not supported: .*; send 0, or leave it"):
        client.chat.completions.create(**body, extra_body={"min_p": 0.1})
    with client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "chunk" and kinds.count("content.done") == 1


def test_texts_become_tokens_and_tokens_texts(http: httpx.Client) -> None:
    text = "né à Paris, hello"
    tokenized = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), POSITIONS)
    assert len(tokenized["token_strs"]) == tokenized["count"]
    assert http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    info = http.get("/tokenizer_info").json()
    assert info == {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": None, "chat_template": TEMPLATE}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "the body: give prompt or messages, one of them"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "there is no model b, only tiny"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens.1: 300 must be below 300, the size of the vocabulary"),
    ],
)
def test_what_cannot_be_made_tokens_or_text_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.is_client_error
    assert answer.json()["message"] == message
