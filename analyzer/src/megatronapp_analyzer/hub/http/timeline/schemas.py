"""Models of the timeline of one step. The OpenAPI document is made from these models."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_analyzer.hub.timeline.windows import MAX_PIXELS, MAX_RANKS, MAX_SPANS, MAX_TRACKS
from megatronapp_common.web.models import ApiModel

RoleName = Literal["all", "forward", "backward"]
LARGEST = 2**53 - 1
"""Largest integer that a browser reads exactly."""
Natural = Annotated[int, Field(ge=0, le=LARGEST)]


class TimelineQuery(ApiModel):
    """A step, and with `pixels` the part of it to return."""

    step: Annotated[int | None, Field(ge=0)] = None
    attempt: Annotated[int | None, Field(ge=0, description="Attempt; the newest with that step if absent.")] = None
    pixels: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_PIXELS,
            description="Width of a picture of the part: spans shorter than a pixel are merged per rank, kind and "
            "pixel. Required by the bounds below; without it the answer is the whole step.",
        ),
    ] = None
    first_track: Annotated[
        int | None, Field(ge=0, le=LARGEST, description="Tracks are ranks in order, forward ranks first; 0 if absent.")
    ] = None
    tracks: Annotated[int | None, Field(ge=1, le=MAX_TRACKS, description=f"{MAX_TRACKS} if absent.")] = None
    rank: Annotated[
        list[Natural], Field(max_length=MAX_RANKS, description="The tracks of these ranks, instead of tracks by place.")
    ] = Field(default_factory=list)
    from_ns: Annotated[int | None, Field(ge=0, le=LARGEST, description="After originNs; the begin if absent.")] = None
    to_ns: Annotated[int | None, Field(ge=1, le=LARGEST, description="After originNs; the end if absent.")] = None
    span: Annotated[
        int | None,
        Field(
            ge=0,
            le=LARGEST,
            description="Place of a span to return wherever it is, with the spans before and after it, the first and "
            "the last of its rank, and the other end of its message.",
        ),
    ] = None
    whole_up_to: Annotated[
        int | None, Field(ge=0, le=MAX_SPANS, description="The whole step, if it has no more spans than this.")
    ] = None


class TimelineWindow(ApiModel):
    """Part of a step that a timeline has, and the size of the whole step."""

    spans: Annotated[int, Field(description="Spans of the whole step.")]
    step_from_ns: Annotated[int, Field(description="Begin of the first span of the step, after origin_ns.")]
    step_to_ns: Annotated[int, Field(description="End of its last span.")]
    rank_runs: Annotated[
        list[tuple[int, int]],
        Field(description="Ranks of all tracks of the step in order: [first rank, number of consecutive ranks]."),
    ]
    from_ns: int
    to_ns: int
    first_track: int
    tracks: Annotated[int, Field(description="Tracks in the answer; with `rank` those of the ranks that have spans.")]
    pixels: Annotated[
        int,
        Field(
            description="Pixels over which spans were merged: fewer than requested where the answer would have more "
            f"than {MAX_SPANS:,} spans."
        ),
    ]
    place: Annotated[list[int], Field(description="Place of each span in the columns of the whole step.")]
    merged: Annotated[list[int], Field(description="Spans merged into each, itself included: 1 where it is not short.")]


class Timeline(ApiModel):
    """Spans of one step as columns of equal length, sorted by rank and start: all, or those of a window."""

    attempt: int
    step: int
    origin_ns: Annotated[int, Field(description="Real time that start_ns counts from, nanoseconds since 1970.")]
    complete: bool
    ranks: Annotated[list[int], Field(description="Ranks that have spans here.")]
    roles: Annotated[
        list[RoleName], Field(description="Role of every rank of the job, by rank; empty without MegaFBD.")
    ] = Field(default_factory=list)
    kind_names: Annotated[dict[int, str], Field(description="Names of the numbers in kind.")]
    rank: list[int]
    kind: list[int]
    chunk: list[int]
    microbatch: Annotated[list[int | None], Field(description="null where the span belongs to none.")]
    start_ns: Annotated[list[int], Field(description="Nanoseconds after origin_ns.")]
    duration_ns: list[int]
    flags: list[int]
    run_queue_ns: Annotated[list[int | None], Field(description="Wait for a processor; null where unknown.")]
    bytes: Annotated[list[int | None], Field(description="Size of a transfer; null for other spans.")]
    peer: Annotated[list[int | None], Field(description="Other end of a transfer; null for other spans.")]
    flows: Annotated[
        list[tuple[int, int]],
        Field(description="Pairs [index of the send, index of the matched receive] in these columns."),
    ]
    omitted: Annotated[
        str | None,
        Field(description="Why ranks are missing of a stored step: it is too large, or was read too slowly."),
    ] = None
    window: Annotated[TimelineWindow | None, Field(description="null if the answer has all spans of the step.")] = None
