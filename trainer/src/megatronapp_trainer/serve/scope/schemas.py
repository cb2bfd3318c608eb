"""What a hub reads that has lost a run."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from megatronapp_trainer.serve.openai.schemas_completions import RunStatus


class ReportedSample(BaseModel):
    """What was generated of one prompt: lists over its tokens, as frames SCOPE_TOKENS told them."""

    ids: list[int]
    texts: list[str]
    offsets: list[tuple[int, int] | None]
    finished: list[str | None]


class RunDetail(RunStatus):
    """What became of a run, and all that was told of it."""

    header: Annotated[dict[str, Any], Field(description="Of a frame SCOPE_RUN (docs/scope-protocol.md).")]
    samples: list[ReportedSample]
