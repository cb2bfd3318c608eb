"""Objects that must exist before a gang's pods: policy, Service, the manifest, the secret, the pod group."""

import base64
import dataclasses
import gzip
import json
from collections.abc import Mapping
from typing import Any

from megatronapp_common.job import MegatronJob, manifest_text
from megatronapp_common.names import (
    COORDINATOR_PORT,
    LABEL_REPLICA_INDEX,
    RANK_TABLE_FILE,
    SERVE_PORT,
    STATUS_PORT,
    ReplicaType,
)
from megatronapp_operator.backends.kubernetes.client.resources import CONFIG_MAPS, SECRETS, SERVICES, Object
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, labels, make, metadata, selector
from megatronapp_operator.backends.kubernetes.render.pod import network, storage
from megatronapp_operator.backends.kubernetes.render.pod.scheduling import KUBERNETES
from megatronapp_operator.backends.kubernetes.render.pod.worker import render_worker
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft
from megatronapp_operator.backends.kubernetes.render.policies import init_policy, workers_policy
from megatronapp_operator.backends.kubernetes.render.queueing import group_resource, kubernetes_group, pod_group
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, Rendered, RenderSettings

PRIVATE = frozenset({"env", "podTemplate", "initializers"})
"""Fields of a spec with variables of users. More users may read ConfigMaps than pods."""
RANKS_BYTES = 512 << 10
"""Longest plain table in bytes; the data of a ConfigMap may have 1 MiB."""


def gang_objects(
    job: MegatronJob, owner: JobOwner, attempt: AttemptSettings, settings: RenderSettings
) -> tuple[Rendered, ...]:
    """Return all objects but the Secret, in the order in which they must exist."""
    made = (
        workers_policy(job, owner, settings),
        init_policy(job, owner),
        _service(owner),
        _serve_service(job, owner),
        _document(job, owner) if job.spec.analyzer.enabled else None,
        _group(WorkerDraft(job=job, owner=owner, attempt=attempt, index=0, settings=settings)),
    )
    return tuple(item for item in made if item is not None)


def secret(owner: JobOwner, secret_hex: str, settings: RenderSettings) -> Rendered:
    """Return the job's Secret under the installation's key of these settings; it is immutable."""
    meta = metadata(owner, ObjectNames(owner.name).secret(owner.uid, settings.key_id), labels(owner, "tokens"))
    data = {storage.SECRET_KEY: base64.b64encode(secret_hex.encode()).decode()}
    return SECRETS, make(SECRETS.api_version, "Secret", meta, type="Opaque", immutable=True, data=data)


def ranks(owner: JobOwner, table: Mapping[str, Any]) -> Rendered:
    """Return a ConfigMap for a rank table that is too long for the status; compressed if it is large."""
    meta = metadata(owner, ObjectNames(owner.name).ranks, labels(owner, "ranks"))
    text = json.dumps(table)
    if len(text) <= RANKS_BYTES:
        return CONFIG_MAPS, make(CONFIG_MAPS.api_version, "ConfigMap", meta, data={RANK_TABLE_FILE: text})
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    made = make(CONFIG_MAPS.api_version, "ConfigMap", meta, binaryData={f"{RANK_TABLE_FILE}.gz": packed})
    return CONFIG_MAPS, made


def _service(owner: JobOwner) -> Rendered:
    """Return the Service for the workers' names in the DNS.

    Names are published before the workers are ready: they need them to get ready.
    """
    meta = metadata(owner, ObjectNames(owner.name).workers, labels(owner, "worker"))
    ports = (("gather", COORDINATOR_PORT), ("status", STATUS_PORT))
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(owner, ReplicaType.WORKER)["matchLabels"],
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
    }
    return SERVICES, make(SERVICES.api_version, "Service", meta, spec=spec)


def _serve_service(job: MegatronJob, owner: JobOwner) -> Rendered | None:
    """Return the Service for rank 0 of a served model, which has an endpoint only while rank 0 is ready."""
    if job.spec.mode != "serve":
        return None
    meta = metadata(owner, ObjectNames(owner.name).serve, labels(owner, "serve"))
    first = {LABEL_REPLICA_INDEX: "0"}
    spec = {
        "type": "ClusterIP",
        "selector": selector(owner, ReplicaType.WORKER)["matchLabels"] | first,
        "ports": [{"name": network.SERVE, "port": SERVE_PORT, "targetPort": network.SERVE, "protocol": "TCP"}],
    }
    return SERVICES, make(SERVICES.api_version, "Service", meta, spec=spec)


def _document(job: MegatronJob, owner: JobOwner) -> Rendered:
    """Return the manifest for the hub: without its status, and without fields that may contain secrets of users."""
    given = job.to_dict()
    spec = {name: value for name, value in given["spec"].items() if name not in PRIVATE}
    identity = {"name": owner.name, "namespace": owner.namespace, "uid": owner.uid}
    document = {
        "apiVersion": given["apiVersion"],
        "kind": given["kind"],
        "metadata": identity,
        "spec": spec,
    }
    meta = metadata(owner, ObjectNames(owner.name).document, labels(owner, "manifest"))
    return CONFIG_MAPS, make(
        CONFIG_MAPS.api_version, "ConfigMap", meta, data={storage.JOB_KEY: manifest_text(document)}
    )


def _group(draft: WorkerDraft) -> Rendered | None:
    """Return the pod group, if the scheduler needs one. It requires all workers: a part of a gang only waits."""
    gang = draft.spec.scheduling.gang
    resource = group_resource(gang, draft.settings)
    if resource is None:
        return None
    pods = [(_pod_spec(draft, group.first), group.nodes) for group in draft.world.worker_groups]
    if gang == KUBERNETES:
        return kubernetes_group(draft, resource, pods[0][0])
    return pod_group(draft, resource, pods)


def _pod_spec(draft: WorkerDraft, index: int) -> Object:
    spec: Object = render_worker(dataclasses.replace(draft, index=index))["spec"]
    return spec
