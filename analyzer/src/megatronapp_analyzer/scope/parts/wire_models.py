"""Headers that ranks and session files send, checked before anything relies on them. Fields of a newer peer are kept
out."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.scope.perturbation.recipe import DIGEST_PATTERN
from megatronapp_common.scope.protocol import RunState
from megatronapp_common.scope.protocol_requests import CaptureSettings

MAX_PROMPTS = 64
MAX_SAMPLE = 1 << 20
Number = Annotated[int, Field(ge=0, lt=1 << 32, strict=True)]
Offset = tuple[Number, Number] | None
M = TypeVar("M", bound=BaseModel)


class HeaderModel(BaseModel):
    """camelCase outside, snake_case inside."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", serialize_by_alias=True, allow_inf_nan=False
    )


class PromptHeader(HeaderModel):
    """One prompt of a run."""

    text: str = ""
    ids: list[Number]
    offsets: list[Offset] = []


class ErrorHeader(HeaderModel):
    """Why a run failed."""

    code: str
    message: str = ""
    hint: str = ""


class PerturbationHeader(HeaderModel):
    """Perturbation with which a run is generated."""

    digest: Annotated[str, Field(pattern=DIGEST_PATTERN)]
    recipe: dict[str, Any]
    """Recipe of docs/perturbation.md; a newer rank 0 may send one with more fields."""


class RunHeader(HeaderModel):
    """SCOPE_RUN, without its number."""

    run: Annotated[str, Field(min_length=1, max_length=64)]
    state: RunState
    position: Number | None = None
    prompts: Annotated[list[PromptHeader], Field(max_length=MAX_PROMPTS)]
    sampling: dict[str, Any] | None = None
    capture: CaptureSettings | None = None
    tokens: Number | None = None
    perturbation: PerturbationHeader | None = None
    """None: the model as it is."""
    error: ErrorHeader | None = None
    started_at: float | str | None = None
    tokens_per_second: float | None = None
    steps: Number | None = None
    """Steps that have tokens so far."""


class StepHeader(HeaderModel):
    """SCOPE_STEP and SCOPE_TOKENS: rows, and the token that followed each."""

    rows: list[tuple[Number, Number]]
    ids: list[Number]
    texts: list[str | None] | None = None
    offsets: list[Offset] | None = None
    finished: list[str | None] | None = None
    top_texts: list[list[str]] | None = None
    """For each row the texts of its candidates."""

    @model_validator(mode="after")
    def _as_many_as_rows(self) -> Self:
        for name in ("ids", "texts", "offsets", "finished"):
            if getattr(self, name) is None:
                setattr(self, name, [None] * len(self.rows))
            elif len(getattr(self, name)) != len(self.rows):
                raise ValueError(f"{name} is not a list of {len(self.rows)}")
        if self.top_texts is not None and len(self.top_texts) != len(self.rows):
            raise ValueError(f"topTexts is not a list of {len(self.rows)}")
        return self

    def dump(self) -> dict[str, Any]:
        """Return the header as frames have it."""
        said = self.model_dump(mode="json", by_alias=True)
        return {name: value for name, value in said.items() if value is not None}


class SampleHeader(HeaderModel):
    """Tokens of one sample that rank 0 has generated so far."""

    ids: Annotated[list[Number], Field(max_length=MAX_SAMPLE)] = []
    texts: list[str | None] = []
    offsets: list[Offset] = []
    finished: list[str | None] = []

    @model_validator(mode="after")
    def _as_many_as_ids(self) -> Self:
        for name in ("texts", "offsets", "finished"):
            if len(getattr(self, name)) != len(self.ids):
                raise ValueError(f"{name} is not a list of {len(self.ids)}")
        return self


class StoredRun(HeaderModel):
    """Answer of rank 0 to a hub that has missed part of a run."""

    header: dict[str, Any]
    samples: Annotated[list[SampleHeader], Field(max_length=MAX_PROMPTS)]


def read(model: type[M], what: str, header: Mapping[str, Any]) -> M:
    """Parse a header. Raises ProtocolError with the place of the error."""
    try:
        return model.model_validate(dict(header))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ProtocolError("bad-header", f"{what} frame: {place[:200]}: {first['msg'][:200]}") from error
