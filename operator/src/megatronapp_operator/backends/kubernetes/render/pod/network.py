"""InfiniBand, attached networks and the node's own network."""

from megatronapp_common.names import COORDINATOR_PORT, SERVE_PORT, STATUS_PORT
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft

ANNOTATION_NETWORKS = "k8s.v1.cni.cncf.io/networks"
ANNOTATION_NETWORK_STATUS = "k8s.v1.cni.cncf.io/network-status"
INFINIBAND, INFINIBAND_PATH = "infiniband", "/dev/infiniband"
PLUGIN_NETWORKS = {"vpc.amazonaws.com/": "AWS Libfabric"}
"""NCCL's name of the network of a plugin, by the prefix of the resource's name: aws-ofi-nccl for the Elastic Fabric
Adapter. Releases up to 1.11 have only this name; later ones accept it in NCCL_NET."""
SERVE = "serve"
"""Name of the port of a served model's API."""
LABEL_HOST_NETWORK = "megatronapp.io/host-network"
"""Label of workers in their node's own network; two of them on one node would use the same ports."""


def rdma_environment(draft: WorkerDraft) -> dict[str, str]:
    """Return the variables by which NCCL and UCX find the adapters, unless the user sets them."""
    rdma = draft.spec.network.rdma
    if not rdma.enabled:
        return {}
    net = _nccl_net(draft)
    made = {} if net is None else {"NCCL_NET": net}  # without it NCCL falls back to TCP where adapters cannot be used
    if rdma.hca is not None:
        made["NCCL_IB_HCA"] = rdma.hca
    if (devices := ucx_devices(rdma.hca or "")) is not None:
        made["UCX_NET_DEVICES"] = devices
    if rdma.gid_index is not None:
        made |= {"NCCL_IB_GID_INDEX": str(rdma.gid_index), "UCX_IB_GID_INDEX": str(rdma.gid_index)}
    return made


def _nccl_net(draft: WorkerDraft) -> str | None:
    """Return NCCL's name of the network of the adapters; None if the trainer gets no adapters."""
    if draft.privileged:
        return "IB"
    name = draft.spec.network.rdma.resource_name
    if name is None:
        return None
    return next((net for start, net in PLUGIN_NETWORKS.items() if name.startswith(start)), "IB")


def ucx_devices(hca: str) -> str | None:
    """Return adapters in UCX's format, which has a port. None for an exclusion or a prefix in NCCL's format."""
    if not hca or hca.startswith("^"):
        return None
    names = [name.strip() for name in hca.removeprefix("=").split(",") if name.strip()]
    return ",".join(name if ":" in name else f"{name}:1" for name in names) or None


def rdma_resources(draft: WorkerDraft) -> dict[str, str]:
    """Return the RDMA devices as resources of the trainer."""
    rdma = draft.spec.network.rdma
    enabled = rdma.enabled and rdma.resource_name is not None
    return {rdma.resource_name: str(rdma.count)} if enabled and rdma.resource_name is not None else {}


def device_volumes(draft: WorkerDraft) -> list[Object]:
    """Return the volume of the node's own devices, if no device plugin provides them."""
    if not draft.privileged:
        return []
    return [{"name": INFINIBAND, "hostPath": {"path": INFINIBAND_PATH, "type": "Directory"}}]


def device_mounts(draft: WorkerDraft) -> list[Object]:
    """Return the mounts of the node's own devices."""
    return [{"name": INFINIBAND, "mountPath": INFINIBAND_PATH}] if draft.privileged else []


def network_annotations(draft: WorkerDraft) -> dict[str, str]:
    """Return the annotation with the networks to join."""
    attachments = draft.spec.network.attachments
    return {ANNOTATION_NETWORKS: ",".join(attachments)} if attachments else {}


def network_labels(draft: WorkerDraft) -> dict[str, str]:
    """Return the label by which the anti-affinity selects workers."""
    return {LABEL_HOST_NETWORK: "true"} if draft.host_network else {}


def network_spec(draft: WorkerDraft) -> Object:
    """Return the fields for the pod's network. A field that is None is removed from the pod's template, too."""
    if not draft.host_network:
        return {"hostNetwork": None, "hostPID": None, "hostIPC": None}
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "hostPID": None, "hostIPC": None}


def ports(draft: WorkerDraft) -> list[Object]:
    """Return the ports of launcher and API, the same for all workers, so that their pods have one shape for a queue.

    In the node's network they are the node's, and the scheduler separates pods that declare the same ones.
    """
    named = [("gather", COORDINATOR_PORT), ("status", STATUS_PORT)]
    named += [(SERVE, SERVE_PORT)] if draft.serves else []
    made: list[Object] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named]
    return [port | {"hostPort": port["containerPort"]} for port in made] if draft.host_network else made


def waits_for_networks(draft: WorkerDraft) -> bool:
    """Return True if the launcher's address is that of an attached network, which is known only after attaching."""
    return bool(draft.spec.network.attachments) and draft.spec.network.rdma.interface is None
