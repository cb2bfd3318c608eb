"""Volumes of a job's pods and their mounts."""

import fractions
import posixpath
from typing import Any

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.cluster import Initializer, Volume
from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_common.job.inbox_memory import inbox_bytes
from megatronapp_common.job.shipment_memory import shipment_bytes
from megatronapp_common.names import ANNOTATION_RESTART, ANNOTATION_SAVE
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod.quantities import text_of
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import TRAINER, WorkerDraft

SHM = "/dev/shm"
RUN = "/run/megatronapp/run"
SECRET = "/run/megatronapp/secret"
SECRET_FILE = f"{SECRET}/secret"
SECRET_KEY = "secret"
RESTART = "/run/megatronapp/restart"
RESTART_FILE = f"{RESTART}/order"
SAVE = "/run/megatronapp/save"
SAVE_FILE = f"{SAVE}/request"
JOB = "/run/megatronapp/job"
JOB_KEY = "job.yaml"
DEFAULT_SHM = "16Gi"
BESIDES_MESSAGES = "1Gi"
"""Space for trace rings, documents and data loaders, which the messages of MegaDPP and MegaFBD leave free."""


def shm_size(draft: WorkerDraft) -> str:
    """Return the size of the memory volume.

    It counts against the trainer's memory limit, so the default is at most half, or what the messages of MegaDPP or
    MegaFBD need, and stays below the limit. If the messages alone exceed the limit, the ranks refuse the space at their
    start. Checkpoints in memory may take all of that half: the volume takes no memory but that of its files.
    """
    given = draft.spec.shm.size_limit
    if given is not None:
        return given
    limit = min(map(quantity_value, _memory_limits(draft)), default=None)
    size = quantity_value(DEFAULT_SHM)
    if limit is not None:
        half = fractions.Fraction(int(limit / 2))
        size = min(size, half) if draft.spec.checkpoint.memory_save_interval is None else half
    messages = inbox_bytes(draft.job) + shipment_bytes(draft.job, draft.group)
    if messages and (limit is None or messages < limit):
        needed = messages + quantity_value(BESIDES_MESSAGES)
        most = needed if limit is None else (messages + limit) / 2
        size = max(size, fractions.Fraction(int(min(needed, most))))
    return DEFAULT_SHM if size == quantity_value(DEFAULT_SHM) else text_of(size)


def _memory_limits(draft: WorkerDraft) -> list[Any]:
    """Return the limits that shared memory counts against.

    These are the trainer's, which a template may replace, and the pod's.
    """
    own: Any = draft.group.resources.limits.get("memory")
    template = draft.spec.pod_template.spec
    for container in template.get("containers") or ():
        given = (container.get("resources") or {}).get("limits") or {}
        if container["name"] == TRAINER and "memory" in given:
            own = given["memory"]
    pod = ((template.get("resources") or {}).get("limits") or {}).get("memory")
    return [limit for limit in (own, pod) if limit is not None]


def shm_bytes(draft: WorkerDraft) -> int:
    """Return the size of the memory volume in bytes."""
    return int(quantity_value(shm_size(draft)))


def own_volumes(draft: WorkerDraft) -> list[Object]:
    """Return the volumes of every worker."""
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm_size(draft)}},
        {"name": "run", "emptyDir": {}},
        secret_volume(draft.names.secret(draft.owner.uid, draft.settings.key_id)),
        *([_annotation_volume("restart", "order", ANNOTATION_RESTART)] if draft.in_place else []),
        *([_annotation_volume("save", "request", ANNOTATION_SAVE)] if draft.saves_by_request else []),
    ]


def _annotation_volume(name: str, file: str, annotation: str) -> Object:
    """Return the volume into which the kubelet writes an annotation: an order or a request to the launcher."""
    item = {"path": file, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
    return {"name": name, "downwardAPI": {"items": [item]}}


def secret_volume(name: str) -> Object:
    """Return the volume of the job's secret, readable by the group of all containers."""
    return {"name": "secret", "secret": {"secretName": name, "defaultMode": 0o440}}


def shared_mounts(draft: WorkerDraft) -> list[Object]:
    """Return the mounts that trainer and agent have in common: ranks send MegaScope's captures by a socket in RUN."""
    return [
        {"name": "shm", "mountPath": SHM},
        {"name": "secret", "mountPath": SECRET, "readOnly": True},
        *([{"name": "restart", "mountPath": RESTART, "readOnly": True}] if draft.in_place else []),
        {"name": "run", "mountPath": RUN},
    ]


def trainer_mounts(draft: WorkerDraft) -> list[Object]:
    """Return the mounts of the trainer."""
    return [
        *shared_mounts(draft),
        *([{"name": "save", "mountPath": SAVE, "readOnly": True}] if draft.saves_by_request else []),
    ]


def claims(job: MegatronJob) -> list[Volume]:
    """Return the volume claims of a job, data before checkpoints."""
    return [volume for volume in (job.spec.data.volume, job.spec.checkpoint.volume) if volume is not None]


def claim_volumes(job: MegatronJob) -> list[Object]:
    """Return one volume for each claim, however often it is mounted."""
    names = list(dict.fromkeys(volume.claim for volume in claims(job)))
    return [{"name": _claim_name(job, name), "persistentVolumeClaim": {"claimName": name}} for name in names]


def claim_mounts(job: MegatronJob, *, writable: bool = False) -> list[Object]:
    """Return the mounts of the claims; `writable` is for containers that fetch what others read."""
    return [
        {"name": _claim_name(job, volume.claim), "mountPath": volume.mount_path}
        | ({"subPath": volume.sub_path} if volume.sub_path is not None else {})
        | ({"readOnly": True} if volume.read_only and not writable else {})
        for volume in claims(job)
    ]


def _claim_name(job: MegatronJob, claim: str) -> str:
    """Return a volume name for a claim, whose name may be too long and may have dots."""
    return f"claim-{list(dict.fromkeys(volume.claim for volume in claims(job))).index(claim)}"


def local_targets(job: MegatronJob) -> dict[str, str]:
    """Return name and path of a directory for each initializer of every node that writes to no volume claim."""
    made: dict[str, str] = {}
    for given in node_initializers(job):
        if given.target is None or any(is_below(given.target, volume.mount_path) for volume in claims(job)):
            continue
        place = posixpath.normpath(given.target)
        if not any(is_below(place, known) for known in made.values()):
            made[f"local-{len(made)}"] = place
    return made


def local_volumes(job: MegatronJob) -> list[Object]:
    """Return volumes for directories on the node's disk that live as long as the pod."""
    return [{"name": name, "emptyDir": {}} for name in local_targets(job)]


def local_mounts(job: MegatronJob) -> list[Object]:
    """Return the mounts of these directories, for the initializers and the trainer."""
    return [{"name": name, "mountPath": place} for name, place in local_targets(job).items()]


def node_initializers(job: MegatronJob) -> list[Initializer]:
    """Return the initializers of every worker."""
    return [given for given in job.spec.initializers if given.scope == "Node"]


def loses_checkpoints(job: MegatronJob) -> bool:
    """Return True if the checkpoints of a training are deleted with its pods, because no volume holds their folder."""
    spec = job.spec
    if spec.mode != "train" or spec.checkpoint.save is None:
        return False
    template: Object = spec.pod_template.spec
    passing = {volume["name"] for volume in template.get("volumes") or () if "emptyDir" in volume}
    mounts = [
        mount["mountPath"]
        for container in template.get("containers") or ()
        for mount in container.get("volumeMounts") or ()
        if container["name"] == TRAINER and mount["name"] not in passing
    ]
    save = spec.checkpoint.save
    return not any(is_below(save, place) for place in (*mounts, *(volume.mount_path for volume in claims(job))))


def is_below(path: str, folder: str) -> bool:
    """Return True if a path is the folder or below it."""
    path, folder = posixpath.normpath(path), posixpath.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
