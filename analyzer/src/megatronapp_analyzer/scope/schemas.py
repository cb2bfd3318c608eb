"""Answers of the scope routes; requests are in `megatronapp_common.scope.protocol_requests`."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from megatronapp_common.scope.protocol import RunState
from megatronapp_common.web.models import ApiModel


class RunAccepted(ApiModel):
    """A run that waits for its turn."""

    run: str
    position: int | None


class AnswerPending(ApiModel):
    """The numbers are being fetched; ask again after `retry_ms` milliseconds."""

    probe: str
    retry_ms: int


class RunError(ApiModel):
    """Why a run failed."""

    code: str
    message: str
    hint: str


class RunSummary(ApiModel):
    """One line of the list of runs."""

    run: str
    state: RunState
    prompts: list[str]
    """Beginnings of the prompts."""
    position: int | None
    """Place in the queue."""
    started_at: float | str | None
    tokens: int | None
    tokens_per_second: float | None
    perturbation: str | None = None
    """Digest of the recipe that perturbs the run; null: the model as it is."""
    error: RunError | None


class ScopeModel(ApiModel):
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    mlp_width: int
    gated: bool
    vocabulary: int
    positions: Literal["learned", "rotary", "none"]
    max_length: int


class ScopeRank(ApiModel):
    """Part of the model that a rank has."""

    rank: int
    stage: int
    tensor: int
    layers: tuple[int, int]
    """From the first to before the end."""
    heads: tuple[int, int]


class ScopeLayout(ApiModel):
    """How the model is spread."""

    tensor: int
    pipeline: int
    ranks: list[ScopeRank] | None = None
    """Ranks of one replica; None until all have reported."""


class ScopeLimits(ApiModel):
    """Limits of runs and of storage."""

    prompts: int
    tokens: int
    pinned_heads: int
    ring_bytes: int
    expression_length: int


class NamedPerturbation(ApiModel):
    """A recipe of a perturbation that requests can name."""

    name: Annotated[str, Field(max_length=63)]
    digest: Annotated[str, Field(max_length=64)]
    active: bool
    """Applied to all requests that name no other one."""


class Hello(ApiModel):
    """Header of a SCOPE_HELLO frame."""

    protocol: int
    boot: str | None = None
    """Names the hub's life: another one numbers its frames from 1 again. None in recordings of older hubs."""
    role: Literal["viewer", "controller"]
    job: str
    source: Literal["live", "replay"]
    state: Literal["ready", "restarting", "gone"]
    model: ScopeModel | None
    layout: ScopeLayout
    limits: ScopeLimits
    presets: dict[str, Any]
    reducers: list[str]
    sites: tuple[str, ...] = ()
    """Names of the sites that ranks can capture, those of plugins included."""
    perturbations: tuple[NamedPerturbation, ...] = ()
    """Recipes that requests can name."""
    runs: list[RunSummary]


class Candidate(ApiModel):
    """A likely token at a position; its text is None if rank 0 has no texts."""

    id: int
    text: str | None
    probability: float


class GeneratedToken(ApiModel):
    """A token that was generated from the row before its position."""

    position: int
    id: int
    text: str | None
    offset: list[int] | None
    """Place of its text in UTF-16 units."""
    finished: str | None
    candidates: list[Candidate] | None = None
    """Asked for by `candidates=true`; None, too, where the hub holds them no more."""


class RunPerturbation(ApiModel):
    """Perturbation of a run."""

    digest: str
    recipe: dict[str, Any]
    """Recipe of docs/perturbation.md."""


class RunDetail(ApiModel):
    """Header of SCOPE_RUN, and all tokens that were generated, for each prompt."""

    run: str
    state: RunState
    position: int | None = None
    prompts: list[dict[str, Any]]
    sampling: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    tokens: int | None = None
    perturbation: RunPerturbation | None = None
    error: RunError | None = None
    started_at: float | str | None = None
    tokens_per_second: float | None = None
    generated: list[list[GeneratedToken]]


DETAIL_NAMES = frozenset(field.alias or name for name, field in RunDetail.model_fields.items())
"""Fields of the header; a newer rank 0 may send more."""


class PcaRequest(ApiModel):
    """New axes of some layers."""

    model_config = ConfigDict(strict=True)

    layers: Annotated[list[Annotated[int, Field(ge=0, lt=4096)]], Field(min_length=1, max_length=4096)]
    refit: Literal[True] = True


class PcaFitted(ApiModel):
    """The axes are there."""

    version: int


class Scores(ApiModel):
    """Surprise of each token of a prompt but the first, and entropy of its distribution, in nats."""

    sample: int
    positions: list[int]
    surprise: list[float | None]
    entropy: list[float | None]


class Latency(ApiModel):
    """Durations in seconds since the server's start; None without any. Median and 95th percentile are of buckets."""

    count: int
    mean: float | None
    median: float | None
    p95: float | None


class Latencies(ApiModel):
    """Latencies of prompts, and of each token after the first."""

    queue: Latency
    first_token: Latency
    output_token: Latency


class ServerStatus(ApiModel):
    """The server of the model."""

    address: str
    """Address of its OpenAI interface, inside the job's network."""
    waiting: int
    """Prompts in the queue."""
    running: int
    refused: int
    """Requests that found the queue full."""
    ended: dict[str, int]
    """Prompts by how they ended."""
    latencies: Latencies


class Variance(ApiModel):
    """Variance of hidden states after a layer."""

    layer: int
    rows: int
    """Number of tokens: all that the model has read, or some of long texts."""
    variance: float
    """Sum over all features."""


class Values(ApiModel):
    """Exact numbers as JSON."""

    site: str
    sample: int
    layer: int | None
    head: int | None
    positions: list[int]
    values: list[list[float | None]]
