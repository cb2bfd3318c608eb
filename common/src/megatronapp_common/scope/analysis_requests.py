"""Requests to analyze a known text (docs/reading-a-model.md): logit lens, attribution, scores of heads."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatronapp_common.scope.protocol_requests import MAX_SCORED, PerturbedTexts
from megatronapp_common.scope.request_model import AsList, Index, RequestModel

MAX_CELLS = 1 << 14
"""Most cells of a logit lens: layers times rows."""
MAX_LENS_TOKENS = 1 << 17
"""Most likely tokens of all cells together."""
MAX_TOP = 50
MAX_NEURONS = 100
NeuronOrder = Literal["contribution", "activation"]
HEAD_SCORES = ("previous", "first", "duplicate", "induction")
"""Scores of a head, in the order of their tensor."""
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Text = Annotated[tuple[Token, ...], AsList, Field(min_length=1, max_length=MAX_SCORED)]
Span = Annotated[tuple[Index, Index], AsList]


class LensRequest(RequestModel):
    """Request for the logit lens: the residual after some layers, read through the final norm and the unembedding."""

    kind: Literal["lens"] = "lens"
    ids: Text
    rows: Span
    """Positions [first, end) whose residuals are read."""
    layers: Annotated[tuple[Index, ...], AsList, Field(min_length=1)]
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5
    """Number of likeliest tokens of each cell."""
    token: Token | None = None
    """Token whose rank and log-probability are reported in each cell, too."""
    perturbation: PerturbedTexts | None = None
    """Perturbation of the run that the text is of."""

    @model_validator(mode="after")
    def _fits(self) -> "LensRequest":
        if self.perturbation is not None:
            self.perturbation.check_texts(1)
        first, end = self.rows
        if not first < end <= len(self.ids):
            raise ValueError(f"rows: {first} to {end} are not within the {len(self.ids)} tokens of the text")
        cells = (end - first) * len(self.layers)
        if cells > MAX_CELLS or cells * self.top > MAX_LENS_TOKENS:
            raise ValueError(
                f"{cells} cells of {self.top} tokens are too many; at most {MAX_CELLS} cells and {MAX_LENS_TOKENS} "
                "tokens: take fewer rows, layers or tokens"
            )
        return self


class AttributionRequest(RequestModel):
    """Request for direct logit attribution: what each component adds to the logit of a token at one position."""

    kind: Literal["attribution"] = "attribution"
    ids: Text
    row: Index
    """Position whose residual predicts the token."""
    token: Token
    against: Token | None = None
    """Token whose logit is subtracted; None: none is."""
    neurons: Annotated[int, Field(ge=0, le=MAX_NEURONS)] = 10
    """Number of neurons of each layer."""
    order: NeuronOrder = "contribution"
    """Quantity by whose magnitude neurons are ordered."""

    @model_validator(mode="after")
    def _is_inside(self) -> "AttributionRequest":
        if self.row >= len(self.ids):
            raise ValueError(f"row: {self.row} is not within the {len(self.ids)} tokens of the text")
        return self


class HeadScoreRequest(RequestModel):
    """Request for the scores of all heads over a text: previous token, first token, duplicate token, induction."""

    kind: Literal["heads"] = "heads"
    ids: Annotated[tuple[Token, ...], AsList, Field(min_length=2, max_length=MAX_SCORED)]


AnalysisRequest = Annotated[LensRequest | AttributionRequest | HeadScoreRequest, Field(discriminator="kind")]
