"""Answers of the routes of analyses (docs/reading-a-model.md)."""

from megatronapp_common.web.models import ApiModel


class Lens(ApiModel):
    """Logit lens of some positions: lists over layers, then positions. A rank counts from 0, the likeliest token."""

    sample: int
    layers: list[int]
    positions: list[int]
    """Tokens whose residuals are read: each predicts the token after it."""
    tokens: list[int]
    """All tokens that are named here; empty without a tokenizer."""
    texts: list[str]
    """Text of each of `tokens`, decoded alone."""
    ids: list[list[list[int]]]
    """The likeliest tokens of each cell, by falling probability."""
    logprobs: list[list[list[float | None]]]
    """Natural logarithms of their probabilities."""
    entropy: list[list[float | None]]
    """Entropy of the whole distribution, in nats."""
    target_rank: list[list[int | None]]
    """Rank of the token that follows in the text; None where none does."""
    target_logprob: list[list[float | None]]
    token: int | None
    """Token that was requested in addition."""
    token_rank: list[list[int | None]] | None = None
    token_logprob: list[list[float | None]] | None = None
