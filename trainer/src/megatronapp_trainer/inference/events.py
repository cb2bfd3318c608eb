"""Events of an engine's requests, in order, step by step."""

import dataclasses
from typing import Literal

import torch

from megatronapp_trainer.inference.errors import GenerationError
from megatronapp_trainer.inference.model.sampling import TokenCandidate
from megatronapp_trainer.inference.model.token_statistics import PendingStatistics

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptEvent:
    """Event of a prompt position that was read; only if `prompt_logprobs` or `logits` requested it."""

    request_id: str
    index: int
    """Position in the prompt whose logits these are."""
    target: int | None
    """Token of the prompt that follows; None at its last position."""
    logprob: float | None
    """Log-probability of `target`."""
    candidates: tuple[TokenCandidate, ...]
    logits: torch.Tensor | None
    """Logits, fp32 [vocabulary] on the CPU, if requested."""
    measures: PendingStatistics | None = None
    """Statistics of the distribution, if requested."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """Event of a generated token."""

    request_id: str
    index: int
    """Number of the generated token, from 0."""
    token: int
    logprob: float
    """Log-probability under the model (temperature 1, nothing filtered)."""
    candidates: tuple[TokenCandidate, ...]
    text: str | None
    """Text that is certain now: whole characters, without the beginning of a stop text. None without a tokenizer."""
    logits: torch.Tensor | None
    """Logits that the token was chosen from: fp32 [vocabulary] on the CPU, if requested."""
    measures: PendingStatistics | None = None
    """Statistics of the distribution, if requested."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEvent:
    """The last event of a request."""

    request_id: str
    reason: FinishReason
    matched: int | tuple[int, ...] | str | None = None
    """Cause of `stop`: the end-of-document token, the sequence of tokens, or the text."""
    text: str | None = None
    """Text that was held back until now."""
    prompt_tokens: int
    generated_tokens: int
    error: GenerationError | None = None


Event = PromptEvent | TokenEvent | FinishedEvent
