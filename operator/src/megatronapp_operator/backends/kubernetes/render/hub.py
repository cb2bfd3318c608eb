"""The hub: its pod and its Service, outside the gang."""

import math
from typing import Any

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.arguments import obeys_orders
from megatronapp_common.names import ANNOTATION_TEMPLATE_HASH, GROUP, HUB_PORT, Env, ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import (
    CONFIG_MAPS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.render.gang import gang_objects
from megatronapp_operator.backends.kubernetes.render.objects import (
    ObjectNames,
    digest,
    labels,
    make,
    metadata,
    pod_labels,
    selector,
    serve_url,
)
from megatronapp_operator.backends.kubernetes.render.pod import storage
from megatronapp_operator.backends.kubernetes.render.pod.agent import analyzer_image
from megatronapp_operator.backends.kubernetes.render.pod.environment import variables
from megatronapp_operator.backends.kubernetes.render.pod.initializers import identity
from megatronapp_operator.backends.kubernetes.render.pod.security import container_security, pod_security
from megatronapp_operator.backends.kubernetes.render.policies import hub_policy
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, Rendered, RenderSettings

HUB = "hub"
STATE = "/var/lib/megatronapp"
ANNOTATION_STARTS = f"{GROUP}/starts"
"""Annotation of the hub's pod: number of hubs started for this job, with this one."""
REQUESTS = {"cpu": "100m", "memory": "256Mi"}
CPU_LIMIT = "2"
RANKS_PER_GI = 4096
"""Ranks after which the memory limit of a hub grows by 1Gi; hub and detector took 2.4 GiB for 10,000 ranks."""
STARTS_S = 300
"""Seconds to start: a hub on a crowded node may take minutes to listen; killed for that, it would only start over."""
GRACE_S = 30
"""Seconds to stop: the hub waits 3 s for requests and 3 s for the disk, on a node that may be crowded."""


def hub_objects(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> tuple[Rendered, ...]:
    """Return the objects before the hub's pod: its policy, unless the job disables it, and its Service."""
    name = ObjectNames(owner.name).hub
    service = make(
        SERVICES.api_version,
        "Service",
        metadata(owner, name, labels(owner, HUB)),
        spec={
            "type": "ClusterIP",
            "selector": selector(owner, ReplicaType.HUB)["matchLabels"],
            "ports": [{"name": "http", "port": HUB_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    )
    policy = hub_policy(job, owner, settings)
    return (*([policy] if policy is not None else []), (SERVICES, service))


def unwanted_hub_objects(
    job: MegatronJob, owner: JobOwner, settings: RenderSettings
) -> tuple[tuple[Resource, str], ...]:
    """Return objects that an earlier spec of the job may have had and this one does not have."""
    names = ObjectNames(owner.name)
    optional = [(NETWORK_POLICIES, name) for name in (names.workers, names.init, names.hub)]
    optional += [(SERVICES, names.serve), (SERVICES, names.hub), (CONFIG_MAPS, names.document)]
    attempt = AttemptSettings(number=0)
    made = [*gang_objects(job, owner, attempt, settings)]
    made += hub_objects(job, owner, settings) if job.spec.analyzer.enabled else ()
    needed = {(resource, obj["metadata"]["name"]) for resource, obj in made}
    return tuple(item for item in optional if item not in needed)


def hub_pod(job: MegatronJob, owner: JobOwner, settings: RenderSettings, *, starts: int) -> Object:
    """Return the hub's pod. The kubelet restarts its container; only a pod that was removed is created again."""
    spec = _spec(job, owner, settings)
    notes = {ANNOTATION_STARTS: str(starts), ANNOTATION_TEMPLATE_HASH: _digest(job, spec)}
    meta = metadata(owner, ObjectNames(owner.name).hub, pod_labels(owner, ReplicaType.HUB), notes)
    return make("v1", "Pod", meta, spec=spec)


def hub_hash(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> str:
    """Return the digest of a hub's spec and of what it reads of the manifest.

    A hub with another spec may not understand the agents of these images. One that has read an older manifest refuses
    what the ranks obey.
    """
    return _digest(job, _spec(job, owner, settings))


def manifest_settings(job: MegatronJob) -> Object:
    """Return what a hub reads of its manifest, which it does once, when it starts (the analyzer's `load_job_file`).

    It has no other fields: a hub without a claim loses its traces when it is replaced.
    """
    spec = job.spec
    return {
        "traced": spec.trace.enabled or "--trace" in spec.args,
        "faults": [fault.to_dict() for fault in spec.faults],
        "gpuHourPrice": spec.analyzer.gpu_hour_price,
        "sizeLimit": spec.analyzer.volume.size_limit,
        "control": _control(job) if obeys_orders(job) else None,
    }


def _control(job: MegatronJob) -> Object:
    """Return what a hub reads of the control of a training."""
    training = None if job.spec.scope is None else job.spec.scope.training
    return {
        "resumeAfterSeconds": None if training is None else training.resume_after_seconds,
        # An elastic gang changes its size without an edit, and pages only show this number.
        "gpus": job.world.gpus if job.spec.run_policy.elastic is None else None,
    }


def _digest(job: MegatronJob, spec: Object) -> str:
    return digest({"spec": spec, "manifest": manifest_settings(job)})


def default_resources(ranks: int) -> Object:
    """Return the resources of the hub of a job that names none, by its number of ranks."""
    memory_gi = 1 + max(math.ceil(ranks / RANKS_PER_GI), 1)
    return {"requests": REQUESTS, "limits": {"cpu": CPU_LIMIT, "memory": f"{memory_gi}Gi"}}


def _spec(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Object:
    state: dict[str, Any] = {"name": "state", **_state_volume(job)}
    return {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": pod_security(),
        "containers": [_container(job, owner, settings)],
        "volumes": [
            storage.secret_volume(ObjectNames(owner.name).secret(owner.uid, settings.key_id)),
            {"name": "job", "configMap": {"name": ObjectNames(owner.name).document}},
            state,
            {"name": "tmp", "emptyDir": {}},
        ],
        **identity(job),
    }


def _state_volume(job: MegatronJob) -> Object:
    volume = job.spec.analyzer.volume
    if volume.claim is None:
        return {"emptyDir": {"sizeLimit": volume.size_limit}}
    return {"persistentVolumeClaim": {"claimName": volume.claim}}


def _container(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Object:
    given = job.spec.analyzer.resources
    values = {
        Env.JOB: owner.name,
        Env.JOB_UID: owner.uid,
        Env.SECRET_FILE: storage.SECRET_FILE,
        "PYTHONUNBUFFERED": "1",
    }
    return {
        "name": HUB,
        **analyzer_image(job, settings),
        "command": _command(job, owner, settings),
        "env": variables(values),
        "ports": [{"name": "http", "containerPort": HUB_PORT, "protocol": "TCP"}],
        "resources": given.to_dict() if given.requests or given.limits else default_resources(job.world.world_size),
        "securityContext": container_security(read_only=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": _probe("/healthz", period_s=2, failures=STARTS_S // 2),
        "readinessProbe": _probe("/readyz", period_s=2, failures=3),
        "livenessProbe": _probe("/healthz", period_s=10, failures=6),
        "volumeMounts": _mounts(job, owner),
    }


def _command(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> list[str]:
    """Return the command. All clients need a token; the gateway serves the pages itself."""
    url = serve_url(owner.namespace, owner.name, settings.cluster_domain)
    model = ["--serve-url", url] if job.spec.mode == "serve" else []
    place = ["--host", "0.0.0.0", "--allow-remote", "--port", str(HUB_PORT)]
    files = ["--job-file", f"{storage.JOB}/{storage.JOB_KEY}", "--state-dir", STATE]
    return ["python3", "-m", "megatronapp_analyzer.hub", *place, *files, *model, "--no-die-with-parent"]


def _probe(path: str, *, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _mounts(job: MegatronJob, owner: JobOwner) -> list[Object]:
    """Return the mounts. Hubs of many jobs may use one claim: each has a folder named by the job's uid."""
    state: Object = {"name": "state", "mountPath": STATE}
    state |= {"subPath": f"megatronapp-hubs/{owner.uid}"} if job.spec.analyzer.volume.claim is not None else {}
    return [
        {"name": "secret", "mountPath": storage.SECRET, "readOnly": True},
        {"name": "job", "mountPath": storage.JOB, "readOnly": True},
        state,
        {"name": "tmp", "mountPath": "/tmp"},
    ]
