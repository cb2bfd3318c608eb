"""Answers of the routes of analyses (docs/reading-a-model.md)."""

from megatronapp_common.web.models import ApiModel


class Neuron(ApiModel):
    """A neuron of an MLP: its place in the whole model, and what it adds to the logit."""

    index: int
    activation: float | None
    contribution: float | None


class Attribution(ApiModel):
    """Direct logit attribution: summands of a logit, lists over layers. Their sum is `logit`."""

    sample: int
    position: int
    """Token whose final residual predicts `token`."""
    token: int
    against: int | None
    """Token whose logit is subtracted."""
    tokens: list[int]
    """Tokens that are named here; empty without a tokenizer."""
    texts: list[str]
    logit: float | None
    """Logit that the model itself computes, or the difference of two."""
    embedding: float | None
    constant: float | None
    """Contribution of the bias of the final norm."""
    heads: list[list[float | None]]
    attention_bias: list[float | None]
    mlp: list[float | None]
    mlp_bias: list[float | None]
    neurons: list[list[Neuron]]
    """The strongest neurons of each layer; their contributions are part of `mlp`."""


class HeadScores(ApiModel):
    """Scores of heads, between 0 and 1: means of attention probabilities over the queries for which one is defined."""

    sample: int
    tokens: int
    """Tokens of the text."""
    scores: list[str]
    counts: list[int]
    """Number of queries of each score."""
    values: list[list[list[float | None]]]
    """For each score, layer and head."""


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
