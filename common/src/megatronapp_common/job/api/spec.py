"""Types of the spec of a job."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatronapp_common.job.api.analyzer import Analyzer
from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import (
    MAX_INITIALIZERS,
    QUALIFIED_PATTERN,
    Image,
    Initializer,
    Labels,
    ObjectName,
    ObjectReference,
    PodTemplate,
    PullPolicy,
    QualifiedName,
    Resources,
    SharedMemory,
    Toleration,
)
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE, Count, Model, Parallelism, Serve
from megatronapp_common.job.api.network import Network
from megatronapp_common.job.api.policy import RunPolicy, Scheduling
from megatronapp_common.job.api.runtimes import Dpp, Fbd
from megatronapp_common.job.api.scope import Scope
from megatronapp_common.job.api.training import Checkpoint, Data, Index, Training

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
Argument = Annotated[str, Field(max_length=4096)]


class Trace(ManifestModel):
    """Recording of spans on every rank."""

    enabled: bool = False
    """Record spans; without it no part of the recorder is loaded."""
    capacity: Annotated[int, Field(ge=1024, le=16_777_216)] | None = None
    """Records of 32 bytes that each rank's ring holds; defaults to 65536."""
    interval: Count | None = None
    """Steps from one window of detailed spans to the next; without any of these four fields there is no window."""
    continuous_iterations: Count | None = None
    """Steps of a window; defaults to 1."""
    granularity: Literal["base", "full"] | None = None
    """Spans in windows besides phases: tensor-parallel collectives (base), parts of layers, too (full, the default)."""
    directory: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder for the steps in windows, in files of MegatronApp's form, one per rank."""


class Fault(ManifestModel):
    """Slowness made on purpose, for demonstrations."""

    rank: Index
    """Global rank that is made slow."""
    kind: Literal["compute", "host", "link"]
    """Lengthen compute spans, stall between spans, or withhold receives."""
    factor: Annotated[float, Field(gt=1, le=100)]
    """How many times as long compute spans take; for host and link, 1 + the stall over a usual forward time."""
    from_step: Index
    """First step."""
    steps: Count
    """Number of steps."""
    peer: Index | None = None
    """Delay only receives from this rank, with kind link; defaults to all."""


class EnvVar(ManifestModel):
    """A variable in the environment of every rank."""

    name: Annotated[str, Field(max_length=256, pattern=VARIABLE_PATTERN)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] = ""
    """Value of the variable."""


class Spec(ManifestModel):
    """Desired state of a job: a model to train or serve, its resources, and how it is restarted."""

    profile: ObjectName | None = None
    """ClusterMegatronProfile below this spec; defaults to the one named default, if it exists."""
    mode: Literal["train", "serve"] = "train"
    """Train a model, or answer requests with the one of checkpoint.load until the job is deleted."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Workers; derived from the world size by default, otherwise 1."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Ranks of each worker; derived from the world size by default, otherwise gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each worker; 0: work on the CPU."""
    gpu_resource_name: QualifiedName = "nvidia.com/gpu"
    """Resource that represents a GPU on a cluster; resource.k8s.io/claims: podTemplate claims them."""
    parallelism: Parallelism = Parallelism()
    """Sizes of the parallel groups."""
    model: Model | None = None
    """Shape of the model; optional in mode serve, as the checkpoint has it."""
    training: Training | None = None
    """Batches, optimizer, schedules, intervals; required in mode train, and only allowed there."""
    serve: Serve | None = None
    """Address and limits of a served model; only allowed in mode serve."""
    scope: Scope | None = None
    """MegaScope of a served model, or of a training; needs analyzer.enabled."""
    dpp: Dpp = Dpp()
    """MegaDPP: a dynamic pipeline schedule."""
    fbd: Fbd = Fbd()
    """MegaFBD: forward and backward on separate ranks."""
    data: Data = Data()
    """Training data."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and loading of the training."""
    args: Annotated[tuple[Argument, ...], Field(max_length=512)] = ()
    """More flags in Megatron's spelling, an item for each argument: ["--lr", "3"]; they are appended, so they win."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            max_length=512,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Environment of every rank; from Secrets by podTemplate."""
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
    success_policy: Literal["AllWorkers", "Rank0"] = "AllWorkers"
    """Workers that must end with code 0 for the job to succeed: all, or the one with rank 0."""
    image: Image | None = None
    """Image of the workers on a cluster, with megatronapp_trainer in it; defaults to the operator's choice."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """Condition for pulling images."""
    image_pull_secrets: Annotated[tuple[ObjectReference, ...], Field(max_length=16)] = ()
    """Secrets for pulling images."""
    resources: Resources = Resources()
    """Resources of the trainer's container; GPUs and RDMA devices are added."""
    node_selector: Labels = Field(default={})
    """Labels of the nodes for workers, and for initializers of scope Job."""
    affinity: dict[str, Any] | None = None
    """Affinity of pods of workers, as in a pod's spec; without podAntiAffinity also of initializers of scope Job."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64)] = ()
    """Taints of nodes that workers tolerate; that of GPU nodes is added."""
    priority_class_name: ObjectName | None = None
    """Priority of all pods of the job."""
    scheduler_name: ObjectName | None = None
    """Scheduler of workers and initializers of scope Job; defaults to that of scheduling.gang for workers, otherwise
    the cluster's."""
    runtime_class_name: ObjectName | None = None
    """Container runtime of the workers."""
    service_account_name: ObjectName | None = None
    """Account of the workers, for image pulls and pod security; its token is not mounted."""
    pod_template: PodTemplate = PodTemplate()
    """Changes to the worker pods that no field of this spec makes."""
    shm: SharedMemory = SharedMemory()
    """The memory volume at /dev/shm."""
    network: Network = Network()
    """Connections between ranks of different nodes."""
    initializers: Annotated[
        tuple[Initializer, ...],
        Field(
            max_length=MAX_INITIALIZERS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Containers that bring data or weights before the ranks start, in this order."""
    scheduling: Scheduling = Scheduling()
    """Queue and gang scheduling."""
    managed_by: Annotated[str, Field(max_length=63, pattern=QUALIFIED_PATTERN)] | None = None
    """Another controller that manages this job instead of this operator, as domain/name; immutable."""
