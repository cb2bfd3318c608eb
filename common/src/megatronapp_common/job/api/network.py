"""Types of the block `network`: connections between ranks of different nodes of a cluster."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import MAX_ENTRIES, LabelKey, QualifiedName

ATTACHMENT_PATTERN = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?(@[a-z][-a-z0-9]*)?$"
INTERFACE_PATTERN = r"^[^\s/]+$"
Interface = Annotated[str, Field(min_length=1, max_length=128, pattern=INTERFACE_PATTERN)]
Variables = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=MAX_ENTRIES)]


class Rdma(ManifestModel):
    """InfiniBand or RoCE devices of the workers."""

    enabled: bool = False
    """Request devices and set NCCL and UCX up for them. NCCL_NET is IB then, so that NCCL never falls
    back to TCP; for vpc.amazonaws.com/efa AWS Libfabric, whose image needs libfabric and aws-ofi-nccl.
    Another value under nccl or env wins."""
    resource_name: QualifiedName | None = None
    """Resource that the device plugin offers, such as rdma/hca_shared_devices_a; needed unless devices is HostPath."""
    devices: Literal["Resource", "HostPath"] = "Resource"
    """Source of the devices: the device plugin's resource, or, with mode HostNetwork, the node's /dev/infiniband, for
    which the trainer is privileged."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices of each worker."""
    ipc_lock: bool = True
    """Add the capability IPC_LOCK, and with it root, so that memory may be pinned; false where nodes raise the limit of
    locked memory."""
    gid_index: Annotated[int, Field(ge=0, le=255)] | None = None
    """Index of the GID that RoCE uses (NCCL_IB_GID_INDEX, UCX_IB_GID_INDEX); found by the libraries by default."""
    hca: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Adapters to use (NCCL_IB_HCA), such as mlx5_0,mlx5_1; defaults to all."""
    interface: Interface | None = None
    """Interface, or a regular expression for its whole name, whose address the others get; defaults to that of the
    first attachment, otherwise the pod's."""


class Preflight(ManifestModel):
    """Checks of every worker before its ranks start: GPUs, shared memory, locked memory, links, its peers, and with dpp
    the paths of messages between ranks."""

    enabled: bool = False
    """Run the checks; a failed one fails the worker and names its node."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    """Longest time that the checks may take."""


class Network(ManifestModel):
    """Connections between ranks of different nodes of a cluster."""

    mode: Literal["Default", "HostNetwork", "Sriov", "Macvlan", "SharedDevice"] = "Default"
    """The cluster's network alone, the node's own, or RDMA devices: virtual functions, Macvlan, or shared by pods."""
    rdma: Rdma = Rdma()
    """InfiniBand or RoCE devices."""
    attachments: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=317, pattern=ATTACHMENT_PATTERN)], ...],
        Field(max_length=16),
    ] = ()
    """Networks of Multus that workers join, as NAME or NAMESPACE/NAME; needed for mode Sriov and Macvlan."""
    nccl: Variables = Field(default={})
    """Variables NCCL_... and UCX_... of every rank; they win over what the operator sets."""
    policy: Literal["None", "JobOnly"] = "JobOnly"
    """Admit only this job, the gateway, the operator and Prometheus by a NetworkPolicy, or make none."""
    rank_order: Literal["Index", "IP", "Topology"] = "Index"
    """Key by which workers are sorted before their ranks are numbered."""
    topology_key: LabelKey | None = None
    """Label of nodes by which rankOrder Topology sorts, such as topology.kubernetes.io/zone."""
    preflight: Preflight = Preflight()
    """Checks of every worker before its ranks start."""
