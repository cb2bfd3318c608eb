"""Models of the hub's requests and answers. The OpenAPI document is made from these models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatronapp_analyzer.hub.http.timeline.schemas import RoleName
from megatronapp_analyzer.hub.http.training.capture_schemas import CapturesSummary
from megatronapp_analyzer.hub.http.training.schemas import TrainingView
from megatronapp_analyzer.hub.state.faults import Fault
from megatronapp_analyzer.hub.state.progress import ForwardBackward, PipelinePlan, Progress
from megatronapp_common.web.models import ApiModel

RankStateName = Literal["training", "silent", "hung", "ended"]
HeatmapMetric = Literal["compute", "wait", "step", "slowdown"]
SeriesName = Literal[
    "loss", "learningRate", "gradNorm", "tokensPerSecond", "tflopsPerGpu", "validationLoss", "consumedSamples"
]


class Code(ApiModel):
    """Logs one browser in, once and within a minute, at `/#code=CODE`."""

    code: str


class JobEntry(ApiModel):
    """One line of the list of jobs."""

    name: str
    namespace: str
    phase: str
    uid: str
    here: Annotated[bool, Field(description="Whether this address has its pages.")] = True
    iteration: Annotated[int | None, Field(description="Finished steps, of a job that is not here.")] = None
    total_iterations: int | None = None
    restarts: int | None = None
    findings: list[str] = Field([], description="Sentences of its verdicts that are not cleared.")


class Layout(ApiModel):
    """Sizes of the parallel groups."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1


class OpenSpan(ApiModel):
    """The span that a rank is inside of now; its record is written when it ends."""

    kind: str
    step: int
    microbatch: int | None
    age_seconds: Annotated[float, Field(description="Seconds since the span began.")]


class RankView(ApiModel):
    """One rank of the newest attempt."""

    rank: int
    worker: int
    node: str
    local_rank: int
    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    role: Annotated[RoleName, Field(description="Passes of the rank; all without MegaFBD.")] = "all"
    device: str
    state: RankStateName
    step: Annotated[int | None, Field(description="Newest finished step.")]
    open_span: OpenSpan | None


class TracerHealth(ApiModel):
    """Completeness of the trace."""

    state: Literal["ok", "lossy", "off"]
    lost: Annotated[int, Field(description="Records overwritten in a ring or dropped by an agent.")]
    rings: int
    agents: Annotated[int, Field(description="Agents connected now.")]
    missing_ranks: Annotated[
        list[int], Field(description="Ranks that have not reported for long; the others are judged without them.")
    ]
    lag_seconds: Annotated[float | None, Field(description="End of the newest whole step to its analysis.")]


class JobView(ApiModel):
    """State of the job."""

    name: str
    namespace: str
    uid: str
    attempt: int
    phase: str
    spec_digest: str
    world_size: int
    layout: Layout
    ranks: list[RankView]
    faults: list[Fault]
    tracer: TracerHealth
    progress: Progress | None
    gpu_hour_price: Annotated[float | None, Field(description="spec.analyzer.gpuHourPrice; null if not set.")]
    training: Annotated[TrainingView | None, Field(description="Control of the training; null where it has none.")]
    captures: Annotated[
        CapturesSummary | None, Field(description="Captures of layers (getCaptures); null where there are none.")
    ]
    server_time: Annotated[float, Field(description="Seconds of real time.")]


class Subject(ApiModel):
    """Whom a verdict names. A link has ranks [source, destination], a group all ranks whose collectives are slow."""

    type: Literal["rank", "link", "group", "replica", "worker", "node", "stage", "job"]
    ranks: list[int]
    worker: int | None
    node: str | None


class Effect(ApiModel):
    """Cost of a fault."""

    seconds_per_step: float
    seconds_lost: Annotated[float | None, Field(description="Their sum over the steps in which it was active.")] = None
    slowdown: Annotated[float | None, Field(description="Step time over the step time without this cause.")]
    gpu_hours: Annotated[
        float | None, Field(description="Time that its GPUs have lost since it began; of its ranks without GPUs.")
    ] = None
    cost: Annotated[float | None, Field(description="The same at spec.analyzer.gpuHourPrice, if it is set.")] = None


class Evidence(ApiModel):
    """Why the detector says so."""

    steps: list[int]
    text: list[str]


class Moment(ApiModel):
    """A point in the life of the job."""

    attempt: int
    step: int
    time: Annotated[float, Field(description="Seconds of real time.")]


class VerdictView(ApiModel):
    """A named cause of lost time."""

    id: str
    subject: Subject
    cause: Literal[
        "compute",
        "memory",
        "host",
        "link",
        "nvlink-pcie",
        "data",
        "data-imbalance",
        "regression",
        "hang",
        "undetermined",
    ]
    reason: Annotated[
        Literal[
            "down-clock",
            "contention",
            "memory-bound",
            "garbage-collection",
            "cpu-contention",
            "cpu-steal",
            "cpu-throttled",
            "stopped",
        ]
        | None,
        Field(description="Finer reason of the cause, from spans and counters; null where they show none."),
    ] = None
    state: Literal["suspect", "confirmed", "recovering", "cleared"]
    effect: Effect
    confidence: float
    evidence: Evidence
    since: Moment
    until: Moment | None
    sentence: str
    stale: Annotated[
        bool, Field(description="Unknown now: the detector that reported it was lost, and no other has judged since.")
    ] = False


class Action(ApiModel):
    """A change that a user made through the hub. Ids grow, also over restarts of the hub."""

    id: int
    at: str
    """RFC 3339."""
    who: str
    """Whom the gateway names, else `controller token`."""
    what: str


class SharedMemory(ApiModel):
    """Room in the folder of rings and pages of one worker."""

    worker: int
    node: str
    path: str
    bytes: int
    free_bytes: int


class Summary(ApiModel):
    """Summary of the job that the operator polls."""

    attempt: int
    progress: Progress | None
    slow_ranks: Annotated[
        list[VerdictView] | None,
        Field(
            description="Confirmed or recovering; a verdict that is cleared is not listed any more. "
            "Null while the detector cannot be started."
        ),
    ]
    hung_ranks: Annotated[list[int] | None, Field(description="Null while the detector cannot be started.")]
    ranks: int
    tracer: TracerHealth
    full_shared_memory: list[SharedMemory] = Field(
        [], description="Workers whose shared memory has no room for another ring."
    )
    actions: list[Action] = Field([], description="The newest 256, oldest first.")


class Series(ApiModel):
    """Points of one curve, in order of arrival."""

    name: str
    attempts: list[int]
    steps: list[int]
    values: list[float | None]


class StepView(ApiModel):
    """Figures of one finished step."""

    attempt: int
    step: int
    start_ns: Annotated[int, Field(description="Real time of the earliest start, nanoseconds since 1970.")]
    duration_ns: int
    complete: Annotated[bool, Field(description="All ranks have delivered it.")]


class Heatmap(ApiModel):
    """Ranks by steps; seconds, or a ratio for `slowdown`; null where missing."""

    metric: HeatmapMetric
    attempts: list[int]
    steps: list[int]
    ranks: list[int]
    values: Annotated[list[list[float | None]], Field(description="values[rank][step]")]


class PlanPeriod(ApiModel):
    """A plan of MegaDPP and what its whole steps measured: those in the answer; without a range also the first 50."""

    plan: PipelinePlan
    steps: Annotated[int, Field(description="Measured steps.")]
    seconds: Annotated[float | None, Field(description="Median length of the passes of a step.")]
    bubble: Annotated[
        float | None, Field(description="Share of that in which a rank ran no pass, mean over the ranks.")
    ]
    rank_bubbles: Annotated[list[float | None], Field(description="The same of each rank, medians of its steps.")]
    early_per_step: Annotated[float | None, Field(description="Passes before their turn, mean of the steps.")]


class TransferView(ApiModel):
    """Messages from one rank to another by one path, in the newest steps."""

    source: int
    destination: int
    path: Annotated[str, Field(description="shared-memory, cuda-ipc, ucx, or path-N of a newer release.")]
    transfers: int
    bytes: int
    copy_seconds: Annotated[float, Field(description="Sum of the times of their copies, which may overlap.")]
    bytes_per_second: Annotated[float | None, Field(description="Bytes over the time of copies.")]


class PipelineView(ApiModel):
    """Plans and steps of a job's pipeline in its newest attempt. Columns of equal length, oldest step first."""

    attempt: int
    stages: Annotated[int, Field(description="Ranks of a pipeline.")]
    plans: Annotated[list[PlanPeriod], Field(description="Oldest first; none without MegaDPP. The last is in force.")]
    steps: Annotated[list[int], Field(description="Whole steps, the newest 500 of the range.")]
    seconds: Annotated[list[float], Field(description="From the first pass to the end of the last one.")]
    bubble: Annotated[
        list[float | None], Field(description="Share of that in which a rank ran no pass, mean over the ranks.")
    ]
    early: Annotated[list[int], Field(description="Passes that ran before their turn in the plan, of all ranks.")]
    passes: Annotated[list[int], Field(description="Passes of all ranks.")]
    transfers: Annotated[list[TransferView], Field(description="Sums over the newest steps; none without MegaDPP.")]
    transfer_steps: Annotated[int, Field(description="Steps that transfers are summed over.")]


class RoleView(ApiModel):
    """Ranks of one role of MegaFBD in the newest steps: medians over the steps, means over the ranks."""

    role: Literal["forward", "backward"]
    ranks: list[int]
    busy: Annotated[float | None, Field(description="Share of the passes' length in which a rank runs passes.")]
    pass_seconds: Annotated[
        float | None, Field(description="Passes of a microbatch, all chunks: F, or B and W together.")
    ]
    wait_seconds: Annotated[
        float | None,
        Field(description="Wait in a step: of backward ranks for shipments, of forward ranks for credits."),
    ]
    rank_busy: Annotated[list[float | None], Field(description="busy of each rank.")]
    rank_pass_seconds: Annotated[list[float | None], Field(description="passSeconds of each rank.")]
    rank_wait_seconds: Annotated[list[float | None], Field(description="waitSeconds of each rank.")]


class ForwardBackwardView(ApiModel):
    """Forward and backward ranks of a job in its newest attempt. Columns of equal length, oldest step first."""

    attempt: int
    state: Annotated[ForwardBackward | None, Field(description="As the reporting rank published it.")]
    roles: Annotated[list[RoleView], Field(description="Forward, then backward ranks; none without MegaFBD.")]
    role_steps: Annotated[int, Field(description="Newest steps of which roles and transfers are.")]
    steps: Annotated[list[int], Field(description="Whole steps, the newest 500 of the range.")]
    seconds: Annotated[list[float], Field(description="From the first pass to the end of the last one.")]
    forward_busy: Annotated[list[float | None], Field(description="Mean over the forward ranks.")]
    backward_busy: Annotated[list[float | None], Field(description="Mean over the backward ranks.")]
    forward_seconds: Annotated[list[float | None], Field(description="F of a microbatch, mean over the ranks.")]
    backward_seconds: Annotated[list[float | None], Field(description="B and W of a microbatch, mean over the ranks.")]
    shipment_wait_seconds: Annotated[
        list[float | None], Field(description="Wait for shipments, mean over the backward ranks.")
    ]
    credit_wait_seconds: Annotated[
        list[float | None], Field(description="Wait for credits, mean over the forward ranks.")
    ]
    transfers: Annotated[list[TransferView], Field(description="Shipments by pair and path, sums over roleSteps.")]


class TraceDocument(ApiModel):
    """Chrome trace, opened by Perfetto and chrome://tracing."""

    trace_events: list[dict[str, Any]]
    display_time_unit: Literal["ms", "ns"]
    metadata: dict[str, Any]


class Health(ApiModel):
    """Answer of the probes."""

    status: Literal["ok", "starting"]
