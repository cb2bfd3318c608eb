"""What the backend has seen. Written by the backend only; counters live here and nowhere else."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatronapp_common.job.api.base import StatusModel

Phase = Literal["Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]
TERMINAL_PHASES: frozenset[Phase] = frozenset({"Succeeded", "Failed"})
MAX_FAILURES = 10
"""So many of the newest failures are kept."""
Int32 = Annotated[int, Field(ge=0, le=2_147_483_647)]

Name = Annotated[str, Field(max_length=253)]
"""A name or an address: no longer than a DNS name may be."""


class Condition(StatusModel):
    """One condition, in the API conventions' shape (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Created, Initialized, VolumesShared, PodsScheduled, HubReady, TokenAccepted, Running, Restarting, Suspended,
    SharedMemoryFull, Stalled, RemovalBlocked, SlowNodeDetected, FailureTarget, Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=1024)]
    """One CamelCase word for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """A sentence for people."""
    last_transition_time: str
    """When the status changed last, RFC 3339."""
    observed_generation: int | None = None
    """Generation of the spec that it was derived from."""


class ReplicaStatuses(StatusModel):
    """Workers by state."""

    desired: Int32 = 0
    """Workers of a gang."""
    pending: Int32 = 0
    """Created, not running yet."""
    running: Int32 = 0
    """Running."""
    ready: Int32 = 0
    """Running, and training has begun."""
    succeeded: Int32 = 0
    """Ended with code 0."""
    failed: Int32 = 0
    """Ended otherwise."""


class Progress(StatusModel):
    """How far the training is: the progress page. Absent values are null."""

    attempt: int | None = None
    """Attempt that reported."""
    iteration: int | None = None
    """Finished steps; of a served model, prompts that have been answered."""
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
    """Samples seen so far."""
    validation_loss: float | None = None
    """Loss of the newest evaluation."""
    state: Literal["starting", "training", "evaluating", "saving", "done", "serving"] | None = None
    """What the ranks are doing."""
    updated_at: str | None = None
    """Real time of the report, RFC 3339."""


class RankTableEntry(StatusModel):
    """Where a worker's ranks are."""

    index: Int32
    """Worker."""
    address: Name
    """Its address."""
    node: Name = ""
    """Machine (or pretended machine) that it runs on."""
    ranks: tuple[Int32, ...] = ()
    """Global ranks."""


class RankTable(StatusModel):
    """The table that the launchers agreed on."""

    attempt: Int32
    """Attempt that it belongs to."""
    digest: Name
    """Changes with any entry."""
    master_addr: Name = ""
    """Address that torch's store listens on."""
    master_port: Int32 = 0
    """Port that torch's store listens on."""
    workers: tuple[RankTableEntry, ...] = ()
    """Workers in order; none if there are more than 32 of them."""
    ref: str | None = None
    """ConfigMap that holds a longer table, as `rank-table.json`."""


class PinnedSettings(StatusModel):
    """What the pods of an attempt are made of, so that another release of the operator goes on with the same."""

    attempt: Int32
    """Attempt that it holds for."""
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
    """Why an attempt ended: the first worker that failed by itself."""

    time: str
    """When, RFC 3339."""
    attempt: Int32
    """Attempt that ended."""
    worker: int | None = None
    """Worker that failed first."""
    node: str | None = None
    """Machine that it ran on."""
    rank: int | None = None
    """Global rank that failed first."""
    exit_code: int | None = None
    """Exit code."""
    signal: int | None = None
    """Signal that ended it."""
    reason: str = ""
    """One CamelCase word for programs."""
    message: str = ""
    """A sentence for people, with the last lines of the log."""
    action: str = ""
    """What the backend did about it."""


class ExcludedNode(StatusModel):
    """A machine that gets no worker of this job for a while."""

    node: str
    """Its name."""
    reason: str = ""
    """One CamelCase word for programs."""
    until: str
    """When it may be used again, RFC 3339."""


class EndedWorker(StatusModel):
    """A worker of the current attempt that was seen to fail; its pod may be gone."""

    index: Int32
    """Worker."""
    exit_code: int | None = None
    """Exit code; left out where no record was found."""
    reason: str = ""
    """One CamelCase word for programs."""
    message: str = ""
    """Its last words."""
    rank: int | None = None
    """Global rank that failed first in it."""
    signal: int | None = None
    """Signal that ended it."""
    node: str | None = None
    """Machine that it ran on."""
    disrupted: str | None = None
    """Why the cluster took it away."""
    started_at: str | None = None
    """When it started, RFC 3339."""
    finished_at: str | None = None
    """When it ended, RFC 3339."""
    deleted_at: str | None = None
    """When it was asked to go, RFC 3339."""
    grace_seconds: float | None = None
    """How long it had to go."""


class Status(StatusModel):
    """State of the job."""

    phase: Phase = "Pending"
    """Summary for people; derived from the conditions."""
    observed_generation: int | None = None
    """Generation of the spec that the backend has seen."""
    conditions: tuple[Condition, ...] = Field(
        default=(), json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """One entry per type."""
    attempt: Int32 = 0
    """Life of the gang, counted from 0."""
    restarts: Int32 = 0
    """Restarts of the gang so far."""
    restarts_towards_max: Int32 = 0
    """Restarts that count against runPolicy.maxRestarts."""
    world_size: int | None = None
    """Ranks in all."""
    data_parallel_size: int | None = None
    """Model replicas."""
    replica_statuses: ReplicaStatuses = ReplicaStatuses()
    """Workers by state."""
    progress: Progress | None = None
    """How far the training is."""
    rank_table: RankTable | None = None
    """Where the ranks are."""
    slow_ranks: tuple[dict[str, Any], ...] = ()
    """Verdicts of the hub that stand now."""
    slow_node: str | None = None
    """What is slow now, in a word: a machine, or "rank 3"."""
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    """Machines that the next workers avoid, oldest first."""
    tolerated_nodes: tuple[ExcludedNode, ...] = ()
    """Slow machines that workers may get all the same, because the gang found no room without them."""
    hung_ranks: tuple[int, ...] = ()
    """Ranks without progress."""
    last_control: int | None = None
    """The newest of the control actions through the hub that have an event."""
    failures: tuple[Failure, ...] = ()
    """The 10 newest failures, oldest first."""
    initialized: bool = False
    """The initializers are done; they run once per job."""
    init_restarts: Int32 = 0
    """How often the initializers were started again."""
    init_clearing: bool | None = None
    """The pod of the initializers has failed and is being removed."""
    released: Int32 = 0
    """How often a gang that did not start whole was released since one last ran or failed."""
    rank_zero_worker: int | None = None
    """Worker that holds rank 0 in the current attempt, where network.rankOrder does not settle that before."""
    succeeded_workers: str | None = None
    """Workers of the current attempt that have succeeded, such as 0-3,7."""
    ended_workers: tuple[EndedWorker, ...] = ()
    """The first workers of the current attempt that have failed, most likely culprit first."""
    start_time: str | None = None
    """When the first attempt was created, RFC 3339."""
    attempt_time: str | None = None
    """When the current attempt was created, RFC 3339."""
    holding_time: str | None = None
    """When the first worker of the current attempt had a machine, RFC 3339."""
    unplaced_time: str | None = None
    """Since when a scheduler finds no machine for a worker of the current attempt, RFC 3339."""
    scheduled_time: str | None = None
    """When all workers of the current attempt had machines, RFC 3339."""
    progress_time: str | None = None
    """When the training was last seen to go on, RFC 3339."""
    released_time: str | None = None
    """When a gang that did not start whole was released last, RFC 3339."""
    denied_time: str | None = None
    """Since when something denies the pods of a job that has never run, RFC 3339."""
    init_failed_time: str | None = None
    """When the initializers failed last, RFC 3339."""
    pod_groups: tuple[int, ...] | None = None
    """Attempts whose pod groups may still exist."""
    active_seconds: float | None = None
    """Time in which earlier gangs held machines, since the job was last resumed."""
    running_time: str | None = None
    """When all workers of the current attempt ran first, RFC 3339."""
    last_restart_time: str | None = None
    """When the gang was restarted last, RFC 3339."""
    completion_time: str | None = None
    """When the job ended, RFC 3339."""
    pinned: PinnedSettings | None = None
    """What the pods of the current attempt are made of."""
    manager: str | None = None
    """Installation that manages the job, as NAMESPACE/LEASE of its operator: the first that saw it, and no other."""
    hub_url: str | None = None
    """Where the hub listens, while it does."""
    serve_url: str | None = None
    """Where the API of a served model answers."""
