"""What the user asks for."""

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
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE, Count, Model, Parallelism
from megatronapp_common.job.api.network import Network
from megatronapp_common.job.api.policy import RunPolicy, Scheduling
from megatronapp_common.job.api.runtimes import Dpp, Fbd
from megatronapp_common.job.api.scope import Scope
from megatronapp_common.job.api.serve import Serve
from megatronapp_common.job.api.training import Checkpoint, Data, Index, Training

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
Argument = Annotated[str, Field(max_length=4096)]


class Trace(ManifestModel):
    """Recording of spans on every rank."""

    enabled: bool = False
    """Record spans; off means that nothing of it is loaded."""
    capacity: Annotated[int, Field(ge=1024, le=16_777_216)] | None = None
    """Records of 32 bytes that each rank's ring holds; left out: 65536."""


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


class Spec(ManifestModel):
    """What to train or serve, on what, and how to keep it alive."""

    mode: Literal["train", "serve"] = "train"
    """Train a model, or answer requests with the one of checkpoint.load until the job is deleted."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Workers; left out: derived from the world size, else 1."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Ranks of each worker; left out: derived from the world size, else gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each worker; 0: work on the CPU."""
    gpu_resource_name: QualifiedName = "nvidia.com/gpu"
    """Resource that stands for a GPU on a cluster."""
    parallelism: Parallelism = Parallelism()
    """Sizes of the parallel groups."""
    model: Model | None = None
    """Shape of the model; may be left out in mode serve only, as the checkpoint knows it."""
    training: Training | None = None
    """Batches, optimizer, schedules, intervals; needed in mode train, which it belongs to."""
    serve: Serve | None = None
    """Where and how much a served model answers; belongs to mode serve."""
    scope: Scope | None = None
    """MegaScope of a served model; belongs to mode serve with analyzer.enabled."""
    dpp: Dpp = Dpp()
    """MegaDPP: a dynamic pipeline schedule."""
    fbd: Fbd = Fbd()
    """MegaFBD: forward and backward on separate ranks."""
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
    success_policy: Literal["AllWorkers", "Rank0"] = "AllWorkers"
    """The job has succeeded once all workers ended with code 0, or once the one with rank 0 did."""
    image: Image | None = None
    """Image of the workers on a cluster, with megatronapp_trainer in it; left out: the operator's choice."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When images are pulled."""
    image_pull_secrets: Annotated[tuple[ObjectReference, ...], Field(max_length=16)] = ()
    """Secrets for pulling images."""
    resources: Resources = Resources()
    """What the trainer's container gets; GPUs and RDMA devices are added."""
    node_selector: Labels = Field(default={})
    """Labels of the nodes that workers, and initializers of scope Job, go to."""
    affinity: dict[str, Any] | None = None
    """Affinity of the pods of workers and of initializers of scope Job, as in a pod's spec."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64)] = ()
    """Taints of nodes that workers may stand; that of GPU nodes is added."""
    priority_class_name: ObjectName | None = None
    """Priority of all pods of the job."""
    scheduler_name: ObjectName | None = None
    """Scheduler of workers and of initializers of scope Job; left out: the one that scheduling.gang needs for workers,
    else the cluster's."""
    runtime_class_name: ObjectName | None = None
    """Container runtime of the workers."""
    service_account_name: ObjectName | None = None
    """Account of the workers, for image pulls and pod security; its token is not mounted."""
    pod_template: PodTemplate = PodTemplate()
    """Changes to the worker pods that no field of this spec makes."""
    shm: SharedMemory = SharedMemory()
    """The memory volume at /dev/shm."""
    network: Network = Network()
    """How the ranks of different nodes reach each other."""
    initializers: Annotated[
        tuple[Initializer, ...],
        Field(
            max_length=MAX_INITIALIZERS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Containers that bring data or weights before the ranks start, in this order."""
    scheduling: Scheduling = Scheduling()
    """Queue and gang."""
    managed_by: Annotated[str, Field(max_length=63, pattern=QUALIFIED_PATTERN)] | None = None
    """Another controller that takes care of this job instead of ours, as domain/name; cannot change."""
