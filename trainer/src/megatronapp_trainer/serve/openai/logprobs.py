"""Limits of the log-probabilities of answers in memory.

Each costs some hundred bytes until its answer is written: as an event, as a part of the answer, and as JSON.
"""

from collections.abc import Sequence

from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.openai.schemas_completions import GenerationBody

MOST_ANSWER_LOGPROBS = 1 << 19
"""Limit of one answer: about 300 MB with one candidate for each token."""


def count_logprobs(body: GenerationBody, requests: Sequence[GenerationRequest]) -> int:
    """Return the number of log-probabilities of the answer in memory at once: texts x tokens x (1 + logprobs).

    A stream sends those of generated tokens at once.
    """
    if not body.with_logprobs:
        return 0
    return sum(_tokens_of(body, request) * (1 + request.candidates) for request in requests)


def check_logprobs(body: GenerationBody, requests: Sequence[GenerationRequest]) -> None:
    """Raise HttpError for more log-probabilities than one answer may have in memory."""
    if (found := count_logprobs(body, requests)) <= MOST_ANSWER_LOGPROBS:
        return
    first = requests[0]
    longest = max(_tokens_of(body, request) for request in requests)
    reason = (
        f"logprobs: {len(requests)} texts of up to {longest} tokens, each with its own log-probability and "
        f"{first.candidates} of candidates, are {found}; an answer may hold {MOST_ANSWER_LOGPROBS} log-probabilities"
    )
    shorter = "a shorter prompt" if first.prompt_logprobs else "fewer max_tokens, or stream: true"
    hint = f"Send fewer texts in one request, fewer candidates, or {shorter}."
    raise HttpError(413, "too-many-logprobs", reason, hint=hint, param="logprobs")


def _tokens_of(body: GenerationBody, request: GenerationRequest) -> int:
    prompt = len(request.prompt) if request.prompt_logprobs else 0
    return prompt + (0 if body.stream else request.max_new_tokens)
