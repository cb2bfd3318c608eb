"""The recipe of a perturbation: which parameters, activations or layer boundaries change, where, and how.

    recipe = parse_recipe({"perturbations": [{"kind": "system", "action": {"type": "gaussian", "coefficient": 0.1}}]})
    recipe.digest  # 12 hex digits

Layers, heads and positions are those of the whole model, from 0; ranges exclude their end.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatronapp_common.errors import CommonError
from megatronapp_common.field_errors import describe
from megatronapp_common.scope.request_model import AsList, Index, RequestModel

MAX_PERTURBATIONS = 32
MAX_SELECTED = 1024
"""Largest number of layers or heads that one perturbation names."""
MAX_RANGES = 16
MAX_VALUES = 1 << 16
LARGEST_SEED = 2**53 - 1
"""Largest seed: larger whole numbers of JSON are not exact in a browser."""
MAX_NAMED = 16
"""Largest number of recipes of a manifest."""
NONE = "none"
"""Choice of a request that wants the model as it is, though a recipe is active."""
DIGEST_LENGTH = 12
DIGEST_PATTERN = "^[0-9a-f]{12}$"
NAME_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

Kind = Literal["storage", "calculation", "system"]
_OLD_NAMES = {"noise1": "gaussian", "noise2": "uniform"}


def _without_old_names(given: object) -> object:
    if isinstance(given, str) and given in _OLD_NAMES:
        raise ValueError(f"{given} of MegatronApp is called {_OLD_NAMES[given]}; write {_OLD_NAMES[given]}")
    return given


ActionType = Annotated[
    Literal["gaussian", "uniform", "bitFlip", "zero", "mean", "patch"], BeforeValidator(_without_old_names)
]
Bits = Literal["sign", "exponent", "mantissa"]
TensorPart = Literal["query", "key", "value", "gate", "up"]
Amount = Annotated[float, Field(ge=0, le=1e6)]
Position = Annotated[int, Field(gt=-(1 << 20), lt=1 << 20)]
Indices = Annotated[
    tuple[Index, ...],
    Field(min_length=1, max_length=MAX_SELECTED),
    AfterValidator(lambda indices: tuple(sorted(set(indices)))),
    AsList,
]
PerturbationName = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]

_ACTIONS: Mapping[Kind, tuple[ActionType, ...]] = {
    "storage": ("gaussian", "uniform", "bitFlip", "zero"),
    "calculation": ("gaussian", "uniform", "zero", "mean", "patch"),
    "system": ("gaussian", "uniform"),
}
_FIELDS_OF_ACTION: Mapping[ActionType, frozenset[str]] = {
    "gaussian": frozenset({"coefficient"}),
    "uniform": frozenset({"coefficient"}),
    "bitFlip": frozenset({"bits", "rate"}),
    "zero": frozenset(),
    "mean": frozenset({"value", "values", "over"}),
    "patch": frozenset({"source"}),
}
_FIELDS_OF_KIND: Mapping[Kind, frozenset[str]] = {
    "storage": frozenset({"parameter", "tensor", "part", "layers", "heads"}),
    "calculation": frozenset({"site", "layers", "heads", "positions", "steps"}),
    "system": frozenset({"layers", "positions", "steps"}),
}


class RecipeError(CommonError):
    """A document that is not a recipe. The message has the place and the correction of each mistake."""


class RecipeModel(RequestModel):
    """Base of the parts of a recipe; the texts below fields are descriptions in schemas."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class PatchText(RecipeModel):
    """Text whose activations a patch takes."""

    prompt: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """Text of the prompt."""
    tokens: (
        Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(min_length=1, max_length=32768), AsList]
        | None
    ) = None
    """Its tokens instead."""

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError("one of prompt and tokens must be given; write for example prompt: The whale")
        return self


class Action(RecipeModel):
    """Change of the selected numbers."""

    type: ActionType
    """gaussian: x + N(0, coefficient^2). uniform: x * U(1 - coefficient, 1 + coefficient). bitFlip: a bit of x. mean: a
    mean. patch: x of another prompt."""
    coefficient: Amount | None = None
    """Standard deviation of gaussian, in units of the number; half the width of the factor of uniform."""
    bits: Bits | None = None
    """Part of the number in which bitFlip flips a bit; each bit of it is equally likely."""
    rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Probability that bitFlip flips a bit of a number."""
    value: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None
    """Mean that replaces every number."""
    values: Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_VALUES), AsList] | None = None
    """Mean of each feature, or channel of a head."""
    over: Literal["prompt"] | None = None
    """Mean of the same feature over the positions of the prompt; applied from the prompt's last token on."""
    source: PatchText | None = None
    """Prompt from which patch takes the numbers, of the model without perturbation."""

    @model_validator(mode="after")
    def _has_its_fields(self) -> Self:
        allowed = _FIELDS_OF_ACTION[self.type]
        if others := _given(self, ("coefficient", "bits", "rate", "value", "values", "over", "source"), allowed):
            raise ValueError(f"{others[0]} means nothing for {self.type}; leave it out")
        if self.type in {"gaussian", "uniform"} and self.coefficient is None:
            raise ValueError(f"coefficient must be given for {self.type}; write a number of 0 or more")
        if self.type == "bitFlip" and (self.bits is None or self.rate is None):
            raise ValueError("bits and rate must be given for bitFlip; write for example bits: mantissa, rate: 0.001")
        if self.type == "mean" and sum(given is not None for given in (self.value, self.values, self.over)) != 1:
            raise ValueError("one of value, values and over must be given for mean; write for example over: prompt")
        if self.type == "patch" and self.source is None:
            raise ValueError('source must be given for patch; write for example source: {"prompt": "The whale"}')
        return self


class PositionRange(RecipeModel):
    """Token positions from `first` up to, but not including, `end`."""

    origin: Literal["start", "promptEnd"] = "start"
    """Position with number 0: the first token, or the one after the prompt (so -1 is the prompt's last token)."""
    first: Position = 0
    """First position of the range; below 0 with origin promptEnd alone."""
    end: Position | None = None
    """First position after the range; omitted: without end."""

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.origin == "start" and self.first < 0:
            raise ValueError(f"first is {self.first}, before the first token; write 0 or more, or origin: promptEnd")
        if self.end is not None and self.end <= self.first:
            raise ValueError(f"end {self.end} is not above first {self.first}, so no position is selected")
        return self


class StepWindow(RecipeModel):
    """Steps of generation from `first` up to, but not including, `end`: 0 reads the prompt, each later one a token."""

    first: Index = 0
    """First step."""
    end: Index | None = None
    """First step after the window; omitted: without end."""

    @model_validator(mode="after")
    def _is_window(self) -> Self:
        if self.end is not None and self.end <= self.first:
            raise ValueError(f"end {self.end} is not above first {self.first}, so no step is selected")
        return self


class Perturbation(RecipeModel):
    """One change of the model. Selections that are omitted select everything."""

    kind: Kind
    """storage: parameters, drawn once. calculation: activations of a site in each forward pass. system: the hidden
    state after layers, by a vector (gaussian) or factor (uniform) of each layer that is constant over tokens."""
    site: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Site of calculation, such as mlp2, or one that a plugin registers."""
    parameter: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Module of storage, in Megatron's names: self_attention.linear_qkv below layers, embedding.word_embeddings, ..."""
    tensor: Literal["weight", "bias"] = "weight"
    """Tensor of that module."""
    part: TensorPart | None = None
    """Part of self_attention.linear_qkv (query, key, value) or of a gated mlp.linear_fc1 (gate, up)."""
    action: Action
    """Change of the selected numbers."""
    layers: Indices | None = None
    """Layers, from 0."""
    heads: Indices | None = None
    """Heads of a site that has heads (k: key heads), or of self_attention.linear_qkv and linear_proj."""
    positions: Annotated[tuple[PositionRange, ...], Field(min_length=1, max_length=MAX_RANGES), AsList] | None = None
    """Token positions; one that any of the ranges contains is selected."""
    steps: StepWindow | None = None
    """Steps of generation."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        allowed = _FIELDS_OF_KIND[self.kind]
        if others := _given(self, ("site", "parameter", "part", "heads", "positions", "steps"), allowed):
            raise ValueError(f"{others[0]} means nothing for {self.kind}; leave it out")
        if self.tensor != "weight" and self.kind != "storage":
            raise ValueError(f"tensor means nothing for {self.kind}; leave it out")
        needed = {"storage": "parameter", "calculation": "site"}.get(self.kind)
        if needed is not None and getattr(self, needed) is None:
            example = {"parameter": "mlp.linear_fc2", "site": "mlp2"}[needed]
            raise ValueError(f"{needed} must be given for {self.kind}; write for example {needed}: {example}")
        if self.action.type not in _ACTIONS[self.kind]:
            choices = ", ".join(_ACTIONS[self.kind])
            raise ValueError(f"action.type {self.action.type} is not possible for {self.kind}; write one of {choices}")
        if self.action.type == "patch":
            self._patches_prompts()
        if self.action.over == "prompt" and any(_begins_in_prompt(place) for place in self.positions or ()):
            raise ValueError(
                "positions: the mean over the prompt is known at its last token; write origin: promptEnd and first: -1 "
                "or more"
            )
        return self

    def _patches_prompts(self) -> None:
        if self.steps is not None:
            raise ValueError("steps means nothing for patch, which changes the prompt; leave it out")
        for place, selected in enumerate(self.positions or ()):
            if selected.origin == "promptEnd" and (selected.first >= 0 or (selected.end or 0) > 0):
                raise ValueError(
                    f"positions.{place}: patch changes tokens of the prompt; write first below 0, and end 0 or less"
                )


class Recipe(RecipeModel):
    """Perturbations of a model, applied in the order of the list."""

    version: Literal[1] = 1
    """Version of the format."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Seed of all noise: equal recipes draw equal noise on every layout."""
    perturbations: Annotated[
        tuple[Perturbation, ...], Field(max_length=MAX_PERTURBATIONS, json_schema_extra={"minItems": 1}), AsList
    ]
    """Changes of the model, in their order."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:  # as a limit of the list it would be reported for each wrong item, too
        if not self.perturbations:
            raise ValueError("perturbations is empty; write at least one, or leave the recipe out")
        return self

    def canonical(self) -> str:
        """Return the recipe as canonical JSON: sorted keys, no spaces, without fields at their defaults."""
        document = self.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"version": self.version}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @functools.cached_property
    def digest(self) -> str:
        """Name of the recipe: the first 12 hex digits of the SHA-256 of its canonical JSON."""
        return digest_of(self.canonical())


class NamedRecipe(RecipeModel):
    """A recipe of the manifest."""

    name: PerturbationName
    """Name by which requests choose the recipe; not none, which means the model as it is."""
    active: bool = False
    """Apply the recipe to every request that names no other one; true for one recipe at most."""
    recipe: Recipe
    """Recipe of the perturbation."""

    @model_validator(mode="after")
    def _is_not_none(self) -> Self:
        if self.name == NONE:
            raise ValueError(f"name: {NONE} means no perturbation in requests; write another name")
        return self


def digest_of(canonical: str) -> str:
    """Return the name of a recipe by its canonical JSON."""
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_LENGTH]


def parse_recipe(document: object) -> Recipe:
    """Validate parsed JSON. Raises RecipeError with the place and the correction of each mistake."""
    try:
        return Recipe.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise RecipeError(describe(error.errors(include_url=False))) from error
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the recipe is not plain JSON data: {error}") from error


def _given(model: RecipeModel, names: tuple[str, ...], allowed: frozenset[str]) -> list[Any]:
    """Return which of these fields are given though they are not allowed."""
    return [name for name in names if name not in allowed and getattr(model, name) is not None]


def _begins_in_prompt(place: PositionRange) -> bool:
    return place.origin == "start" or place.first < -1
