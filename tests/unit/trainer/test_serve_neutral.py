"""Defaults of OpenAI's and vLLM's clients are taken; values that would change the answer are refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatronapp_common.field_errors import describe
from megatronapp_trainer.serve.openai import generation_requests
from megatronapp_trainer.serve.openai.generation_requests import chat_requests, completion_requests
from megatronapp_trainer.serve.openai.schemas_chat import ChatRequest
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest
from megatronapp_trainer.serve.problems import UNION_TAGS
from megatronapp_trainer.serve.served_model import ServedModel

COMMON: dict[str, Any] = {
    "store": False,
    "metadata": {"run": "1"},
    "service_tier": "auto",
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "me",
    "seed": 1,
    "n": 1,
    "best_of": 1,
    "stop": "",
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "length_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "use_beam_search": False,
    "priority": 0,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "guided_json": None,
    "stream_options": {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False},
}
COMPLETION = COMMON | {"prompt": "a", "suffix": None, "echo": False, "logprobs": None}
CHAT = COMMON | {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "functions": None,
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "response_format": {"type": "text"},
    "logprobs": False,
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}
MODEL = ServedModel(name="m", created=0, capacity=64, vocab_size=9, most_prompts=2, most_open=2, most_tokens=16)


def test_neutral_values_are_those_of_a_request_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_requests, "chat_ids", lambda *_, **__: (1,))
    monkeypatch.setattr(ServedModel, "ids_of", lambda *_, **__: (1,))
    plain: dict[str, Any] = {"seed": 1, "skip_special_tokens": True}
    completion, chat = {"prompt": "a"} | plain, {"messages": CHAT["messages"]} | plain
    for given, least in (
        (COMPLETION, completion),
        (COMPLETION | {"suffix": "", "return_token_ids": False}, completion),
    ):
        parsed = [completion_requests(MODEL, CompletionRequest.model_validate(body), "x", 1) for body in (given, least)]
        assert parsed[0] == parsed[1]
    for body in (CHAT, CHAT | {"reasoning_effort": "medium", "tool_choice": "none", "parallel_tool_calls": True}):
        parsed = [chat_requests(MODEL, ChatRequest.model_validate(request), "x", 1) for request in (body, chat)]
        assert parsed[0] == parsed[1]


def problem(kind: type[CompletionRequest | ChatRequest], body: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return describe(caught.value.errors(), tags=UNION_TAGS)


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("store", True, "answers are not stored; send false, or leave it out"),
        ("service_tier", "flex", 'all requests wait in one queue; send "auto" or "default", or leave it out'),
        ("min_p", 0.1, "tokens are chosen by temperature, top_k and top_p; send 0, or leave it out"),
        ("min_p", False, "tokens are chosen by temperature, top_k and top_p; send 0, or leave it out"),
        ("repetition_penalty", 1.1, "there are no penalties; send 1, or leave it out"),
        ("presence_penalty", 0.5, "there are no penalties; send 0, or leave it out"),
        ("logit_bias", {"1": 2}, "logits are not biased; send {}, or leave it out"),
        ("best_of", 2, "there is no choice among several; n gives several texts; send 1, or leave it out"),
        ("include_stop_str_in_output", True, "a stop text is omitted from the answer; send false, or leave it out"),
        ("prompt_logprobs", 1, "/v1/completions scores prompts by echo: true with logprobs; leave it out"),
        ("guided_json", {"type": "object"}, "texts are not bound to a grammar; leave it out"),
    ],
)
def test_other_values_are_refused_with_what_to_send(field: str, value: object, advice: str) -> None:
    for kind, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        problem_text = problem(kind, body | {field: value})
        assert problem_text.startswith(f"{field}: ") and problem_text.endswith(f" is not supported: {advice}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"text": "a"}]),
    ],
)
def test_what_would_change_a_chat_is_refused_by_name(field: str, value: object) -> None:
    assert f"{field}: " in (problem_text := problem(ChatRequest, CHAT | {field: value}))
    assert "leave it out" in problem_text


def test_stop_token_ids_are_a_list_or_a_list_of_sequences() -> None:
    def found(value: object) -> object:
        return CompletionRequest.model_validate({"prompt": "a", "stop_token_ids": value}).stop_sequences

    assert (found([1, 2]), found([[1], [2, 3]]), found([]), found(None)) == (((1,), (2,)), ((1,), (2, 3)), (), ())
    assert problem(CompletionRequest, COMPLETION | {"stop_token_ids": [1, [2]]}) == (
        "stop_token_ids.1: must be a whole number"
    )


def test_an_empty_stop_text_ends_nothing_and_none_among_others_is_taken() -> None:
    assert CompletionRequest(prompt="a", stop="").stops == ()
    assert "stop.1: must have at least 1 characters" in problem(CompletionRequest, COMPLETION | {"stop": ["a", ""]})


def test_only_an_assistant_message_may_have_no_content() -> None:
    request = ChatRequest.model_validate(
        {"messages": [{"role": "assistant", "content": None, "reasoning_content": None}]}
    )
    assert request.messages[0].plain() == {"role": "assistant", "content": ""}
    for message in ({"role": "user", "content": None}, {"role": "system"}):
        assert "messages.0: content must be given" in problem(ChatRequest, {"messages": [message]})
