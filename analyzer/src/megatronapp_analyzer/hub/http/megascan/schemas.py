"""Models of the answers about slowdowns. The OpenAPI document is made from these models."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.web.models import ApiModel

PeerSetName = Literal["work", "pooled"]
BlamedCauseName = Literal["compute", "host", "link", "collective", "other"]


class SlowCell(ApiModel):
    """Ranks of one stage and data-parallel rank, which are slow together."""

    stage: int
    replica: Annotated[int, Field(description="Data-parallel rank, or the first of `replicasPerCell`.")]
    ranks: list[int]
    slowdown: Annotated[
        float | None,
        Field(description="Ideal steps with only this cell as recorded, over ideal steps; null if not replayed."),
    ]
    steps: Annotated[list[float | None], Field(description="The same of each step.")]


class SlowLink(ApiModel):
    """Messages from one rank to another."""

    source: int
    destination: int
    messages: int
    seconds: Annotated[float, Field(description="Median from when both ends were ready to the end of the receive.")]
    usual_seconds: Annotated[float, Field(description="Median of the links between or within nodes, as this one is.")]
    crosses_nodes: bool
    slowdown: Annotated[
        float | None,
        Field(
            description="Ideal steps with only the messages of this link as recorded, over ideal steps; null if not "
            "replayed: at most 64 links are, those with the most time beyond the usual."
        ),
    ]


class SlowdownsView(ApiModel):
    """Time that the newest whole steps lost, and to which ranks, by replays with usual durations."""

    attempt: int
    peers: Annotated[PeerSetName, Field(description="Operations that are expected to take equally long.")]
    steps: list[int]
    recorded_seconds: list[float]
    ideal_seconds: list[float]
    slowdown: Annotated[float | None, Field(description="S: recorded over ideal; null without steps.")]
    cells: list[SlowCell]
    replicas_per_cell: Annotated[int, Field(description="Above 1 in very large jobs; a cell is then the slowest.")]
    kinds: Annotated[dict[str, float], Field(description="S_t: slowdown with only spans of a kind as recorded.")]
    slowest_fraction: Annotated[
        float | None, Field(description="M_W: fraction of the lost time that the slowest 3 % of the cells cost.")
    ]
    last_stage_fraction: Annotated[float | None, Field(description="M_S: the same of the last stage.")]
    links: Annotated[list[SlowLink], Field(description="At most 1,024, by slowdown, then by delay, longest first.")]
    launch_ratio: Annotated[
        float | None,
        Field(
            description="Launch delay: recorded steps over those without the time between spans; null without steps."
        ),
    ]
    skipped_steps: Annotated[int, Field(description="Steps whose records depend on each other in a circle.")]


class BlamedView(ApiModel):
    """Time that a step lost to one cause of some ranks."""

    ranks: Annotated[list[int], Field(description="Of a link [source, destination].")]
    cause: BlamedCauseName
    seconds: float


class VictimView(ApiModel):
    """A rank that waited because of the culprit."""

    rank: int
    waited_for: Annotated[int, Field(description="The culprit, or a victim nearer to it.")]
    seconds: float
    distance: Annotated[int, Field(description="1 if it waited for the culprit itself.")]


class BlameView(ApiModel):
    """Time that one step lost. Spans are places in the columns of the step's timeline (getTimeline)."""

    attempt: int
    step: int
    peers: PeerSetName
    recorded_seconds: float
    ideal_seconds: float
    blamed_seconds: Annotated[
        float, Field(description="Sum of all blame; recorded less ideal, but for the error of the method.")
    ]
    blamed: Annotated[list[BlamedView], Field(description="At most 32, largest first; the first is the culprit.")]
    victims: Annotated[list[VictimView], Field(description="At most 256, nearest to the culprit first.")]
    path: Annotated[
        list[int], Field(description="Spans that the length of the step depends on, in order: the 2,000 longest.")
    ]
    path_ranks: Annotated[list[int], Field(description="Rank of each span of the path.")]
    culprit_spans: Annotated[
        list[int], Field(description="Those of the path in which the culprit was slow: the 2,000 longest.")
    ]
    victim_spans: Annotated[list[int], Field(description="Spans in which victims waited: the 2,000 longest.")]


class TracedWorker(ApiModel):
    """Trace of one worker in the newest attempt."""

    worker: int
    node: str
    ranks: int
    connected: Annotated[bool, Field(description="Whether its agent is connected.")]
    lost: Annotated[int, Field(description="Records overwritten in a ring or dropped by the agent, of all attempts.")]
    clock_seconds: Annotated[
        float | None, Field(description="What its times may be wrong by against worker 0; null where unknown.")
    ]


class TracerView(ApiModel):
    """State of the tracer: completeness, clocks, and what it costs."""

    workers: list[TracedWorker]
    missing_ranks: list[int]
    overhead: Annotated[
        float | None, Field(description="Estimated cost of recording over step time, of the rank with the largest.")
    ]
    records: Annotated[int, Field(description="Records received since the hub started.")]
    stored_steps: Annotated[int, Field(description="Steps stored with all spans.")]
    stored_bytes: int
    lag_seconds: Annotated[float | None, Field(description="End of the newest whole step to its analysis.")]
    skipped_steps: Annotated[int, Field(description="Steps that the detector was too slow to judge.")]
    detector_failures: int
