"""Types of the block `analyzer`: agents and the hub."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Image, ObjectName, Resources
from megatronapp_common.job.api.policy import Seconds
from megatronapp_common.job.api.quantity import Quantity


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
