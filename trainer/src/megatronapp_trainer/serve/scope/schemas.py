"""Bodies of answers for a hub that has lost a run."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from megatronapp_common.scope.comparison_requests import BranchState
from megatronapp_trainer.serve.openai.schemas_completions import RunStatus


class ReportedSample(BaseModel):
    """Generated text of one prompt: lists over its tokens, as sent in frames SCOPE_TOKENS."""

    ids: list[int]
    texts: list[str]
    offsets: list[tuple[int, int] | None]
    finished: list[str | None]


class ComparisonStarted(BaseModel):
    """A comparison that waits for its turn."""

    comparison: str


class SweepStarted(BaseModel):
    """A sweep that waits for its turn."""

    sweep: str


class ListedComparison(ComparisonStarted):
    """A comparison in the list of all."""

    state: BranchState


class ListedSweep(SweepStarted):
    """A sweep in the list of all."""

    state: BranchState


class RunDetail(RunStatus):
    """State of a run, and all samples that were sent of it."""

    header: Annotated[dict[str, Any], Field(description="Of a frame SCOPE_RUN (docs/scope-protocol.md).")]
    samples: list[ReportedSample]
