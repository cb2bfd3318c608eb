"""The pod of a worker: the operator's defaults, then the user's template, then fields that no template may change."""

import dataclasses
import functools
import math

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.cluster import GPU_CLAIMS
from megatronapp_common.names import (
    ANNOTATION_EXCLUDED_NODES,
    ANNOTATION_TEMPLATE_HASH,
    LABEL_ROLE,
    LABEL_SPARE,
    ReplicaType,
)
from megatronapp_common.topology import RankRole
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.disruption import protection
from megatronapp_operator.backends.kubernetes.render.facts import REMEMBERED, IdentityKey, facts_of
from megatronapp_operator.backends.kubernetes.render.objects import digest, make, metadata, pod_labels
from megatronapp_operator.backends.kubernetes.render.pod import network, storage
from megatronapp_operator.backends.kubernetes.render.pod.agent import agent, reserved_agent
from megatronapp_operator.backends.kubernetes.render.pod.annotations import WAIT_S, waiting_containers, waiting_volumes
from megatronapp_operator.backends.kubernetes.render.pod.environment import (
    TERMINATION_LOG,
    literal,
    reserved_environment,
    user_environment,
)
from megatronapp_operator.backends.kubernetes.render.pod.initializers import identity, node_containers
from megatronapp_operator.backends.kubernetes.render.pod.merge import merge
from megatronapp_operator.backends.kubernetes.render.pod.placement import tolerations, with_placement
from megatronapp_operator.backends.kubernetes.render.pod.scheduling import group_reference, pod_marks, scheduler_name
from megatronapp_operator.backends.kubernetes.render.pod.security import (
    container_security,
    pinning_security,
    pod_security,
    privileged_security,
)
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import TRAINER, WorkerDraft
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings

GATHER_DEADLINES = 4
"""Start deadlines that a launcher waits for its gang; see `_gather_s`."""
PREPARE_S = 24 * 3600
"""Seconds by which initializers may take longer on one node than on another."""


def worker_pod(
    job: MegatronJob,
    owner: JobOwner,
    attempt: AttemptSettings,
    index: int,
    settings: RenderSettings,
    *,
    spare: bool = False,
) -> Object:
    """Return the pod of worker `index`. Raises JobError if the job's numbers do not agree."""
    draft = WorkerDraft(job=job, owner=owner, attempt=attempt, index=index, settings=settings, spare=spare)
    pod = render_worker(draft)
    annotations = pod["metadata"]["annotations"]
    annotations[ANNOTATION_TEMPLATE_HASH] = template_hash(job, settings)
    if attempt.excluded_nodes:
        annotations[ANNOTATION_EXCLUDED_NODES] = ",".join(attempt.excluded_nodes)
    return pod


def template_hash(job: MegatronJob, settings: RenderSettings) -> str:
    """Return the digest of what all attempts of a job have in common.

    Another release may render the same job differently.
    """
    return _template_hash((IdentityKey(job), IdentityKey(settings)))


@functools.lru_cache(maxsize=REMEMBERED)
def _template_hash(given: tuple[IdentityKey[MegatronJob], IdentityKey[RenderSettings]]) -> str:
    job, settings = given[0].value, dataclasses.replace(given[1].value, key_id="")  # another key is the same template
    owner = JobOwner(namespace=job.metadata.namespace, name=job.metadata.name, uid="")
    pods = [
        render_worker(
            WorkerDraft(job=job, owner=owner, attempt=AttemptSettings(number=0), index=group.first, settings=settings)
        )
        for group in facts_of(job).world.worker_groups
    ]
    return digest([*pods, *(["spares"] if may_have_spares(job) else [])])  # orders to pods without know no places


def may_have_spares(job: MegatronJob) -> bool:
    """Return True if spares may take places of workers."""
    return bool(job.spec.run_policy.spares) or job.spec.run_policy.elastic is not None


def render_worker(draft: WorkerDraft) -> Object:
    """Return the pod without the digest of its template."""
    template = draft.spec.pod_template
    spec = merge(merge(_chosen(draft), template.spec), _reserved(draft))
    marks, notes = pod_marks(draft)
    extra = template.metadata
    labels = {
        **extra.labels,
        **network.network_labels(draft),
        **marks,
        **_role_label(draft),
        **({LABEL_SPARE: "true"} if draft.spare else {}),
        **pod_labels(draft.owner, ReplicaType.WORKER, index=draft.index, attempt=draft.attempt.number),
    }
    annotations = {**protection(draft.job), **extra.annotations, **network.network_annotations(draft), **notes}
    meta = metadata(draft.owner, draft.pod_name, labels) | {"annotations": annotations}
    return make("v1", "Pod", meta, spec=with_placement(spec, draft))


def _role_label(draft: WorkerDraft) -> dict[str, str]:
    """Return the label of a worker whose ranks all have one role; none for the others."""
    return {} if draft.group.role is RankRole.ALL else {LABEL_ROLE: draft.group.role.value}


def _chosen(draft: WorkerDraft) -> Object:
    """Return the fields that the template may change."""
    spec = draft.spec
    made: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [_trainer(draft), *([agent(draft)] if spec.analyzer.enabled else [])],
        "initContainers": [*waiting_containers(draft, _trainer_image(draft)), *node_containers(draft)],
        "volumes": [
            *storage.claim_volumes(draft.job),
            *storage.local_volumes(draft.job),
            *network.device_volumes(draft),
        ],
        **identity(draft.job),
        "tolerations": tolerations(draft.spec, draft.gpus),
        "nodeSelector": dict(draft.group.node_selector),
        "affinity": spec.affinity,
        "priorityClassName": spec.priority_class_name,
        "schedulerName": scheduler_name(draft),
        "runtimeClassName": spec.runtime_class_name,
    }
    return {name: value for name, value in made.items() if value or value is False}


def _reserved(draft: WorkerDraft) -> Object:
    """Return the fields that the gang, the outcome and the safety of other jobs depend on."""
    containers = [_reserved_trainer(draft), *([reserved_agent(draft)] if draft.spec.analyzer.enabled else [])]
    return {
        "restartPolicy": "Never",
        "hostname": draft.pod_name,
        "subdomain": draft.names.workers,
        "setHostnameAsFQDN": None,
        "terminationGracePeriodSeconds": draft.spec.run_policy.termination_grace_period_seconds,
        "shareProcessNamespace": None,
        "containers": containers,
        "volumes": [*storage.own_volumes(draft), *waiting_volumes(draft)],
        **network.network_spec(draft),
        **group_reference(draft),
    }


def _trainer(draft: WorkerDraft) -> Object:
    return {
        "name": TRAINER,
        **_trainer_image(draft),
        "env": user_environment(draft),
        "resources": _resources(draft),
        "securityContext": _security(draft),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *storage.claim_mounts(draft.job),
            *storage.local_mounts(draft.job),
            *network.device_mounts(draft),
        ],
    }


def _security(draft: WorkerDraft) -> Object:
    if draft.privileged:
        return privileged_security()
    return pinning_security() if draft.pins_memory else container_security()


def _reserved_trainer(draft: WorkerDraft) -> Object:
    return {
        "name": TRAINER,
        "command": command(draft),
        "args": None,
        "env": reserved_environment(draft),
        "volumeMounts": storage.trainer_mounts(draft),
        "ports": network.ports(draft),
        **_readiness(draft),
        "terminationMessagePath": TERMINATION_LOG,
        "restartPolicy": None,
        "restartPolicyRules": None,
    }


def _readiness(draft: WorkerDraft) -> Object:
    """Return the readiness probe of rank 0: its Service routes to it while it takes requests.

    Other workers have none.
    """
    if not draft.serves or draft.index != 0:
        return {}
    request = {"path": "/readyz", "port": network.SERVE}
    probe = {"httpGet": request, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 3}
    return {"readinessProbe": probe}


def _trainer_image(draft: WorkerDraft) -> Object:
    if draft.spec.image is None:
        return {"image": draft.settings.trainer_image, "imagePullPolicy": draft.settings.image_pull_policy}
    return {"image": draft.spec.image, "imagePullPolicy": draft.spec.image_pull_policy}


def _resources(draft: WorkerDraft) -> Object:
    """Return the requests and limits of the user, plus GPUs and RDMA devices, for which both are equal."""
    counted = draft.gpus > 0 and draft.spec.gpu_resource_name != GPU_CLAIMS
    devices = {draft.spec.gpu_resource_name: str(draft.gpus)} if counted else {}
    devices |= network.rdma_resources(draft)
    given = draft.group.resources
    made = {"requests": {**given.requests, **devices}, "limits": {**given.limits, **devices}}
    return {name: amounts for name, amounts in made.items() if amounts}


def command(draft: WorkerDraft) -> list[str]:
    """Return the command of the launcher with the flags of its ranks."""
    launcher = ["python3", "-m", "megatronapp_trainer.launch", "--gather-timeout-s", str(_gather_s(draft))]
    program = ["--program=-m megatronapp_trainer.serve"] if draft.serves else []
    standby = ["--standby-s", str(_standby_s(draft))] if draft.in_place else []
    return [*launcher, *standby, *program, "--", *map(literal, draft.facts.arguments)]


def _standby_s(draft: WorkerDraft) -> int:
    """Return the seconds that a launcher waits for the next attempt.

    The longest pause before a restart, and the times until a lost pod is given up and an operator is there again.
    """
    policy = draft.spec.run_policy
    return math.ceil(policy.backoff.max_seconds) + 2 * policy.lost_node_timeout_seconds + WAIT_S


def _gather_s(draft: WorkerDraft) -> int:
    """Return the seconds that a launcher waits for the others: longer than the operator, which knows why they wait.

    One deadline until the others have nodes; then as long again for each of: images of the init containers, the
    trainer, and the connection to worker 0 (`plan.deadlines.gathering`). Initializers have all their time.
    """
    deadline_s = draft.spec.run_policy.start_deadline_seconds
    before = [*node_containers(draft), *(draft.spec.pod_template.spec.get("initContainers") or ())]
    prepares = any(container.get("restartPolicy") != "Always" for container in before)
    return GATHER_DEADLINES * deadline_s + WAIT_S + (PREPARE_S if prepares else 0)
