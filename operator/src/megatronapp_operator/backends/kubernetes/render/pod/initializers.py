"""Containers that bring data or weights before the ranks start."""

import hashlib

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.cluster import Initializer
from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, make, metadata, pod_labels
from megatronapp_operator.backends.kubernetes.render.pod import storage
from megatronapp_operator.backends.kubernetes.render.pod.environment import UNPRIVILEGED_HOME, variables
from megatronapp_operator.backends.kubernetes.render.pod.placement import tolerations
from megatronapp_operator.backends.kubernetes.render.pod.security import container_security, pod_security
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner

PREFIX = "init-"
"""Prefix of the names of initializers, so that none collides with a container of the operator."""
MAX_NAME = 63
"""Most characters of a container's name (a DNS label)."""


def initializer(given: Initializer, job: MegatronJob, mounts: list[Object]) -> Object:
    """Return the container of an initializer.

    Its arguments may use $(STORAGE_URI) and $(TARGET), as in any container.
    """
    values = {"STORAGE_URI": given.storage_uri, "TARGET": given.target}
    made: Object = {
        "name": container_name(given.name),
        "image": given.image,
        "imagePullPolicy": job.spec.image_pull_policy,
        "env": variables({**UNPRIVILEGED_HOME, **{name: value for name, value in values.items() if value is not None}}),
        "volumeMounts": mounts,
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    made |= {"resources": given.resources.to_dict()} if given.resources is not None else {}
    made |= {"command": list(given.command)} if given.command else {}
    made |= {"args": list(given.args)} if given.args else {}
    made |= {"envFrom": [{"secretRef": {"name": given.secret_ref.name}}]} if given.secret_ref is not None else {}
    return made


def container_name(name: str) -> str:
    """Return the name of an initializer's container, unique even if it must be shortened."""
    made = PREFIX + name
    return made if len(made) <= MAX_NAME else f"{made[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def node_containers(draft: WorkerDraft) -> list[Object]:
    """Return the init containers of every worker.

    Their default resources are those of the trainer, which runs after them: that costs nothing, and a Guaranteed pod
    keeps its class.
    """
    mounts = [*storage.claim_mounts(draft.job, writable=True), *storage.local_mounts(draft.job)]
    resources = draft.group.resources.to_dict()
    made = [initializer(given, draft.job, mounts) for given in storage.node_initializers(draft.job)]
    return [{"resources": resources} | container for container in made]


def init_pod(job: MegatronJob, owner: JobOwner) -> Object | None:
    """Return the pod that runs the initializers of the whole job, one after the other; None without initializers.

    The last one is its main container, the others its init containers. The kubelet does not restart it: the plan
    decides whether to try again.
    """
    job_wide = [given for given in job.spec.initializers if given.scope == "Job"]
    if not job_wide:
        return None
    containers = [initializer(given, job, storage.claim_mounts(job, writable=True)) for given in job_wide]
    spec: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "volumes": storage.claim_volumes(job),
        "initContainers": containers[:-1],
        "containers": containers[-1:],
        **identity(job),
        **_placement(job),
    }
    meta = metadata(owner, ObjectNames(owner.name).init, pod_labels(owner, ReplicaType.INIT))
    return make("v1", "Pod", meta, spec=spec)


def _placement(job: MegatronJob) -> Object:
    """Return the placement of the workers: only their nodes may reach their disks.

    Without their anti-affinity, by which a node would be closed to workers where an initializer has just ended: the
    scheduler tries pods that were refused for such a pod again only after minutes.
    """
    affinity = {kind: terms for kind, terms in (job.spec.affinity or {}).items() if kind != "podAntiAffinity"}
    given = {
        "tolerations": tolerations(job.spec, job.spec.gpus_per_node),
        "nodeSelector": dict(job.spec.node_selector),
        "affinity": affinity,
        "schedulerName": job.spec.scheduler_name,
    }
    return {name: value for name, value in given.items() if value}


def identity(job: MegatronJob) -> Object:
    """Return what all pods of a job have from its spec: account, pull secrets, tolerations and priority."""
    given: Object = {
        "imagePullSecrets": [{"name": secret.name} for secret in job.spec.image_pull_secrets],
        "tolerations": [toleration.to_dict() for toleration in job.spec.tolerations],
        "serviceAccountName": job.spec.service_account_name,
        "priorityClassName": job.spec.priority_class_name,
    }
    return {name: value for name, value in given.items() if value}
