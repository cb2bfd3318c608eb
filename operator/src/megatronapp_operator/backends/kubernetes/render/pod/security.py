"""What containers may do: nothing, unless memory must be pinned."""

from megatronapp_operator.backends.kubernetes.client.api import Object

USER = 65532
"""Of every container that needs no root; the group of the volumes, too."""


def pod_security() -> Object:
    """Of a whole pod. Volumes belong to a group that all containers are in, whoever they run as."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool = False) -> Object:
    """Of a container without any right."""
    made: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return made | ({"readOnlyRootFilesystem": True} if read_only else {})


def privileged_security() -> Object:
    """Of a container with the node's own devices."""
    return {"privileged": True, "runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}


def pinning_security() -> Object:
    """Of a container that pins memory for RDMA.

    The limit of locked memory is the runtime's, and no field of a pod raises it. The capability lifts it for root
    only: a capability that is added to another user is not effective.
    """
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
    }
