"""Features of a cluster without which a job would start in another way than its manifest says.

An API server drops fields of pods whose feature is off, without a word.
"""

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes.render.pod.scheduling import KUBERNETES
from megatronapp_operator.backends.kubernetes.render.settings import RenderSettings

POD_GROUPS_MISSING = (
    "spec.scheduling.gang: Kubernetes needs an API server that serves PodGroup in scheduling.k8s.io/v1beta1 or "
    "v1alpha2, or Workload in v1alpha1 (feature gate GenericWorkload), and served none when the operator began; switch "
    "it on and restart the operator, or make the job with another gang"
)
CLAIMS_MISSING = (
    "spec.podTemplate.spec.resourceClaims needs an API server that serves resource.k8s.io (Kubernetes 1.34), which it "
    "did not when the operator began; switch it on and restart the operator, or leave the claims out"
)


def missing_features(job: MegatronJob, settings: RenderSettings) -> tuple[str, ...]:
    """Return what the cluster lacks for a job, each with what to do."""
    gang = job.spec.scheduling.gang == KUBERNETES and settings.pod_groups is None
    claims = bool(job.spec.pod_template.spec.get("resourceClaims")) and not settings.resource_claims
    return (*([POD_GROUPS_MISSING] if gang else []), *([CLAIMS_MISSING] if claims else []))
