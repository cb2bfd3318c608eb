"""What people ask of MegaScope, as JSON: runs, captures, probes (docs/scope-protocol.md, sections 3, 6 and 8)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.expression import MAX_CHARACTERS
from megatronapp_common.filters.reducers import parse_reducer

CALLER_HEADER = "X-Megatronapp-Caller"
"""In which the door tells the hub who asks; it passes none on that a client sends."""
MAX_PROMPTS = 8
MAX_TOKENS = 512
MAX_PINNED = 64
MAX_EXPRESSION = MAX_CHARACTERS
MAX_PROMPT_CHARACTERS = 64 << 10
MAX_STOPS = 8
MAX_SCORED = 1 << 15
"""Tokens of a text that is scored."""

Preset = Literal["default", "lite", "off"]
Rotary = Literal["after", "before"]
Index = Annotated[int, Field(ge=0, lt=1 << 20)]


def _checked(text: str) -> str:
    try:
        parse_reducer(text)
    except FilterError as error:
        raise ValueError(str(error)) from error
    return text


Filter = Annotated[str, Field(max_length=MAX_EXPRESSION), AfterValidator(_checked)]
"""Text of a reducer (docs/expressions.md)."""


class RequestModel(BaseModel):
    """Names are camelCase outside and snake_case inside; unknown fields and values of a wrong type are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        strict=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        frozen=True,
    )


AsList = Strict(False)
"""Of tuples in strict models: they take a list, as JSON has it."""


class StateSelection(RequestModel):
    """What of the model is looked at."""

    qkv: bool = True
    attention: bool = True
    mlp1: bool = True
    mlp2: bool = True
    probabilities: bool = True
    pca: bool = True


class PixelCounts(RequestModel):
    """Numbers that stand for the vectors of one row and layer."""

    qkv: Annotated[int, Field(ge=3, le=768, multiple_of=3)] = 96
    """Of q, k and v together."""
    mlp: Annotated[int, Field(ge=1, le=512)] = 64


class PixelFilters(RequestModel):
    """How a vector becomes one pixel."""

    qkv: Filter = "data.mean(dim=-1)"
    mlp: Filter = "data.mean(dim=-1)"


class HeadRef(RequestModel):
    """One head of one layer."""

    layer: Index
    head: Index


class CaptureSettings(RequestModel):
    """What is sent of a run."""

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
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 takes the most likely token."""
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    """None: one that nobody knows before."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=MAX_STOPS), AsList
    ] = ()


Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


class RunRequest(RequestModel):
    """A batch of prompts to go on with."""

    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1, max_length=MAX_PROMPTS), AsList]
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 32
    """How many are generated for each prompt, at most."""
    sampling: SamplingSettings = SamplingSettings()
    capture: CaptureSettings = CaptureSettings()


class CaptureChange(RequestModel):
    """Another capture, from the next step on."""

    capture: CaptureSettings


class ProbeSite(RequestModel):
    """Exact numbers of a site. `heads` None: all, or a site without heads."""

    site: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Annotated[tuple[Index, ...], AsList]
    heads: Annotated[tuple[Index, ...], AsList] | None = None
    code: Literal["f32", "f16", "u8s"] = "f32"
    rotary: Rotary = "after"
    """Of `q` and `k`: after or before the turn."""


class ScoreRequest(RequestModel):
    """A text whose tokens the model scores: how likely each was after those before it."""

    ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], AsList, Field(min_length=2, max_length=MAX_SCORED)
    ]
    candidates: Annotated[int, Field(ge=1, le=100)] = 20


class ProbeRequest(RequestModel):
    """Known tokens that the model reads once more."""

    ids: Annotated[tuple[Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], AsList], ...], AsList]
    sites: Annotated[tuple[ProbeSite, ...], AsList]
    queries: Annotated[tuple[Index, Index], AsList] | None = None
    """Rows [first, end) that are sent; all if None."""
    stride: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Of those, every so many."""
