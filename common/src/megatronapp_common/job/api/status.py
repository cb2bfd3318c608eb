"""Types of the status, written by the backend only; its counters are stored here only."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatronapp_common.job.api.base import StatusModel

Phase = Literal["Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]
TERMINAL_PHASES: frozenset[Phase] = frozenset({"Succeeded", "Failed"})
MAX_FAILURES = 10
"""Number of newest failures that are stored."""
Int32 = Annotated[int, Field(ge=0, le=2_147_483_647)]

Name = Annotated[str, Field(max_length=253)]
"""A name or an address: at most as long as a DNS name."""


class Condition(StatusModel):
    """One condition, in the API conventions' shape (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Created, Initialized, VolumesShared, PodsScheduled, HubReady, TokenAccepted, Running, Restarting, Suspended,
    SharedMemoryFull, Stalled, RemovalBlocked, SlowNodeDetected, FailureTarget, Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """True if the condition holds, Unknown if that cannot be observed."""
    reason: Annotated[str, Field(max_length=1024)]
    """CamelCase reason for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Sentence for users."""
    last_transition_time: str
    """When the status changed last, RFC 3339."""
    observed_generation: int | None = None
    """Generation of the spec that it was derived from."""


class ReplicaStatuses(StatusModel):
    """Numbers of workers by state."""

    desired: Int32 = 0
    """Workers of a gang."""
    pending: Int32 = 0
    """Workers created, not running yet."""
    running: Int32 = 0
    """Workers that run."""
    ready: Int32 = 0
    """Running workers whose training has begun."""
    succeeded: Int32 = 0
    """Workers that ended with code 0."""
    failed: Int32 = 0
    """Workers that ended otherwise."""


class Progress(StatusModel):
    """Progress of the training, from its progress document. Absent values are null."""

    attempt: int | None = None
    """Attempt that reported."""
    iteration: int | None = None
    """Number of finished steps; for a served model, of answered prompts."""
    total_iterations: int | None = None
    """Steps of the whole training."""
    loss: float | None = None
    """Loss of the newest step."""
    learning_rate: float | None = None
    """Learning rate of the newest step."""
    grad_norm: float | None = None
    """Norm of all gradients of the newest step."""
    tokens_per_second: float | None = None
    """Throughput over all ranks."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s of each rank as Megatron-LM counts them: half of the attention, no recomputation."""
    seconds_left: float | None = None
    """Estimated time to the end."""
    consumed_samples: int | None = None
    """Number of samples consumed."""
    validation_loss: float | None = None
    """Loss of the newest evaluation."""
    state: Literal["starting", "training", "evaluating", "saving", "done", "serving"] | None = None
    """Activity of the ranks."""
    updated_at: str | None = None
    """Real time of the report, RFC 3339."""


class RankTableEntry(StatusModel):
    """Placement of a worker's ranks."""

    index: Int32
    """Index of the worker."""
    address: Name
    """Address of the worker."""
    node: Name = ""
    """Node (real or simulated) that it runs on."""
    ranks: tuple[Int32, ...] = ()
    """Global ranks of the worker."""


class RankTable(StatusModel):
    """The table that the launchers agreed on."""

    attempt: Int32
    """Attempt that it belongs to."""
    digest: Name
    """Digest that changes with any entry."""
    master_addr: Name = ""
    """Address that torch's store listens on."""
    master_port: Int32 = 0
    """Port that torch's store listens on."""
    workers: tuple[RankTableEntry, ...] = ()
    """Workers in order; none if there are more than 32 of them."""
    ref: str | None = None
    """ConfigMap that holds a longer table, as `rank-table.json`."""


class PinnedSettings(StatusModel):
    """Settings that the pods of an attempt are made of, so that another release of the operator keeps them."""

    attempt: Int32
    """Attempt that the settings belong to."""
    trainer_image: str
    """Image of the workers."""
    analyzer_image: str
    """Image of agents and hub."""
    template_hash: str = ""
    """Digest of the rendered worker."""
    generation: int | None = None
    """Generation of the spec that the workers were made of; later edits wait for the next attempt."""
    key_id: str = ""
    """Id of the installation's key from which the tokens of the attempt are derived."""


class Failure(StatusModel):
    """End of an attempt: the first worker that failed by itself."""

    time: str
    """Time of the failure, RFC 3339."""
    attempt: Int32
    """Attempt that ended."""
    worker: int | None = None
    """Worker that failed first."""
    node: str | None = None
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
    action: str = ""
    """Action of the backend."""


class ExcludedNode(StatusModel):
    """A node on which this job runs no worker for a while."""

    node: str
    """Name of the node."""
    reason: str = ""
    """CamelCase reason for programs."""
    until: str
    """Time from which it may be used again, RFC 3339."""


class EndedWorker(StatusModel):
    """A failed worker of the current attempt, also after its pod is deleted."""

    index: Int32
    """Index of the worker."""
    exit_code: int | None = None
    """Exit code; absent if no record of it was found."""
    reason: str = ""
    """CamelCase reason for programs."""
    message: str = ""
    """Last lines of its log."""
    rank: int | None = None
    """Global rank that failed first in it."""
    signal: int | None = None
    """Signal that ended it."""
    node: str | None = None
    """Node that it ran on."""
    disrupted: str | None = None
    """Reason for which the cluster removed it."""
    started_at: str | None = None
    """Time at which it started, RFC 3339."""
    finished_at: str | None = None
    """Time at which it ended, RFC 3339."""
    deleted_at: str | None = None
    """Time at which its deletion was requested, RFC 3339."""
    grace_seconds: float | None = None
    """Seconds between the request and its deletion."""


class Status(StatusModel):
    """Observed state of the job."""

    phase: Phase = "Pending"
    """Summary for users, derived from the conditions."""
    observed_generation: int | None = None
    """Generation of the spec that the backend has seen."""
    conditions: tuple[Condition, ...] = Field(
        default=(), json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Conditions of the job, one entry per type."""
    attempt: Int32 = 0
    """Number of the gang's life, from 0."""
    restarts: Int32 = 0
    """Restarts of the gang so far."""
    restarts_towards_max: Int32 = 0
    """Restarts that are counted against runPolicy.maxRestarts."""
    world_size: int | None = None
    """Number of ranks."""
    data_parallel_size: int | None = None
    """Number of model replicas."""
    replica_statuses: ReplicaStatuses = ReplicaStatuses()
    """Numbers of workers by state."""
    progress: Progress | None = None
    """Progress of the training."""
    rank_table: RankTable | None = None
    """Placement of the ranks."""
    slow_ranks: tuple[dict[str, Any], ...] = ()
    """Current verdicts of the hub."""
    slow_node: str | None = None
    """Short name of what is slow now: a node, or "rank 3"."""
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes that new workers avoid, oldest first."""
    tolerated_nodes: tuple[ExcludedNode, ...] = ()
    """Slow nodes that may be used again, because the gang found no capacity without them."""
    hung_ranks: tuple[int, ...] = ()
    """Ranks without progress."""
    last_control: int | None = None
    """Newest control action through the hub that has an event."""
    failures: tuple[Failure, ...] = ()
    """The 10 newest failures, oldest first."""
    initialized: bool = False
    """True once the initializers are done; they run once per job."""
    init_restarts: Int32 = 0
    """Number of retries of the initializers."""
    init_clearing: bool | None = None
    """True while the failed pod of the initializers is being removed."""
    released: Int32 = 0
    """Number of releases of a gang that did not start completely, since one last ran or failed."""
    rank_zero_worker: int | None = None
    """Worker that holds rank 0 in the current attempt, where network.rankOrder does not fix it."""
    succeeded_workers: str | None = None
    """Workers of the current attempt that have succeeded, such as 0-3,7."""
    ended_workers: tuple[EndedWorker, ...] = ()
    """First workers of the current attempt that have failed, most likely culprit first."""
    start_time: str | None = None
    """Time at which the first attempt was created, RFC 3339."""
    attempt_time: str | None = None
    """Time at which the current attempt was created, RFC 3339."""
    holding_time: str | None = None
    """Time at which the first worker of the current attempt had a node, RFC 3339."""
    unplaced_time: str | None = None
    """Time since which a scheduler finds no node for a worker of the current attempt, RFC 3339."""
    scheduled_time: str | None = None
    """Time at which all workers of the current attempt had nodes, RFC 3339."""
    progress_time: str | None = None
    """Time of the last observed progress of the training, RFC 3339."""
    released_time: str | None = None
    """Time of the last release of a gang that did not start completely, RFC 3339."""
    denied_time: str | None = None
    """Time since which the pods of a job that has never run are denied, RFC 3339."""
    init_failed_time: str | None = None
    """Time of the last failure of the initializers, RFC 3339."""
    pod_groups: tuple[int, ...] | None = None
    """Attempts whose pod groups may still exist."""
    active_seconds: float | None = None
    """Seconds in which earlier gangs held nodes, since the job was last resumed."""
    running_time: str | None = None
    """Time at which all workers of the current attempt first ran, RFC 3339."""
    last_restart_time: str | None = None
    """Time of the last restart of the gang, RFC 3339."""
    completion_time: str | None = None
    """Time at which the job ended, RFC 3339."""
    pinned: PinnedSettings | None = None
    """Settings that the pods of the current attempt are made of."""
    manager: str | None = None
    """Installation that manages the job, as NAMESPACE/LEASE of its operator: the first that saw it, and no other."""
    hub_url: str | None = None
    """Address of the hub, while it listens."""
    serve_url: str | None = None
    """Address of the API of a served model."""
