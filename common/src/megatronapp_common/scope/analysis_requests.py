"""Requests to analyze a known text: logit lens (docs/reading-a-model.md, docs/scope-protocol.md, 6)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatronapp_common.scope.protocol_requests import MAX_SCORED, PerturbedTexts
from megatronapp_common.scope.request_model import AsList, Index, RequestModel

MAX_CELLS = 1 << 14
"""Most cells of a logit lens: layers times rows."""
MAX_LENS_TOKENS = 1 << 17
"""Most likely tokens of all cells together."""
MAX_TOP = 50
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


AnalysisRequest = LensRequest
