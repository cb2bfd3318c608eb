"""Answers of the routes of comparisons and sweeps (docs/comparing-runs.md)."""

from typing import Any

from megatronapp_analyzer.scope.schemas import RunError, RunPerturbation
from megatronapp_common.scope.comparison_requests import BranchState, ComparisonMode, SweepMetric
from megatronapp_common.web.models import ApiModel


class ComparisonAccepted(ApiModel):
    """A comparison that waits for its turn."""

    comparison: str


class SweepAccepted(ApiModel):
    """A sweep that waits for its turn."""

    sweep: str


class ComparisonSummary(ApiModel):
    """A comparison in the list of all."""

    comparison: str
    state: BranchState
    mode: ComparisonMode
    prompt: str
    tokens: int
    """Largest number of tokens of a branch."""
    compared: int
    """Number of tokens whose numbers are known."""
    baseline: RunPerturbation | None
    """Recipe of A; null: the model as it is."""
    perturbation: RunPerturbation | None
    """Recipe of B."""
    first_divergence: int | None
    """Index of the first token that B chooses otherwise, from 0; null: none so far."""
    error: RunError | None
    started_at: str


class BranchToken(ApiModel):
    """A token that a branch chose: its log-probability there, and in the other branch where that is known."""

    id: int
    text: str | None
    logprob: float | None
    other_logprob: float | None


class ComparedToken(ApiModel):
    """Numbers of one generated token. Those of a free B after its first divergence are null."""

    index: int
    position: int
    """Place in the sequence, the prompt included."""
    a: BranchToken | None
    b: BranchToken | None
    kl: float | None
    """KL(A || B) of the distributions that the token was chosen from, in nats."""
    overlap: int | None
    """Number of A's `top` likeliest tokens that are among B's."""
    rank: int | None
    """Number of tokens that are likelier in B than A's token."""


class Comparison(ComparisonSummary):
    """A comparison with its numbers so far."""

    seed: int
    prompt_tokens: int
    top: int
    texts: list[str]
    """Text of A and of B."""
    rows: list[ComparedToken]
    drift: list[list[float | None]]
    """For each layer and row: norm of B's residual minus A's, over the norm of A's."""
    heads: list[list[list[float | None]]] | None
    """For each layer, head and row: norm of the difference of the head's output over the norm of A's. Null unless
    requested; a teacher-forced B reads A's tokens, so its inputs agree at every row."""


class SweepSummary(ApiModel):
    """A sweep in the list of all."""

    sweep: str
    state: BranchState
    prompt: str
    metric: SweepMetric
    layers: list[int]
    strengths: list[float] | None
    positions: list[int] | None
    done: int
    """Number of cells whose value is known."""
    cells: int
    error: RunError | None
    started_at: str


class Sweep(SweepSummary):
    """A sweep with its matrix so far."""

    template: dict[str, Any]
    """Perturbation of every cell, without what the axes give."""
    seed: int
    """Seed of the sampling of A."""
    token: int | None
    """Token of logprobChange."""
    ids: list[int]
    """Tokens of A that every cell reads."""
    texts: list[str] | None
    """Text of each of them; null without a tokenizer."""
    values: list[list[float | None]]
    """Metric, by layer, then strength or position; null: not yet known, or no divergence."""
    digests: list[list[str | None]]
    """Recipe of each cell; null: not begun yet."""
