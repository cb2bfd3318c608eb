"""Requests to MegaScope as JSON: runs, captures, probes (docs/scope-protocol.md, sections 3, 6 and 8)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.expression import MAX_CHARACTERS
from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_common.scope.perturbation.choice import PerturbationChoice
from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.request_model import AsList, Index, RequestModel

CALLER_HEADER = "X-Megatronapp-Caller"
"""Header in which the gateway names the user to the hub; it removes one that a client sends."""
MAX_PROMPTS = 8
MAX_TOKENS = 512
MAX_PINNED = 64
MAX_EXPRESSION = MAX_CHARACTERS
MAX_PROMPT_CHARACTERS = 64 << 10
MAX_STOPS = 8
MAX_SCORED = 1 << 15
"""Largest number of tokens of a scored text."""

Preset = Literal["default", "lite", "off"]
Rotary = Literal["after", "before"]


def _checked(text: str) -> str:
    try:
        parse_reducer(text)
    except FilterError as error:
        raise ValueError(str(error)) from error
    return text


Filter = Annotated[str, Field(max_length=MAX_EXPRESSION), AfterValidator(_checked)]
"""Text of a reducer (docs/expressions.md)."""


class StateSelection(RequestModel):
    """Parts of the model that are captured."""

    qkv: bool = True
    attention: bool = True
    mlp1: bool = True
    mlp2: bool = True
    probabilities: bool = True
    pca: bool = True


class PixelCounts(RequestModel):
    """Pixels that represent the vectors of one row and layer."""

    qkv: Annotated[int, Field(ge=3, le=768, multiple_of=3)] = 96
    """Pixels of q, k and v together."""
    mlp: Annotated[int, Field(ge=1, le=512)] = 64


class PixelFilters(RequestModel):
    """Filters that reduce a vector to one pixel."""

    qkv: Filter = "data.mean(dim=-1)"
    mlp: Filter = "data.mean(dim=-1)"


class HeadRef(RequestModel):
    """One head of one layer."""

    layer: Index
    head: Index


class CaptureSettings(RequestModel):
    """Content that is captured in a run."""

    preset: Preset = "default"
    states: StateSelection = StateSelection()
    pixels: PixelCounts = PixelCounts()
    expression: PixelFilters = PixelFilters()
    rotary: Rotary = "after"
    pinned: Annotated[tuple[HeadRef, ...], Field(max_length=MAX_PINNED), AsList] = ()
    """Heads whose attention rows are streamed."""
    candidates: Annotated[int, Field(ge=1, le=100)] = 20

    @model_validator(mode="after")
    def _lite_pins_nothing(self) -> "CaptureSettings":
        if self.preset != "default" and self.pinned:
            raise ValueError(f"pinned: the preset {self.preset} streams no rows; take default, or pin nothing")
        return self


class SamplingSettings(RequestModel):
    """Settings for the choice of tokens."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Temperature of sampling; 0 takes the most likely token."""
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Number of most likely tokens to choose from; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    """Seed of the run; None: a random one."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=MAX_STOPS), AsList
    ] = ()


Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


class RunRequest(RequestModel):
    """Request to generate from a batch of prompts."""

    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1, max_length=MAX_PROMPTS), AsList]
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 32
    """Largest number of tokens to generate for each prompt."""
    sampling: SamplingSettings = SamplingSettings()
    capture: CaptureSettings = CaptureSettings()
    perturbation: PerturbationChoice | None = None
    """Recipe, or the name or digest of one of the server; "none": the model as it is; None: the active one, if any."""


class CaptureChange(RequestModel):
    """Request to change the capture from the next step on."""

    capture: CaptureSettings


class ProbeSite(RequestModel):
    """Request for exact numbers of a site. `heads` None: all, or a site without heads."""

    site: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Annotated[tuple[Index, ...], AsList]
    heads: Annotated[tuple[Index, ...], AsList] | None = None
    code: Literal["f32", "f16", "u8s"] = "f32"
    rotary: Rotary = "after"
    """For `q` and `k`: after or before rotary embedding."""


class PerturbedTexts(RequestModel):
    """Perturbation with which texts of a run are read again, and the coordinates that its noise depends on."""

    recipe: Recipe
    samples: Annotated[tuple[Index, ...], AsList]
    """Prompt of the run that each text belongs to."""
    prompt_lengths: Annotated[tuple[Index, ...], AsList]
    """Tokens of each prompt; the others of its text were generated."""

    def check_texts(self, texts: int) -> None:
        """Raise ValueError unless there is one entry for each text."""
        if not len(self.samples) == len(self.prompt_lengths) == texts:
            raise ValueError(f"perturbation: samples and promptLengths must have one entry for each of {texts} texts")


class ScoreRequest(RequestModel):
    """Request to score a text: how likely each token was after those before it."""

    ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], AsList, Field(min_length=2, max_length=MAX_SCORED)
    ]
    candidates: Annotated[int, Field(ge=1, le=100)] = 20
    perturbation: PerturbedTexts | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> "ScoreRequest":
        if self.perturbation is not None:
            self.perturbation.check_texts(1)
        return self


class ProbeRequest(RequestModel):
    """Request to read known tokens once more."""

    ids: Annotated[tuple[Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], AsList], ...], AsList]
    sites: Annotated[tuple[ProbeSite, ...], AsList]
    queries: Annotated[tuple[Index, Index], AsList] | None = None
    """Rows [first, end) to send; None: all."""
    stride: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Distance between the rows to send."""
    perturbation: PerturbedTexts | None = None

    @model_validator(mode="after")
    def _has_all_texts(self) -> "ProbeRequest":
        if self.perturbation is not None:
            self.perturbation.check_texts(len(self.ids))
        return self
