"""Requests as OpenAI's clients send them: null means the default, and drawn seeds can be sent again."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megatronapp_common.scope.protocol_requests import SamplingSettings
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest, StreamOptions
from megatronapp_trainer.serve.served_model import new_seed

NULLABLE = (
    "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
    "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user",
)  # fmt: skip
"""Optional fields of a completion, of which clients with types send null where nothing was chosen."""


def test_null_is_the_default_of_each_optional_field() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(NULLABLE)}) == CompletionRequest(prompt="a")
    assert StreamOptions.model_validate({"include_usage": None}) == StreamOptions()


def test_fields_that_may_be_null_are_nullable_in_the_schema() -> None:
    fields = TypeAdapter(CompletionRequest).json_schema()["properties"]
    nullable = {
        name
        for name, field in fields.items()
        if "null" in [option.get("type") for option in field.get("anyOf", [field])]
    }
    assert nullable == set(fields) - {"prompt"}
    assert fields["max_tokens"]["default"] == 16


@pytest.mark.parametrize("body", [{"prompt": None}, {"prompt": "a", "max_token": None}, {"prompt": [None]}])
def test_null_is_nothing_else(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate(body)


def test_zero_penalties_are_taken_as_any_number() -> None:
    body = {"prompt": "a", "presence_penalty": 0.0, "frequency_penalty": 0}
    assert CompletionRequest.model_validate(body) == CompletionRequest(prompt="a")


def test_the_largest_drawn_seed_is_a_valid_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda most: most - 1)
    largest = new_seed(None)
    assert SamplingSettings(seed=largest).seed == largest
    assert float(largest + 2**17 - 1) == largest + 2**17 - 1, "also with an index added it is a number of a browser's"
