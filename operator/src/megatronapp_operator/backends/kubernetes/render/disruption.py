"""Budget that refuses evictions of a gang, and annotations by which autoscalers spare its nodes."""

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import LABEL_SPARE, ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import DISRUPTION_BUDGETS
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, labels, make, metadata, selector
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner, Rendered

PROTECTED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations with which neither autoscaler chooses the node of a pod for removal."""


def disruption_budget(job: MegatronJob, owner: JobOwner) -> Rendered:
    """Return the budget of all workers of a gang; spares are not part of it.

    It has a number of pods: for maxUnavailable and percentages the disruption controller would read the scale of the
    pods' owner, which a MegatronJob does not have.
    """
    workers = selector(owner, ReplicaType.WORKER)
    gang = [{"key": LABEL_SPARE, "operator": "DoesNotExist"}]
    spec = {"minAvailable": job.world.nodes, "selector": workers | {"matchExpressions": gang}}
    meta = metadata(owner, ObjectNames(owner.name).workers, labels(owner, ReplicaType.WORKER.value))
    return DISRUPTION_BUDGETS, make(DISRUPTION_BUDGETS.api_version, "PodDisruptionBudget", meta, spec=spec)


def protection(job: MegatronJob) -> dict[str, str]:
    """Return the annotations of a worker that autoscalers read."""
    return PROTECTED if job.spec.run_policy.disruption == "Protect" else {}
