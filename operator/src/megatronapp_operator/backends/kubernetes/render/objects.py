"""Names, labels and ownership of a job's objects."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatronapp_common.names import (
    API_VERSION,
    KIND,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_REPLICA_INDEX,
    LABEL_REPLICA_TYPE,
    SERVE_PORT,
    ReplicaType,
)
from megatronapp_operator.backends.kubernetes.client.resources import FIELD_MANAGER, Object
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner

HASH_DIGITS = 16
"""Hex digits of a digest in annotations."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectNames:
    """Names of a job's objects. Each has a different suffix, so that names of two jobs do not collide."""

    job: str

    @property
    def workers(self) -> str:
        """Headless Service, NetworkPolicy and PodDisruptionBudget of the workers."""
        return f"{self.job}-workers"

    @property
    def hub(self) -> str:
        """Pod, Service and NetworkPolicy of the hub."""
        return f"{self.job}-hub"

    @property
    def serve(self) -> str:
        """Service of the API of a served model."""
        return f"{self.job}-serve"

    def secret(self, uid: str, key_id: str) -> str:
        """Return the name of the job's Secret, which depends on the job's uid and the installation's key.

        An empty id is of a release that had one key only.
        """
        # The template hash is taken without a uid: it stays as long as the empty part does.
        return f"{self.job}-tokens-{uid[:8]}" + (f"-{key_id}" if key_id else "")

    @property
    def document(self) -> str:
        """ConfigMap with the manifest."""
        return f"{self.job}-job"

    @property
    def ranks(self) -> str:
        """ConfigMap with a rank table that is too long for the status."""
        return f"{self.job}-ranks"

    @property
    def init(self) -> str:
        """Pod of the initializers that run once."""
        return f"{self.job}-init"

    def worker(self, index: int) -> str:
        """Pod and host name of a worker."""
        return f"{self.job}-worker-{index}"

    def spare(self, number: int, attempt: int) -> str:
        """Return the pod and host name of a spare that was created in an attempt, which stays if it becomes a worker.

        Three digits of the attempt keep it within the 63 characters of a host name.
        """
        return f"{self.job}-spare-{number}-{attempt % 1000}"

    def group(self, attempt: int) -> str:
        """Pod group of an attempt."""
        return f"{self.job}-a{attempt}"


def host_of(service: str, namespace: str, domain: str) -> str:
    """Return the full name of a Service, or of one of its pods, in the cluster's DNS."""
    return f"{service}.{namespace}.svc.{domain}"


def serve_url(namespace: str, job: str, domain: str) -> str:
    """Return the URL of the API of a served model, within the cluster."""
    return f"http://{host_of(ObjectNames(job).serve, namespace, domain)}:{SERVE_PORT}"


def selector(owner: JobOwner, kind: ReplicaType) -> Object:
    """Return the label selector of the job's pods of a kind. The uid limits it to this very job."""
    return {"matchLabels": {LABEL_JOB_UID: owner.uid, LABEL_REPLICA_TYPE: kind.value}}


def labels(owner: JobOwner, component: str) -> dict[str, str]:
    """Return the labels of every object of a job."""
    return {
        LABEL_JOB: owner.name,
        LABEL_JOB_UID: owner.uid,
        "app.kubernetes.io/name": "megatronapp",
        "app.kubernetes.io/instance": owner.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "megatronapp",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def pod_labels(owner: JobOwner, kind: ReplicaType, *, index: int = 0, attempt: int = 0) -> dict[str, str]:
    """Return the labels of a pod, which selectors and the operator read."""
    return {
        **labels(owner, kind.value),
        LABEL_REPLICA_TYPE: kind.value,
        LABEL_REPLICA_INDEX: str(index),
        LABEL_ATTEMPT: str(attempt),
    }


def metadata(
    owner: JobOwner, name: str, given: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> Object:
    """Return the metadata of an object that is deleted with its job."""
    reference = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    made: Object = {
        "name": name,
        "namespace": owner.namespace,
        "labels": dict(given),
        "ownerReferences": [reference],
    }
    return made | ({"annotations": dict(annotations)} if annotations else {})


def digest(rendered: object) -> str:
    """Return a short digest of what was rendered, to recognise it later."""
    text = json.dumps(rendered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def make(api_version: str, kind: str, meta: Object, **body: Any) -> Object:  # noqa: ANN401
    """Return an object of a kind."""
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **body}
