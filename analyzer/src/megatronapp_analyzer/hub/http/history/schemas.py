"""Models of the stored traces. The OpenAPI document is made from these models."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.web.models import ApiModel


class HistoryHour(ApiModel):
    """Records of one hour and attempt in the archive."""

    hour: Annotated[str, Field(description="In UTC, such as 2026-11-28T23.")]
    attempt: int
    first_step: Annotated[int | None, Field(description="First step that ended in it; null without any.")]
    last_step: int | None
    records: int
    bytes: int


class DroppedTraces(ApiModel):
    """Files that were deleted from the archive for space since the job began."""

    files: int
    records: int
    bytes: int
    until: Annotated[str | None, Field(description="Newest hour of which files were deleted.")]


class MemorySteps(ApiModel):
    """Steps that are in memory with all their spans."""

    steps: int
    first_step: int | None
    last_step: int | None


class HistoryView(ApiModel):
    """Stored traces of a job, and the space that they have."""

    hours: Annotated[list[HistoryHour], Field(description="Oldest first.")]
    bytes: Annotated[int, Field(description="Bytes of all files of the archive.")]
    limit_bytes: Annotated[int, Field(description="Bytes that they may have; 0 of a hub that stores nothing.")]
    waiting_segments: Annotated[int, Field(description="Segments of the spool that are not archived yet.")]
    dropped: DroppedTraces
    damaged_files: Annotated[int, Field(description="Files and segments of which not everything could be read.")]
    memory: MemorySteps
