"""Conversion of requests of OpenAI's interface to the engine's."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.data.chat_template import TemplateError
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.openai.logprobs import check_logprobs
from megatronapp_trainer.serve.openai.schemas_chat import ChatRequest, Message
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest, GenerationBody
from megatronapp_trainer.serve.served_model import SEEDS, Ids, Prompt, PromptEcho, ServedModel

_NO_TEMPLATE = (
    "Use /v1/completions with a prompt, or serve with --tokenizer-file in a folder with chat_template.jinja or "
    "a tokenizer_config.json with chat_template."
)
_TEMPLATE_REFUSED = "Change the messages to what the template takes; /tokenizer_info shows it."


def completion_requests(model: ServedModel, body: CompletionRequest, name: str, seed: int) -> list[GenerationRequest]:
    """Return one request for each text. Raises HttpError, RequestError."""
    model.check_name(body.model)
    prompts = prompts_of(body)
    model.check_texts(len(prompts) * body.n, model.most_open, "prompt" if body.n == 1 else "n")
    model.check_tokens(body.max_tokens, "max_tokens")
    common = GenerationRequest(
        id=name,
        prompt=(0,),
        max_new_tokens=body.max_tokens,
        candidates=body.logprobs or 0,
        prompt_logprobs=body.echo and body.logprobs is not None,
        perturbation=model.perturbations.choose(body.perturbation),
        **_sampling_settings(body),
    )
    ids = [model.ids_of(prompt, special=body.add_special_tokens) for prompt in prompts]
    requests = _copies(common, ids, body.n, seed)
    check_logprobs(body, requests)
    return requests


def chat_requests(model: ServedModel, body: ChatRequest, name: str, seed: int) -> list[GenerationRequest]:
    """Return one request for each answer. Raises HttpError, RequestError."""
    model.check_name(body.model)
    model.check_texts(body.n, model.most_open, "n")
    ids = chat_ids(model, body.messages, add_generation_prompt=body.add_generation_prompt)
    free_tokens = max(model.capacity - len(ids), 1)
    most = min(free_tokens, model.most_tokens) if body.most_new is None else body.most_new
    model.check_tokens(most, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens")
    common = GenerationRequest(
        id=name,
        prompt=ids,
        max_new_tokens=most,
        candidates=body.top_logprobs,
        perturbation=model.perturbations.choose(body.perturbation),
        **_sampling_settings(body),
    )
    requests = _copies(common, [ids], body.n, seed)
    check_logprobs(body, requests)
    return requests


def chat_ids(model: ServedModel, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
    """Render messages with the model's chat template, and return the ids. Raises HttpError."""
    if model.chat.text is None:
        flaw = "has none" if model.chat.flaw is None else f"has one that cannot be used: {model.chat.flaw}"
        reason = f"messages need the model's chat template, and {model.name} {flaw}"
        raise HttpError(422, "no-chat-template", reason, hint=_NO_TEMPLATE, param="messages")
    try:
        text = model.chat.render([message.plain() for message in messages], add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        reason = f"messages: the model's chat template refused them: {error}"
        raise HttpError(422, "chat-template", reason, hint=_TEMPLATE_REFUSED, param="messages") from error
    return model.ids_of(text, special=False)  # the template writes what is around a text


def echoes_of(model: ServedModel, body: CompletionRequest, requests: Sequence[GenerationRequest]) -> list[PromptEcho]:
    """Return the prompt of each text, as the answer repeats it."""
    firsts = zip(prompts_of(body), requests[:: body.n], strict=True)
    return [echo for prompt, first in firsts for echo in [model.echo_of(prompt, first.prompt)] * body.n]


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request as a list."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else list(given)


def _sampling_settings(body: GenerationBody) -> dict[str, Any]:
    """Return the settings of sampling, and those that end a text."""
    return {
        "temperature": body.temperature,
        "top_k": max(body.top_k, 0),
        "top_p": body.top_p,
        "stop_texts": body.stops,
        "stop_tokens": body.stop_sequences,
        "ignore_end": body.ignore_eos,
        "skip_special": body.skip_special_tokens,
    }


def _copies(common: GenerationRequest, prompts: Sequence[Ids], n: int, seed: int) -> list[GenerationRequest]:
    """Return `n` requests for each prompt, each with a separate seed."""
    return [
        dataclasses.replace(common, id=f"{common.id}-{index}", prompt=ids, seed=(seed + index) % SEEDS, sample=index)
        for index, ids in enumerate(ids for ids in prompts for _ in range(n))
    ]
