"""What happens around the training: restarts, failures, deadlines, queues."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import LabelKey, ObjectName
from megatronapp_common.job.api.model import MAX_NODES
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
    """Each pause is so many times the one before."""


class NodeExclusion(ManifestModel):
    """Nodes that later attempts stay away from, because they failed or are slow."""

    enabled: bool = True
    """Keep such a list; false: no node is ever excluded."""
    max_nodes: Annotated[int, Field(ge=1, le=256)] = 5
    """So many at most; a node that fails takes the place of the oldest, a slow one waits until there is room. Of a gang
    that finds no room within startDeadlineSeconds a slow node may be used again, and is then tolerated (see
    status.toleratedNodes); the next time the oldest of all."""
    ttl_seconds: Seconds = 86400
    """Seconds after which a node is tried again."""
    allowed_nodes: Annotated[tuple[ObjectName, ...], Field(max_length=256)] = ()
    """Names of nodes that are never excluded. Adding a node here takes back its exclusion at once."""


class ExitCodes(ManifestModel):
    """Exit codes of a worker: those that match, or those that do not."""

    in_: _Codes | None = Field(default=None, alias="in")
    """One of these."""
    not_in: _Codes | None = None
    """None of these, and not 0."""


class FailureMatch(ManifestModel):
    """Which failures a rule is about: all that is given must fit."""

    exit_codes: ExitCodes | None = None
    """By the exit code of the worker that failed first."""
    signals: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=64)] | None = None
    """By the number of the signal that ended its rank."""
    reasons: Annotated[tuple[_Reason, ...], Field(min_length=1, max_length=32)] | None = None
    """By its reason, such as RankFailed, OOMKilled, Evicted or LostNode."""
    message_regex: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """By its message, which holds the last lines of the log: a regular expression (RE2) that fits a part of it."""
    condition_types: Annotated[tuple[_Reason, ...], Field(min_length=1, max_length=16)] | None = None
    """By a condition of the pod that is true: DisruptionTarget, or TerminationTarget, which Kueue sets."""
    workers: Annotated[tuple[Index, ...], Field(min_length=1, max_length=256)] | None = None
    """By the index of the worker."""


class FailureRule(ManifestModel):
    """What to do about some failures."""

    match: FailureMatch
    """Which ones."""
    action: Literal["FailJob", "RestartJob", "RestartJobIgnoreMax", "ExcludeNodeAndRestart", "Ignore"]
    """Fail, restart the gang, restart without counting it against maxRestarts, restart away from the worker's node, or
    do nothing about it."""


class RunPolicy(ManifestModel):
    """Restarts, deadlines, and what stays after the end."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the gang before the job fails. What the cluster takes away (preemption, eviction, a lost node) does
    not count; the pause before a restart grows with it all the same."""
    backoff: Backoff = Backoff()
    """Pause before a restart."""
    reset_after_seconds: Seconds = 3600
    """A run that stayed healthy for so long gives the whole budget of restarts back."""
    active_deadline_seconds: Seconds | None = None
    """Longest life of the job over all attempts; left out: no limit. Of a gang that a queue or gang scheduler places,
    only time in which it held a machine counts. Of other jobs all time counts from the first pods on, also that in
    which they wait for nodes and the pauses after a release. At its end workers have their time to write a checkpoint,
    then the job fails."""
    start_deadline_seconds: Seconds = 900
    """Longest time until all workers of an attempt have nodes; then all of them are given back and tried again later.
    The same again until all run; then the job fails, because an image or a volume is wrong, or, if it has run before,
    the gang is restarted. And once more until they have gathered (reason NotGathered; that restart counts). Time in
    which initializers run does not count."""
    progress_deadline_seconds: Seconds | None = None
    """Longest time without a finished step; left out: no limit. While neither hub nor launcher answers the operator it
    waits for them, up to an hour more."""
    lost_node_timeout_seconds: Seconds = 300
    """Seconds that a worker may be out of reach (node not ready, pod terminating after its grace period) until it is
    given up; the gang restarts then, which does not count against maxRestarts."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Time to write a checkpoint after SIGTERM, before SIGKILL."""
    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which workers are removed once the job has ended."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seconds after its end until the job itself is deleted; left out: never."""
    node_exclusion: NodeExclusion = NodeExclusion()
    """Nodes that later attempts stay away from."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=MAX_RULES)] = ()
    """What to do about failures: the first rule that matches decides, before the built-in ones."""


class TopologyRequest(ManifestModel):
    """How near to each other the workers should be."""

    level: LabelKey
    """Label of nodes whose value the workers should share, such as cloud.provider.com/rack."""
    required: bool = False
    """Wait until that is possible, instead of taking what there is."""


class Scheduling(ManifestModel):
    """Queue and gang: that all workers start together or none."""

    gang: Literal["None", "Kueue", "Volcano", "Coscheduling", "KAI"] = "None"
    """Who admits the gang; it must be installed in the cluster."""
    queue: ObjectName | None = None
    """Queue of Kueue (needed there), Volcano or KAI."""
    min_available: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Workers that must be placeable together: all, as if it were left out. A part of a gang cannot train."""
    timeout_seconds: Seconds | None = None
    """Longest time that placed workers wait for the others; left out: the scheduler's own."""
    topology: TopologyRequest | None = None
    """How near to each other the workers should be."""
