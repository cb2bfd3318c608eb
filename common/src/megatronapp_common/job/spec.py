"""What the user asks for."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.base import ManifestModel
from megatronapp_common.job.model import MAX_NODES, MAX_PROC_PER_NODE, Count, Model, Parallelism
from megatronapp_common.job.training import Checkpoint, Data, Index, Training

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
Seconds = Annotated[int, Field(ge=1, le=2_147_483_647)]
Argument = Annotated[str, Field(max_length=4096)]


class Trace(ManifestModel):
    """Recording of spans on every rank."""

    enabled: bool = False
    """Record spans; off means that nothing of it is loaded."""
    capacity: Annotated[int, Field(ge=1024, le=16_777_216)] | None = None
    """Records of 32 bytes that each rank's ring holds; left out: 65536."""


class Analyzer(ManifestModel):
    """Agents and the hub, which name slow ranks and serve the pages."""

    enabled: bool = False
    """Start an agent beside every worker and one hub."""
    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address that the hub listens on; anything but loopback lets other machines in (with a token)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port that the hub listens on; 0: a free one."""
    retain_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Seconds that the pages stay open after the end of the job."""


class Fault(ManifestModel):
    """Slowness made on purpose, for demonstrations."""

    rank: Index
    """Global rank that is made slow."""
    kind: Literal["compute", "host", "link"]
    """Compute spans last longer; stalls between spans; or receives are withheld."""
    factor: Annotated[float, Field(gt=1, le=100)]
    """How many times as long compute spans take; for host and link, 1 + the stall over a usual forward time."""
    from_step: Index
    """First step."""
    steps: Count
    """Number of steps."""
    peer: Index | None = None
    """With link: only receives from this rank; left out: from all."""


class EnvVar(ManifestModel):
    """A variable in the environment of every rank."""

    name: Annotated[str, Field(max_length=256, pattern=VARIABLE_PATTERN)]
    """Its name."""
    value: Annotated[str, Field(max_length=32768)] = ""
    """Its value."""


class Backoff(ManifestModel):
    """Growing pause before each restart of the gang."""

    initial_seconds: Annotated[float, Field(ge=0, le=86400)] = 10.0
    """Pause before the first restart."""
    max_seconds: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """Longest pause."""
    factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Each pause is so many times the one before."""


class RunPolicy(ManifestModel):
    """Restarts, deadlines, and what stays after the end."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the gang before the job fails."""
    backoff: Backoff = Backoff()
    """Pause before a restart."""
    reset_after_seconds: Seconds = 3600
    """A run that stayed healthy for so long gives the whole budget of restarts back."""
    active_deadline_seconds: Seconds | None = None
    """Longest life of the job over all attempts; left out: no limit."""
    start_deadline_seconds: Seconds | None = None
    """Longest time until all workers of an attempt run; left out: no limit."""
    progress_deadline_seconds: Seconds | None = None
    """Longest time without a finished step; left out: no limit."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Time to write a checkpoint after SIGTERM, before SIGKILL."""
    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which workers are removed once the job has ended."""


class Spec(ManifestModel):
    """What to train, on what, and how to keep it alive."""

    mode: Literal["train"] = "train"
    """What the job does."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Workers; left out: derived from the world size, else 1."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Ranks of each worker; left out: derived from the world size, else gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each worker; 0: train on the CPU."""
    parallelism: Parallelism = Parallelism()
    """Sizes of the parallel groups."""
    model: Model
    """Shape of the model."""
    training: Training
    """Batches, optimizer, schedules, intervals."""
    data: Data = Data()
    """What is trained on."""
    checkpoint: Checkpoint = Checkpoint()
    """Where and when the training is saved."""
    args: Annotated[tuple[Argument, ...], Field(max_length=512)] = ()
    """More flags in Megatron's spelling, each word an item: ["--lr", "3"]; they come last, so they win."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            max_length=512,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Environment of every rank."""
    trace: Trace = Trace()
    """Recording of spans on every rank."""
    analyzer: Analyzer = Analyzer()
    """Agents and the hub, which name slow ranks and serve the pages."""
    faults: Annotated[tuple[Fault, ...], Field(max_length=64)] = ()
    """Slowness made on purpose, for demonstrations; needs trace.enabled."""
    run_policy: RunPolicy = RunPolicy()
    """Restarts, deadlines, and what stays after the end."""
    suspend: bool = False
    """Stop the workers (with a checkpoint) and start them again when it becomes false."""
