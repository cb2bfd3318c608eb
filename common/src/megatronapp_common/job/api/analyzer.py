"""Agents and the hub."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Image, ObjectName, Resources
from megatronapp_common.job.api.policy import Seconds
from megatronapp_common.job.api.quantity import Quantity


class SlowNode(ManifestModel):
    """What is done about a node that the hub has confirmed to be slow."""

    action: Literal["Report", "Exclude", "ExcludeAndRestart"] = "Report"
    """Say so, keep later attempts away from it (runPolicy.nodeExclusion), or do that and restart the gang at once."""
    min_slowdown: Annotated[float, Field(gt=1, le=100)] = 1.1
    """Nodes that make the step less than so many times as long are only reported."""
    min_seconds: Seconds = 120
    """Seconds for which a node must have been slow before it is excluded."""


class AnalyzerVolume(ManifestModel):
    """Where the hub keeps traces and verdicts on a cluster."""

    claim: ObjectName | None = None
    """A PersistentVolumeClaim; left out: a directory that lives as long as the hub's pod."""
    size_limit: Quantity = "10Gi"
    """Size of that directory, without claim."""


class Analyzer(ManifestModel):
    """Agents and the hub, which name slow ranks and serve the pages."""

    enabled: bool = False
    """Start an agent beside every worker and one hub."""
    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address of the hub without a cluster; anything but loopback lets other machines in (with a token)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the hub without a cluster; 0: a free one."""
    retain_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Seconds that the pages stay open after the end of the job, and after it was suspended."""
    image: Image | None = None
    """Image of agent and hub on a cluster; left out: the operator's choice."""
    resources: Resources = Resources()
    """What agent and hub get on a cluster, each; left out: small limits."""
    slow_node: SlowNode = SlowNode()
    """What is done about a slow node."""
    volume: AnalyzerVolume = AnalyzerVolume()
    """Where the hub keeps traces and verdicts on a cluster."""
