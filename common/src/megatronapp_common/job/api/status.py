"""Types of the status, the only memory between two plans. Times are seconds since the epoch.

One description for everything: the plan builds these classes as plain dataclasses, `job.status` reads and writes them
by their annotations, and the schema of the CRD and the reference are made from the same annotations.
"""

import dataclasses
import enum
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue

from megatronapp_common.job.api.analyzer import SlowNodeCost, Verdict
from megatronapp_common.job.api.base import StatusModel
from megatronapp_common.job.api.profile import PROFILES_SCHEMA, Profile
from megatronapp_common.job.api.progress import STARTING, GangSize, Progress, TimeSpent
from megatronapp_common.job.api.status_fields import (
    CONFIG,
    EMPTY_IS_ABSENT,
    TEXT,
    Count,
    Flag,
    Index,
    Name,
    OptionalText,
    SchemaOf,
    StatusType,
    Time,
    WholeTime,
    is_falsy,
    requires,
)
from megatronapp_common.text.ranges import format_ranges, parse_ranges
from megatronapp_common.topology import FbdWorld

MAX_FAILURES = 10
"""Newest failures that a status keeps."""


class Phase(enum.StrEnum):
    """Summary for users and table columns; programs read the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    """The workers wait for a queue or a gang scheduler to place them."""
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


TERMINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class ConditionType(enum.StrEnum):
    """Types of conditions; names follow batch/v1 Job if it has one."""

    CREATED = "Created"
    PROFILE_APPLIED = "ProfileApplied"
    """False: a profile is missing or not valid, or the job breaks one of its locks; no attempt begins."""
    INITIALIZED = "Initialized"
    VOLUMES_SHARED = "VolumesShared"
    """False: a volume claim is missing, or cannot be mounted by all workers."""
    PODS_SCHEDULED = "PodsScheduled"
    HUB_READY = "HubReady"
    """False: the hub does not start; the gang runs without it."""
    TOKEN_ACCEPTED = "TokenAccepted"
    """False: hub or launcher reject the token that the operator derives; they have the secret of another key."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SHARED_MEMORY_FULL = "SharedMemoryFull"
    """True: rings and documents of a worker may be missing, because its shared memory has no space for them."""
    STALLED = "Stalled"
    PAUSED = "Paused"
    """True: a user has paused the training; its workers hold their devices."""
    REMOVAL_BLOCKED = "RemovalBlocked"
    """True: workers were killed but not removed."""
    SLOW_NODE_DETECTED = "SlowNodeDetected"
    SPARES_READY = "SparesReady"
    """False: fewer spares wait than runPolicy.spares asks for."""
    DATA_PARALLEL_REDUCED = "DataParallelReduced"
    """True: the gang has fewer model replicas than the spec, because nodes are missing (runPolicy.elastic)."""
    EVICTIONS_REFUSED = "EvictionsRefused"
    """True: a PodDisruptionBudget refuses evictions of the gang (runPolicy.disruption)."""
    FAILURE_TARGET = "FailureTarget"
    """True: the job is going to fail and its workers are being stopped. Failed follows when none is left."""
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition(StatusType):
    """One condition, in the API conventions' shape (metav1.Condition)."""

    __pydantic_config__ = CONFIG | requires("type", "status", "reason", "lastTransitionTime")

    type: Annotated[ConditionType, WithJsonSchema({"type": "string", "maxLength": 316})]
    """Created, ProfileApplied, Initialized, VolumesShared, PodsScheduled, HubReady, TokenAccepted, Running, Restarting,
    Suspended, SharedMemoryFull, Stalled, Paused, RemovalBlocked, SlowNodeDetected, SparesReady, DataParallelReduced,
    EvictionsRefused, FailureTarget, Complete, Failed."""
    status: Annotated[
        bool,
        PlainValidator(lambda text: text == "True"),
        PlainSerializer(str),
        WithJsonSchema({"type": "string", "enum": ["True", "False", "Unknown"]}),
    ] = False
    """True if the condition holds, Unknown if that cannot be observed."""
    reason: Annotated[str, Field(max_length=1024)] = ""
    """CamelCase reason for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Sentence for users."""
    since: Annotated[WholeTime, Field(alias="lastTransitionTime")] = 0.0
    """When the status changed last."""
    generation: Annotated[int, Field(alias="observedGeneration")] = 0
    """Generation of the spec that it was derived from."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replicas(StatusType):
    """Numbers of workers by state."""

    desired: Count = 0
    """Workers of a gang."""
    pending: Count = 0
    """Workers created, not running yet."""
    running: Count = 0
    """Workers that run."""
    ready: Count | None = dataclasses.field(default=None, compare=False)
    """Running workers whose training has begun."""  # set when the status is written
    succeeded: Count = 0
    """Workers that ended with code 0."""
    failed: Count = 0
    """Workers that ended otherwise."""


class RankTableEntry(StatusModel):
    """Placement of a worker's ranks."""

    index: Index
    """Index of the worker."""
    address: Name
    """Address of the worker."""
    node: Name = ""
    """Node (real or simulated) that it runs on."""
    ranks: tuple[Index, ...] = ()
    """Global ranks of the worker."""
    roles: tuple[Name, ...] | None = None
    """Role of each of these ranks with MegaFBD: forward or backward."""


class RankTable(StatusModel):
    """The table that the launchers agreed on."""

    attempt: Count
    """Attempt that it belongs to."""
    digest: Name
    """Digest that changes with any entry."""
    master_addr: Name = ""
    """Address that torch's store listens on."""
    master_port: Count = 0
    """Port that torch's store listens on."""
    workers: tuple[RankTableEntry, ...] = ()
    """Workers in order; none if there are more than 32 of them."""
    ref: str | None = None
    """ConfigMap that holds a longer table, as `rank-table.json`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FbdRanks(StatusType):
    """Ranks of both roles of MegaFBD."""

    forward_ranks: Count = 0
    """Ranks that run forward passes."""
    backward_ranks: Count = 0
    """Ranks that run backward passes and update weights."""
    backward_per_forward: Count = 1
    """Replicas whose backward ranks one forward rank serves."""

    @classmethod
    def of(cls, world: FbdWorld | None) -> "FbdRanks | None":
        """Return the counts of a world; None without MegaFBD."""
        if world is None:
            return None
        return cls(
            forward_ranks=world.forward_ranks,
            backward_ranks=world.backward_ranks,
            backward_per_forward=world.backward_per_forward,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSettings(StatusType):
    """Settings that the pods of an attempt are made of, so that another release of the operator keeps them."""

    attempt: Count
    """Attempt that the settings belong to."""
    trainer_image: str
    """Image of the workers."""
    analyzer_image: str
    """Image of agents and hub."""
    template_hash: str = ""
    """Digest of the rendered worker."""
    generation: int = 0
    """Generation of the spec that the workers were made of; later edits wait for the next attempt."""
    key_id: str = ""
    """Id of the installation's key from which the tokens of the attempt are derived."""
    profiles: Annotated[tuple[Profile, ...], Field(exclude_if=is_falsy), WithJsonSchema(PROFILES_SCHEMA)] = ()
    """Profiles of the attempt: kind, name, generation, template, locked."""


class FailureAction(enum.StrEnum):
    """Action of the plan about a failure."""

    FAIL_JOB = "FailJob"
    RESTART = "RestartJob"
    RESTART_IGNORE_MAX = "RestartJobIgnoreMax"
    EXCLUDE_AND_RESTART = "ExcludeNodeAndRestart"
    IGNORE = "Ignore"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure(StatusType):
    """End of an attempt: the first worker that failed by itself."""

    __pydantic_config__ = CONFIG | requires("time", "attempt")

    time: Time
    """Time of the failure."""
    attempt: Count = 0
    """Attempt that ended."""
    worker: int | None = None
    """Worker that failed first."""
    node: OptionalText = None
    """Node that it ran on."""
    rank: int | None = None
    """Global rank that failed first."""
    exit_code: int | None = None
    """Exit code of the rank."""
    signal: int | None = None
    """Signal that ended it."""
    reason: str = ""
    """CamelCase reason for programs."""
    message: str = ""
    """Sentence for users, with the last lines of the log."""
    action: Annotated[FailureAction, TEXT]
    """Action of the backend."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode(StatusType):
    """A node on which this job runs no worker for a while."""

    node: Annotated[str, EMPTY_IS_ABSENT]
    """Name of the node."""
    reason: str = ""
    """CamelCase reason for programs."""
    until: Time
    """Time from which it may be used again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorker(StatusType):
    """A failed worker of the current attempt, also after its pod is deleted."""

    index: Index
    """Index of the worker."""
    exit_code: int | None = None
    """Exit code; absent if no record of it was found."""
    reason: str | None = None
    """CamelCase reason for programs."""
    message: str | None = None
    """Last lines of its log."""
    rank: int | None = None
    """Global rank that failed first in it."""
    signal: int | None = None
    """Signal that ended it."""
    node: OptionalText = None
    """Node that it ran on."""
    disrupted: OptionalText = None
    """Reason for which the cluster removed it."""
    started_at: Time | None = None
    """Time at which it started."""
    finished_at: Time | None = None
    """Time at which it ended."""
    deleted_at: Time | None = None
    """Time at which its deletion was requested."""
    grace_seconds: float | None = None
    """Seconds between the request and its deletion."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Takeover(StatusType):
    """Place of a worker that the pod of a former spare holds."""

    worker: Index
    """Index of the worker."""
    pod: str
    """Name of the pod."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status(StatusType):
    """Observed state of the job, times by RFC 3339."""

    phase: Phase = Phase.PENDING
    """Summary for users, derived from the conditions."""
    generation: Annotated[int, Field(alias="observedGeneration")] = 0
    """Generation of the spec that the backend has seen."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Conditions of the job, one entry per type."""
    attempt: Count = 0
    """Number of the gang's life, from 0."""
    restarts: Count = 0
    """Restarts of the gang so far, at an equal size."""
    restarts_towards_max: Count = 0
    """Restarts that are counted against runPolicy.maxRestarts."""
    world_size: int | None = dataclasses.field(default=None, compare=False)
    """Number of ranks."""
    data_parallel_size: int | None = dataclasses.field(default=None, compare=False)
    """Number of model replicas."""
    fbd: FbdRanks | None = dataclasses.field(default=None, compare=False)
    """Ranks of both roles of MegaFBD."""
    replicas: Annotated[Replicas, Field(alias="replicaStatuses")] = Replicas()
    """Numbers of workers by state."""
    progress: Progress | None = None
    """Progress of the training."""
    rank_table: Annotated[dict[str, Any] | None, SchemaOf(RankTable)] = dataclasses.field(default=None, compare=False)
    """Placement of the ranks."""
    slow_ranks: tuple[Verdict, ...] = ()
    """Current verdicts of the hub."""
    slow_nodes: Annotated[tuple[SlowNodeCost, ...], Field(exclude_if=is_falsy)] = ()
    """Nodes named by slowRanks, costliest first."""
    slow_node: OptionalText = None
    """Short name of what is slow now: a node, or "rank 3"."""
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes that new workers avoid, oldest first."""
    tolerated_nodes: tuple[ExcludedNode, ...] = ()
    """Slow nodes that may be used again, because the gang found no capacity without them."""
    takeovers: Annotated[tuple[Takeover, ...], Field(exclude_if=is_falsy)] = ()
    """Places that pods of former spares hold in the current attempt."""
    gang_size: Annotated[GangSize | None, WithJsonSchema({"type": "object", "additionalProperties": True})] = None
    """Model replicas (data), where nodes were missing, and their first attempt (sinceAttempt)."""
    hung_ranks: tuple[int, ...] = ()
    """Ranks without progress."""
    last_control: int | None = None
    """Newest control action through the hub that has an event."""
    failures: tuple[Failure, ...] = ()
    """The 10 newest failures, oldest first."""
    initialized: Flag = False
    """True once the initializers are done; they run once per job."""
    init_restarts: Count = 0
    """Number of retries of the initializers."""
    init_clearing: Annotated[Flag, Field(exclude_if=is_falsy)] = False
    """True while the failed pod of the initializers is being removed."""
    released: Count = 0
    """Number of releases of a gang that did not start completely, since one last ran or failed."""
    rank_zero: Annotated[int | None, Field(alias="rankZeroWorker")] = None
    """Worker that holds rank 0 in the current attempt, where network.rankOrder does not fix it."""
    succeeded: Annotated[
        tuple[int, ...],
        PlainValidator(parse_ranges),
        PlainSerializer(format_ranges),
        TEXT,
        Field(alias="succeededWorkers", exclude_if=is_falsy),
    ] = ()
    """Workers of the current attempt that have succeeded, such as 0-3,7."""
    ended: Annotated[tuple[EndedWorker, ...], Field(alias="endedWorkers")] = ()
    """First workers of the current attempt that have failed, most likely culprit first."""
    start_time: Time | None = None
    """Time at which the first attempt was created."""
    attempt_time: Time | None = None
    """Time at which the current attempt was created."""
    holding_time: Time | None = None
    """Time at which the first worker of the current attempt had a node."""
    unplaced_time: Time | None = None
    """Time since which a scheduler finds no node for a worker of the current attempt."""
    scheduled_time: Time | None = None
    """Time at which all workers of the current attempt had nodes."""
    progress_time: Time | None = None
    """Time of the last observed progress of the training."""
    released_time: Time | None = None
    """Time of the last release of a gang that did not start completely."""
    denied_time: Time | None = None
    """Time since which the pods of a job that has never run are denied."""
    init_failed_time: Time | None = None
    """Time of the last failure of the initializers."""
    groups: Annotated[tuple[int, ...] | None, Field(alias="podGroups")] = None
    """Attempts whose pod groups may still exist."""
    active_s: Annotated[
        float,
        AfterValidator(lambda seconds: max(0.0, seconds)),
        Field(alias="activeSeconds", exclude_if=is_falsy),
    ] = 0.0
    """Seconds in which earlier gangs held nodes, since the job was last resumed."""
    running_time: Time | None = None
    """Time at which all workers of the current attempt first ran."""
    last_restart_time: Time | None = None
    """Time of the last restart of the gang."""
    completion_time: Time | None = None
    """Time at which the job ended."""
    time_spent: Annotated[TimeSpent | None, WithJsonSchema({"type": "object", "additionalProperties": True})] = None
    """Seconds by use."""
    pinned: PinnedSettings | None = dataclasses.field(default=None, compare=False)
    """Settings that the pods of the current attempt are made of."""
    manager: str | None = dataclasses.field(default=None, compare=False)
    """Installation that manages the job, as NAMESPACE/LEASE: the first that saw it."""
    hub_url: str | None = dataclasses.field(default=None, compare=False)
    """Address of the hub, while it listens."""
    serve_url: str | None = dataclasses.field(default=None, compare=False)
    """Address of the API of a served model."""

    @property
    def current_progress(self) -> Progress | None:
        """Progress of this attempt, if its ranks have reported any."""
        return self.progress if self.progress is not None and self.progress.attempt == self.attempt else None

    @property
    def trains(self) -> bool:
        """True once the ranks of this attempt have begun: groups, model and data are ready."""
        return self.current_progress is not None and self.current_progress.state != STARTING

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type, or None if it was never set."""
        return next((condition for condition in self.conditions if condition.type is kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Return True if the condition is set and true."""
        condition = self.condition(kind)
        return condition is not None and condition.status


def status_schema() -> JsonSchemaValue:
    """Return the JSON Schema of the status, with descriptions: reading these from the source is too slow elsewhere."""
    for kind in StatusType.__subclasses__():
        kind.__pydantic_config__["use_attribute_docstrings"] = True
    return TypeAdapter(Status).json_schema(by_alias=True)
