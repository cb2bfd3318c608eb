"""Types of what a job requests from a cluster: images, resources, placement, volumes and initializers.

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
GPU_CLAIMS = "resource.k8s.io/claims"
"""Value of gpuResourceName for GPUs that podTemplate claims, by dynamic resource allocation."""
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
    """Reference to another object of the job's namespace."""

    name: ObjectName
    """Name of the object."""


class Resources(ManifestModel):
    """Resources of a container, as quantities by resource: {cpu: 8, memory: 64Gi}."""

    requests: Amounts = Field(default={})
    """Amounts that the scheduler reserves; a resource without one defaults to its limit."""
    limits: Amounts = Field(default={})
    """Largest amounts that the container may use."""


class Toleration(ManifestModel):
    """Toleration of a taint of nodes."""

    key: LabelKey | None = None
    """Key of the taint; without it, and with operator Exists, every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Match any value, or only this one; defaults to Equal."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; defaults to all effects."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seconds until the pod must leave the node, with effect NoExecute; defaults to no limit."""


class PodMetadata(ManifestModel):
    """Labels and annotations of worker pods."""

    labels: Labels = Field(default={})
    """Additional labels; those that the operator sets itself cannot be set."""
    annotations: Annotations = Field(default={})
    """Additional annotations."""


class PodTemplate(ManifestModel):
    """Changes to the worker pods that no field of this spec makes. They are applied last."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations; they replace those of runPolicy.disruption."""
    spec: dict[str, Any] = Field(default={})
    """Part of a pod's spec, merged as `kubectl patch` would: containers and volumes by name (`trainer` and the
    analyzer's `agent`). It may not set restartPolicy, hostname, subdomain, host namespaces, or their command."""


class SharedMemory(ManifestModel):
    """The memory volume at /dev/shm of trainer and agent."""

    size_limit: Quantity | None = None
    """Size of the volume, charged to the trainer's memory limit. Defaults to 16Gi, or half of that limit if smaller,
    or with checkpoint.memorySaveInterval; with dpp.enabled to its messages and 1Gi, if that is more."""


class Volume(ManifestModel):
    """A volume claim, mounted into every worker. Jobs of several nodes need one that is ReadWriteMany."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim."""
    mount_path: Place
    """Directory to mount it at; an absolute path."""
    sub_path: Place | None = None
    """Directory of the volume to mount instead of all of it."""
    read_only: bool = False
    """Mount it read-only."""


class Initializer(ManifestModel):
    """A container that brings data or weights before the ranks start."""

    name: DnsName
    """Name of the initializer, unique in the job."""
    image: Image
    """Image with the program that brings data or weights."""
    command: Annotated[tuple[LabelText, ...], Field(max_length=64)] = ()
    """Program to run; defaults to the image's own."""
    args: Annotated[tuple[LabelText, ...], Field(max_length=64)] = ()
    """Arguments of the program."""
    storage_uri: Annotated[str, Field(max_length=2048, pattern=URI_PATTERN)] | None = None
    """Source of the data, STORAGE_URI in the container; without user and password: use secretRef."""
    target: Place | None = None
    """Directory to write to, TARGET in the container. With scope Job it is on data.volume or checkpoint.volume; with
    scope Node it may also be new, for the ranks of this node."""
    secret_ref: ObjectReference | None = None
    """Secret whose keys become variables of the container."""
    resources: Resources | None = None
    """Resources of the container, which a quota of the namespace may demand. Defaults to none with scope Job, and to
    those of the trainer with scope Node."""
    scope: Literal["Job", "Node"] = "Job"
    """Run once before all workers of the job, or in every worker, for local disks."""
