"""Security contexts: no privileges, unless memory must be pinned."""

from megatronapp_operator.backends.kubernetes.client.resources import Object

USER = 65532
"""User of every container without root, and group of the volumes."""


def pod_security() -> Object:
    """Return the context of a whole pod. Volumes belong to a group of all containers, whichever user they run as."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool = False) -> Object:
    """Return the context of a container without privileges."""
    made: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return made | ({"readOnlyRootFilesystem": True} if read_only else {})


def privileged_security() -> Object:
    """Return the context of a container with the node's own devices."""
    return {"privileged": True, "runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}


def pinning_security() -> Object:
    """Return the context of a container that pins memory for RDMA.

    The limit of locked memory is the runtime's, and no field of a pod raises it. The capability lifts it for root only:
    a capability that is added to another user is not effective.
    """
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
    }
