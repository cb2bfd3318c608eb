"""Types of the life of a job: restarts, failures, deadlines, queues."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import LabelKey, ObjectName
from megatronapp_common.job.api.model import MAX_NODES, MAX_RANKS
from megatronapp_common.job.api.training import Index

Seconds = Annotated[int, Field(ge=1, le=2_147_483_647)]
ExitStatus = Annotated[int, Field(ge=0, le=255)]
MAX_RULES = 20
_Codes = Annotated[tuple[ExitStatus, ...], Field(min_length=1, max_length=256)]
_Reason = Annotated[str, Field(min_length=1, max_length=128)]


class Backoff(ManifestModel):
    """Growing pause before each restart of the gang."""

    initial_seconds: Annotated[float, Field(ge=0, le=86400)] = 10.0
    """Pause before the first restart."""
    max_seconds: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """Longest pause."""
    factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Ratio of each pause to the one before."""


class NodeExclusion(ManifestModel):
    """Exclusion of nodes from later attempts, because they failed or are slow."""

    enabled: bool = True
    """Exclude nodes; if false, no node is ever excluded."""
    max_nodes: Annotated[int, Field(ge=1, le=256)] = 5
    """Largest number of excluded nodes; a failed node replaces the oldest, a slow one waits for a free place. Without
    capacity within startDeadlineSeconds a slow node is used again (status.toleratedNodes), the next time
    the oldest of all."""
    ttl_seconds: Seconds = 86400
    """Seconds after which a node is tried again."""
    allowed_nodes: Annotated[tuple[ObjectName, ...], Field(max_length=256)] = ()
    """Names of nodes that are never excluded. Adding a node here ends its exclusion at once."""


class ExitCodes(ManifestModel):
    """Exit codes of a worker, listed or excepted."""

    in_: _Codes | None = Field(default=None, alias="in")
    """Match any of these codes."""
    not_in: _Codes | None = None
    """Match all codes but these and 0."""


class FailureMatch(ManifestModel):
    """Conditions on a failure, all of which must match."""

    exit_codes: ExitCodes | None = None
    """Exit code of the worker that failed first."""
    signals: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=64)] | None = None
    """Signal that ended its rank, by number."""
    reasons: Annotated[tuple[_Reason, ...], Field(min_length=1, max_length=32)] | None = None
    """Reason of the failure, such as RankFailed, OOMKilled, Evicted or LostNode."""
    message_regex: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Regular expression (RE2) that matches a part of its message, which has the last lines of the log."""
    condition_types: Annotated[tuple[_Reason, ...], Field(min_length=1, max_length=16)] | None = None
    """Condition of the pod that is true: DisruptionTarget, or TerminationTarget, which Kueue sets."""
    workers: Annotated[tuple[Index, ...], Field(min_length=1, max_length=256)] | None = None
    """Index of the worker."""


class FailureRule(ManifestModel):
    """Action on matching failures."""

    match: FailureMatch
    """Failures that the rule is for."""
    action: Literal["FailJob", "RestartJob", "RestartJobIgnoreMax", "ExcludeNodeAndRestart", "Ignore"]
    """Fail the job, restart the gang, restart without counting it against maxRestarts, restart without the worker's
    node, or do nothing."""


class Elastic(ManifestModel):
    """Smaller gang while nodes are missing."""

    min_data: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    """Fewest model replicas."""
    patience_seconds: Annotated[int, Field(ge=60, le=86400)] = 300
    """Seconds without a node for a worker until the gang continues with fewer replicas."""


class RunPolicy(ManifestModel):
    """Restarts, deadlines, and removal after the end."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the gang before the job fails. Disruptions by the cluster (preemption, eviction, a lost node) only
    lengthen the pause before a restart."""
    restart: Literal["Pods", "InPlace"] = "Pods"
    """Restart with new pods, or in the same ones; a pod at fault is replaced."""
    spares: Annotated[int, Field(ge=0, le=16)] = 0
    """Further workers that wait and take the places of pods at fault; needs restart: InPlace."""
    elastic: Elastic | None = None
    """Continue with fewer model replicas if a lost node cannot be replaced; needs restart: InPlace."""
    disruption: Literal["Allow", "Protect", "CheckpointFirst"] = "Allow"
    """Let drains and autoscalers evict the gang at any time, never, or while its newest checkpoint is young."""
    checkpoint_age_seconds: Seconds = 300
    """Age up to which that checkpoint is young, with CheckpointFirst; more than the time in which one is written."""
    backoff: Backoff = Backoff()
    """Pause before a restart."""
    reset_after_seconds: Seconds = 3600
    """Seconds of a healthy run after which the count of restarts is reset."""
    active_deadline_seconds: Seconds | None = None
    """Longest life of the job from its first pods on, over all attempts; no limit by default. Where a queue or gang
    scheduler places the gang, time without nodes is not counted. Workers have their grace period to write a checkpoint,
    then the job fails."""
    start_deadline_seconds: Seconds = 900
    """Longest time until all workers of an attempt have nodes; then they are released and retried later. It also
    applies until all run (then the job fails, or restarts if it has run before), and until they have gathered (a
    counted restart, NotGathered). Initializers are not counted."""
    progress_deadline_seconds: Seconds | None = None
    """Longest time without a finished step; defaults to no limit. While neither hub nor launcher answers, up to an hour
    more."""
    lost_node_timeout_seconds: Seconds = 300
    """Seconds that a worker may be unreachable (node not ready, pod terminating after its grace period) until the gang
    restarts, which is not counted."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Time to write a checkpoint after SIGTERM, before SIGKILL."""
    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Workers that are removed once the job has ended."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seconds after its end until the job itself is deleted; defaults to never."""
    node_exclusion: NodeExclusion = NodeExclusion()
    """Exclusion of nodes from later attempts."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=MAX_RULES)] = ()
    """Actions on failures: the first rule that matches decides, before the built-in ones."""


class TopologyRequest(ManifestModel):
    """Wanted proximity of the workers."""

    level: LabelKey
    """Label of nodes whose value the workers should share, such as cloud.provider.com/rack."""
    required: bool = False
    """Wait until the level is possible, instead of taking any nodes."""


class Scheduling(ManifestModel):
    """Queue and gang: all workers start together or none."""

    gang: Literal["None", "Kueue", "Volcano", "Coscheduling", "KAI", "Kubernetes"] = "None"
    """Scheduler that admits the gang; it must be installed in the cluster. Kubernetes: the cluster's own."""
    queue: ObjectName | None = None
    """Queue of Kueue (needed there), Volcano or KAI."""
    min_available: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Workers that must be placeable together: all, the default, as a part of a gang cannot train."""
    timeout_seconds: Seconds | None = None
    """Longest time that placed workers wait for the others; defaults to the scheduler's own."""
    topology: TopologyRequest | None = None
    """Wanted proximity of the workers."""
