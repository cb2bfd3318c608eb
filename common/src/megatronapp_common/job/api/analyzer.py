"""Types of the block `analyzer`, agents and the hub, and of the verdicts that the status holds."""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AliasPath, Field, PlainSerializer, WithJsonSchema

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Image, ObjectName, Resources
from megatronapp_common.job.api.policy import Seconds
from megatronapp_common.job.api.quantity import Quantity
from megatronapp_common.job.api.status_fields import CONFIG, EMPTY_IS_ABSENT, OptionalText, StatusType, Time, requires


class SlowNode(ManifestModel):
    """Action on a node that the hub has confirmed to be slow."""

    action: Literal["Report", "Exclude", "ExcludeAndRestart", "SwapAtCheckpoint"] = "Report"
    """Only report the node, exclude it from later attempts (runPolicy.nodeExclusion), or also restart the gang: at
    once, or with the next checkpoint and a spare (runPolicy.spares)."""
    min_slowdown: Annotated[float, Field(gt=1, le=100)] = 1.1
    """Least factor by which a node lengthens the step; below it the node is only reported."""
    min_seconds: Seconds = 120
    """Seconds for which a node must have been slow before it is excluded."""


class AnalyzerVolume(ManifestModel):
    """Storage of the hub's traces and verdicts on a cluster."""

    claim: ObjectName | None = None
    """A PersistentVolumeClaim; defaults to a directory that lives as long as the hub's pod."""
    size_limit: Quantity = "10Gi"
    """Size of that directory. On a claim the hub stores no more than this either: write at most the claim's size."""


class Analyzer(ManifestModel):
    """Agents and the hub, which name slow ranks and serve the pages."""

    enabled: bool = False
    """Start one hub, and an agent for every worker."""
    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address of the hub without a cluster; anything but loopback admits other machines (with a token)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the hub without a cluster; 0: a free one."""
    retain_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Seconds that the pages stay open after the end of the job, and after it was suspended."""
    image: Image | None = None
    """Image of agent and hub on a cluster; defaults to the operator's choice."""
    resources: Resources = Resources()
    """Resources of agent and hub on a cluster, each; defaults to small limits."""
    gpu_hour_price: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Price of a GPU-hour, in any currency, by which verdicts have a cost in money; without it only in GPU-hours."""
    slow_node: SlowNode = SlowNode()
    """Action on a node that is confirmed to be slow."""
    volume: AnalyzerVolume = AnalyzerVolume()
    """Storage of the hub's traces and verdicts on a cluster."""


def _verdict_document(verdict: "SlowRank") -> dict[str, Any]:
    """Return a verdict in the form of the hub's summary, without absent values."""
    subject = {"type": verdict.subject, "ranks": list(verdict.ranks), "worker": verdict.worker, "node": verdict.node}
    effect = {
        "secondsPerStep": verdict.seconds_per_step,
        "slowdown": verdict.slowdown,
        "gpuHours": verdict.gpu_hours,
        "cost": verdict.cost,
    }
    since = {"attempt": verdict.since_attempt, "step": verdict.since_step, "time": verdict.since_time}
    return {
        "id": verdict.id,
        "subject": {name: value for name, value in subject.items() if value is not None},
        "cause": verdict.cause,
        "state": verdict.state,
        "effect": {name: value for name, value in effect.items() if value is not None},
        "since": {name: value for name, value in since.items() if value is not None},
        "sentence": verdict.sentence,
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(StatusType):
    """A verdict of the hub, shortened for the status."""

    id: Annotated[str, EMPTY_IS_ABSENT]
    subject: Annotated[str, Field(validation_alias=AliasPath("subject", "type"))] = ""
    """Kind of the subject: rank, link, group, replica, worker, node, stage or job."""
    ranks: Annotated[tuple[int, ...], Field(validation_alias=AliasPath("subject", "ranks"))] = ()
    cause: str = ""
    state: str = ""
    sentence: str = ""
    since_step: Annotated[int | None, Field(validation_alias=AliasPath("since", "step"))] = None
    slowdown: Annotated[float | None, Field(validation_alias=AliasPath("effect", "slowdown"))] = None
    seconds_per_step: Annotated[float | None, Field(validation_alias=AliasPath("effect", "secondsPerStep"))] = None
    gpu_hours: Annotated[float | None, Field(validation_alias=AliasPath("effect", "gpuHours"))] = None
    """Time that all ranks of the job have lost to it since it began."""
    cost: Annotated[float | None, Field(validation_alias=AliasPath("effect", "cost"))] = None
    """The same in money, where the manifest has a price of a GPU-hour."""
    worker: Annotated[int | None, Field(validation_alias=AliasPath("subject", "worker"))] = None
    node: Annotated[OptionalText, Field(validation_alias=AliasPath("subject", "node"))] = None
    """Node of the subject in the attempt of the verdict."""
    since_attempt: Annotated[int | None, Field(validation_alias=AliasPath("since", "attempt"))] = None
    since_time: Annotated[float | None, Field(validation_alias=AliasPath("since", "time"))] = None


Verdict = Annotated[
    SlowRank, PlainSerializer(_verdict_document), WithJsonSchema({"type": "object", "additionalProperties": True})
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowNodeCost(StatusType):
    """A node that is slow now, with what the job has lost to that."""

    __pydantic_config__ = CONFIG | requires("node")

    node: Annotated[str, EMPTY_IS_ABSENT]
    """Name of the node."""
    ranks: tuple[int, ...] = ()
    """Its slow ranks."""
    causes: tuple[str, ...] = ()
    """Causes of the verdicts."""
    since: Time | None = None
    """Begin of the oldest one."""
    gpu_hours: float | None = None
    """GPU-hours lost to them."""
    cost: float | None = None
    """The same in money, by analyzer.gpuHourPrice."""
