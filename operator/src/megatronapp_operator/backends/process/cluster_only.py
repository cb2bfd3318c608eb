"""Fields of a manifest without a meaning on one machine: they are accepted, and a note says that they do nothing."""

from megatronapp_common.job import MegatronJob

CLUSTER_ONLY = (
    "gpuResourceName",
    "data.volume",
    "checkpoint.volume",
    "analyzer.image",
    "analyzer.resources",
    "analyzer.slowNode",
    "analyzer.volume",
    "runPolicy.restart",
    "runPolicy.spares",
    "runPolicy.elastic",
    "runPolicy.disruption",
    "runPolicy.lostNodeTimeoutSeconds",
    "runPolicy.ttlSecondsAfterFinished",
    "runPolicy.nodeExclusion",
    "runPolicy.checkpointAgeSeconds",
    "fbd.forward.nodeSelector",
    "fbd.forward.resources",
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "resources",
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
    "schedulerName",
    "runtimeClassName",
    "serviceAccountName",
    "podTemplate",
    "shm",
    "network",
    "initializers",
    "scheduling",
    "managedBy",
)
"""Paths of the fields, relative to spec."""


def without_effect(job: MegatronJob) -> str | None:
    """Return a note about given fields without effect on this machine; None without such fields."""
    given = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    names = [f"spec.{path}" for path in CLUSTER_ONLY if _is_given(given, path)]
    return f"without a cluster these have no effect: {', '.join(names)}" if names else None


def _is_given(block: object, path: str) -> bool:
    name, _, rest = path.partition(".")
    if not isinstance(block, dict) or name not in block:
        return False
    return not rest or _is_given(block[name], rest)
