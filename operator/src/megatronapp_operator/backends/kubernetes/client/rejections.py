"""What it means for a job that the API server did not take a pod. Pure.

Only what no change around the pod can heal is final: the pod is not valid, or pod security forbids it. A missing
account, a priority class, a quota that asks for limits and a policy of the cluster may be there a moment later.
"""

from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ForbiddenError, InvalidError
from megatronapp_operator.plan import PodRejection, reasons

QUOTA = "exceeded quota"
POD_SECURITY = "violates PodSecurity"
OWN_RIGHTS = ("cannot create resource", "cannot patch resource", "because it is being terminated")
"""Words of a 403 that says nothing about the pod: we lack a right, or the whole namespace goes."""
DENIED = ("denied the request", "denied request")
"""Words of an admission webhook and of a ValidatingAdmissionPolicy, which choose their own code: 400, 403 or 422."""
BAD_REQUEST = 400


def classify_rejection(error: ApiError, attempt: int) -> PodRejection | None:
    """What the plan is told; None for an error that the same request may not meet again, or that is not the job's."""
    text, forbidden = str(error), isinstance(error, ForbiddenError)
    if not forbidden and not isinstance(error, InvalidError) and error.status != BAD_REQUEST:
        return None
    if forbidden and QUOTA in text:
        return PodRejection(attempt=attempt, final=False, reason=reasons.QUOTA_EXCEEDED, message=text)
    if forbidden and any(words in text for words in OWN_RIGHTS):
        return None
    if POD_SECURITY in text:
        return PodRejection(attempt=attempt, final=True, reason=reasons.POD_FORBIDDEN, message=text)
    if forbidden or any(words in text for words in DENIED):
        return PodRejection(attempt=attempt, final=False, denied=True, reason=reasons.POD_DENIED, message=text)
    return PodRejection(attempt=attempt, final=True, reason=reasons.POD_INVALID, message=text)
