"""Environment of the containers of a worker."""

import json
from collections.abc import Mapping
from typing import Any

from megatronapp_common.names import COORDINATOR_PORT, GROUP, HUB_PORT, SERVE_PORT, STATUS_PORT, Env, RankOrder
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, host_of
from megatronapp_operator.backends.kubernetes.render.pod import network, storage
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner

ANNOTATION_TOPOLOGY = f"{GROUP}/topology"
"""Annotation that the operator writes on a worker pod with a node: values of the topology labels, from wide to
narrow."""
TERMINATION_LOG = "/dev/termination-log"
UNPRIVILEGED_HOME = {"HOME": "/tmp", "USER": "megatronapp"}
"""Variables of an unprivileged user that the image may not know; libraries that look it up or write caches need
them."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""Variables that hide GPUs from a worker without any: a node's runtime may show all of them to every image."""
RANK_ORDERS = {"Index": RankOrder.INDEX, "IP": RankOrder.IP, "Topology": RankOrder.TOPOLOGY}


def literal(text: str) -> str:
    """Escape a text for the kubelet, which otherwise expands $(NAME) as a variable."""
    return text.replace("$", "$$")


def variables(values: Mapping[str, str]) -> list[Object]:
    """Return entries of `env` for these values."""
    return [{"name": str(name), "value": literal(value)} for name, value in values.items()]


def field(name: str, path: str) -> Object:
    """Return an entry of `env` that is read from the pod."""
    return {"name": str(name), "valueFrom": {"fieldRef": {"fieldPath": path}}}


def user_environment(draft: WorkerDraft) -> list[Object]:
    """Return variables of the user and of the image's needs, which a pod template may change."""
    given = {entry.name: entry.value for entry in draft.spec.env}
    home = {} if draft.pins_memory else UNPRIVILEGED_HOME
    return variables({**home, **network.rdma_environment(draft), **draft.spec.network.nccl, **given})


def reserved_environment(draft: WorkerDraft) -> list[Object]:
    """Return variables that launcher and ranks rely on and no template may change."""
    return [
        *shared_environment(draft),
        *variables({} if draft.gpus else NO_GPU),
        *variables(_gathering(draft)),
        *_discovery(draft),
    ]


def shared_environment(draft: WorkerDraft) -> list[Object]:
    """Return the variables that launcher and agent have in common."""
    name, namespace = draft.names.hub, draft.owner.namespace
    hub = f"http://{host_of(name, namespace, draft.settings.cluster_domain)}:{HUB_PORT}"
    values: dict[str, str] = {
        Env.JOB: draft.owner.name,
        Env.JOB_UID: draft.owner.uid,
        Env.ATTEMPT: str(draft.attempt.number),
        Env.WORKER_INDEX: str(draft.index),
        Env.SECRET_FILE: storage.SECRET_FILE,
        Env.SHM_DIR: storage.SHM,
        Env.SHM_PREFIX: f"megatronapp-{draft.owner.uid}-a{draft.attempt.number}-w{draft.index}",
        **({Env.ATTEMPT_FILE: storage.RESTART_FILE} if draft.in_place else {}),
        **({Env.SPARE: "1"} if draft.spare else {}),
        **({Env.HUB_URL: hub} if draft.spec.analyzer.enabled else {}),
    }
    return [
        *variables(values),
        field(Env.ADDRESS, "status.podIP"),
        field(Env.NODE_NAME, "spec.nodeName"),
        *variables({"PYTHONUNBUFFERED": "1"}),
    ]


def coordinator(owner: JobOwner, first: str, domain: str) -> str:
    """Return the address at which worker 0 gathers the gang, given the name of its pod."""
    host = host_of(f"{first}.{ObjectNames(owner.name).workers}", owner.namespace, domain)
    return f"{host}:{COORDINATOR_PORT}"


def _gathering(draft: WorkerDraft) -> dict[str, str]:
    first = draft.attempt.first or draft.names.worker(0)
    values: dict[str, str] = {
        Env.NUM_WORKERS: str(draft.world.nodes),
        Env.PROC_PER_NODE: draft.facts.proc_per_node,
        Env.COORDINATOR: coordinator(draft.owner, first, draft.settings.cluster_domain),
        Env.RANK_ORDER: rank_order(draft).value,
        Env.RUN_DIR: storage.RUN,
        Env.TERMINATION_LOG: TERMINATION_LOG,
        Env.LOG_TO_STDOUT: "1",
        **({Env.SAVE_FILE: storage.SAVE_FILE} if draft.saves_by_request else {}),
    }
    if draft.index == 0 or draft.spare:
        values[Env.STATUS_PORT] = str(STATUS_PORT)
        values |= {Env.SERVE_ADDRESS: f"0.0.0.0:{SERVE_PORT}"} if draft.serves else {}
    if draft.spec.network.preflight.enabled:
        values[Env.PREFLIGHT] = json.dumps(preflight(draft), separators=(",", ":"))
    return values


def _discovery(draft: WorkerDraft) -> list[Object]:
    """Return the variables by which the launcher finds its address and its place among the others."""
    made: list[Object] = []
    if (interface := draft.spec.network.rdma.interface) is not None:
        made += variables({Env.INTERFACE: interface})
    if network.waits_for_networks(draft):
        made.append(field(Env.NETWORK_STATUS, f"metadata.annotations['{network.ANNOTATION_NETWORK_STATUS}']"))
    if rank_order(draft) is RankOrder.TOPOLOGY:
        made.append(field(Env.TOPOLOGY, f"metadata.annotations['{ANNOTATION_TOPOLOGY}']"))
    return made


def rank_order(draft: WorkerDraft) -> RankOrder:
    """Return the possible rank order.

    Without the right to read nodes the operator cannot give workers their topology.
    """
    order = RANK_ORDERS[draft.spec.network.rank_order]
    return RankOrder.INDEX if order is RankOrder.TOPOLOGY and not draft.settings.node_access else order


def preflight(draft: WorkerDraft) -> dict[str, Any]:
    """Return what the launcher has to check (names.Env.PREFLIGHT)."""
    rdma = draft.spec.network.rdma
    requirements = draft.spec.network.preflight.to_dict() | {"shmBytes": storage.shm_bytes(draft)}
    if draft.gpus:
        requirements["gpus"] = draft.gpus
    if rdma.enabled:
        requirements["rdma"] = True
    if rdma.enabled and rdma.hca is not None:
        requirements["hca"] = rdma.hca
    return requirements
