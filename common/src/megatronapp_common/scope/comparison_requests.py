"""Requests to compare two branches of a generation, and to sweep a perturbation (docs/comparing-runs.md)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatronapp_common.scope.perturbation.choice import PerturbationChoice
from megatronapp_common.scope.perturbation.recipe import NONE, Perturbation
from megatronapp_common.scope.protocol_requests import Prompt, SamplingSettings
from megatronapp_common.scope.request_model import AsList, Index, RequestModel

MAX_COMPARED_TOKENS = 256
MAX_HEAD_NUMBERS = 1 << 20
"""Most changes of heads of one comparison: tokens times layers times heads."""
MAX_SWEEP_TOKENS = 64
MAX_SWEEP_CELLS = 1024
MAX_AXIS = 256
ComparisonMode = Literal["free", "teacher-forced"]
SweepMetric = Literal["meanKl", "firstDivergence", "logprobChange"]
BranchState = Literal["queued", "running", "done", "cancelled", "failed"]
"""State of a comparison or a sweep."""


class ComparisonRequest(RequestModel):
    """Request to generate two branches, A and B, from one prompt, step by step."""

    prompt: Prompt
    tokens: Annotated[int, Field(ge=1, le=MAX_COMPARED_TOKENS)] = 32
    """Largest number of tokens to generate in each branch."""
    mode: ComparisonMode = "teacher-forced"
    """teacher-forced: B reads the tokens that A has chosen, by decoding. free: B reads its own."""
    sampling: SamplingSettings = SamplingSettings()
    """Choice of tokens in both branches, with equal noise."""
    baseline: PerturbationChoice = NONE
    """Recipe of A, as a recipe, name or digest; none: the model as it is."""
    perturbation: PerturbationChoice
    """Recipe of B."""
    top: Annotated[int, Field(ge=1, le=100)] = 10
    """Number of the likeliest tokens whose overlap is counted."""
    heads: bool = True
    """Measure the change of each head."""


class SweepAxes(RequestModel):
    """Values that replace those of the template: layers, and either strengths or positions."""

    layers: Annotated[tuple[Index, ...], AsList, Field(min_length=1, max_length=MAX_AXIS)]
    """Layers, one of each cell."""
    strengths: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1e6)], ...], AsList, Field(min_length=1, max_length=MAX_AXIS)]
        | None
    ) = None
    """Values of action.coefficient, or of action.rate of bitFlip."""
    positions: Annotated[tuple[Index, ...], AsList, Field(min_length=1, max_length=MAX_AXIS)] | None = None
    """Token positions of the prompt, one of each cell: causal tracing with a patch."""

    @model_validator(mode="after")
    def _has_two(self) -> "SweepAxes":
        if (self.strengths is None) == (self.positions is None):
            raise ValueError("one of strengths and positions must be given; write for example strengths: [0.1, 1]")
        if (cells := len(self.layers) * len(self.strengths or self.positions or ())) > MAX_SWEEP_CELLS:
            raise ValueError(
                f"the sweep has {cells} cells; take fewer layers or values, at most {MAX_SWEEP_CELLS} cells"
            )
        return self


class SweepRequest(RequestModel):
    """Request for a matrix of comparisons: each cell is a teacher-forced B on the tokens of one A."""

    prompt: Prompt
    tokens: Annotated[int, Field(ge=1, le=MAX_SWEEP_TOKENS)] = 8
    """Largest number of tokens that A generates and each cell is compared on."""
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    baseline: PerturbationChoice = NONE
    """Recipe of A; none: the model as it is."""
    template: Perturbation
    """Perturbation of every cell; its layers and strength or positions are those of the cell."""
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    """Seed of the noise of all cells."""
    axes: SweepAxes
    metric: SweepMetric = "meanKl"
    """meanKl: mean of KL(A || B) over the tokens, in nats. firstDivergence: index of the first token that B chooses
    otherwise. logprobChange: log-probability of `token` in B minus that in A, at A's first token."""
    token: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    """Token of logprobChange; omitted: the first one that A generates."""

    @model_validator(mode="after")
    def _fits(self) -> "SweepRequest":
        if self.token is not None and self.metric != "logprobChange":
            raise ValueError(f"token means nothing for {self.metric}; leave it out, or write metric: logprobChange")
        for name in ("layers", "positions"):
            if name in self.template.model_fields_set and getattr(self.axes, name) is not None:
                raise ValueError(f"template: {name} is given by the axes; leave it out")
        return self
