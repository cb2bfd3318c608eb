"""What a job asks of a cluster: images, resources, where its pods may go, volumes and initializers.

None of it has an effect without a cluster.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.quantity import Quantity

OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
QUALIFIED_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
IMAGE_PATTERN = r"^[^\s]+$"
URI_PATTERN = r"^[a-z][a-z0-9+.-]*://[^\s/@]*(/[^\s]*)?$"
MAX_INITIALIZERS = 8
MAX_ENTRIES = 64
"""Entries of a map: labels, resources, variables of NCCL."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN)]
DnsName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
QualifiedName = Annotated[str, Field(max_length=317, pattern=QUALIFIED_PATTERN)]
LabelKey = Annotated[str, Field(max_length=317, pattern=LABEL_KEY_PATTERN)]
Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=IMAGE_PATTERN)]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
Place = Annotated[str, Field(min_length=1, max_length=1024)]
"""A path inside of a container."""
LabelText = Annotated[str, Field(max_length=4096)]
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=MAX_ENTRIES)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=65536)]], Field(max_length=MAX_ENTRIES)]
Amounts = Annotated[dict[str, Quantity], Field(max_length=MAX_ENTRIES)]


class ObjectReference(ManifestModel):
    """Another object of the job's namespace, by its name."""

    name: ObjectName
    """Its name."""


class Resources(ManifestModel):
    """What a container gets, as quantities by resource: {cpu: 8, memory: 64Gi}."""

    requests: Amounts = Field(default={})
    """What the scheduler sets aside; a resource that is left out: its limit."""
    limits: Amounts = Field(default={})
    """What the container may not pass."""


class Toleration(ManifestModel):
    """A taint of nodes that the pods may stand."""

    key: LabelKey | None = None
    """Key of the taint; left out, with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Any value, or this one; left out: Equal."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; left out: all of them."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """With effect NoExecute, seconds until the pod must go; left out: it stays."""


class PodMetadata(ManifestModel):
    """Labels and annotations of worker pods."""

    labels: Labels = Field(default={})
    """More labels; those that the operator sets itself cannot be given."""
    annotations: Annotations = Field(default={})
    """More annotations."""


class PodTemplate(ManifestModel):
    """Changes to the worker pods that no field of this spec makes. They come last."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations. Workers have no PodDisruptionBudget: where nodes are removed to save money, annotate them
    with cluster-autoscaler.kubernetes.io/safe-to-evict: "false" (Cluster Autoscaler) or karpenter.sh/do-not-disrupt:
    "true" (Karpenter)."""
    spec: dict[str, Any] = Field(default={})
    """A part of a pod's spec, merged as `kubectl patch` would: containers and volumes by name (the trainer's container
    is `trainer`, the analyzer's `agent`). It may not set restartPolicy, hostname, subdomain, host namespaces, or the
    command of those containers."""


class SharedMemory(ManifestModel):
    """The memory volume at /dev/shm of trainer and agent."""

    size_limit: Quantity | None = None
    """Its size, charged to the trainer's memory limit; left out: 16Gi, or half of that limit where this is smaller."""


class Volume(ManifestModel):
    """A volume claim, mounted into every worker. Jobs of several nodes need one that is ReadWriteMany."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim."""
    mount_path: Place
    """Directory where it appears; an absolute path."""
    sub_path: Place | None = None
    """Only this directory of the volume."""
    read_only: bool = False
    """Mount it without the right to write."""


class Initializer(ManifestModel):
    """A container that brings data or weights before the ranks start."""

    name: DnsName
    """Its name, unique in the job."""
    image: Image
    """Image with the program that brings them."""
    command: Annotated[tuple[LabelText, ...], Field(max_length=64)] = ()
    """The program; left out: the image's own."""
    args: Annotated[tuple[LabelText, ...], Field(max_length=64)] = ()
    """Its arguments."""
    storage_uri: Annotated[str, Field(max_length=2048, pattern=URI_PATTERN)] | None = None
    """Where to bring them from; the container reads it as STORAGE_URI. Without user or password: these come by
    secretRef."""
    target: Place | None = None
    """Directory to bring them to; the container reads it as TARGET. With scope Job it lies on data.volume or
    checkpoint.volume; with scope Node it may also be a new directory, which the ranks of this node then see."""
    secret_ref: ObjectReference | None = None
    """Secret whose keys become variables of the container."""
    resources: Resources | None = None
    """What the container gets; a namespace with a quota for CPU or memory refuses pods without. Left out: nothing is
    set aside for it with scope Job; with scope Node it gets what the trainer gets."""
    scope: Literal["Job", "Node"] = "Job"
    """Once before all workers of the job, or in every worker for disks of its own."""
