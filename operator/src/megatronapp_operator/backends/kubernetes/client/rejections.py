"""Classification of rejected pods for the plan. Pure.

Only a rejection that no change around the pod can repair is final: the pod is not valid, or pod security forbids it. A
missing account, a priority class, a quota that requires limits and a policy of the cluster may be fixed a moment later.
"""

from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ForbiddenError, InvalidError
from megatronapp_operator.plan import PodRejection, reasons

QUOTA = "exceeded quota"
POD_SECURITY = "violates PodSecurity"
OWN_RIGHTS = ("cannot create resource", "cannot patch resource", "because it is being terminated")
"""Texts of a 403 that is not about the pod: the operator lacks a right, or the namespace is being terminated."""
DENIED = ("denied the request", "denied request")
"""Texts of admission webhooks and of ValidatingAdmissionPolicies, which choose their status code: 400, 403 or 422."""
BAD_REQUEST = 400


def classify_rejection(error: ApiError, attempt: int) -> PodRejection | None:
    """Return the rejection for the plan; None for an error that may pass by itself, or is not about the job."""
    text, forbidden = str(error), isinstance(error, ForbiddenError)
    if not forbidden and not isinstance(error, InvalidError) and error.status != BAD_REQUEST:
        return None
    if forbidden and QUOTA in text:
        return PodRejection(attempt=attempt, final=False, reason=reasons.QUOTA_EXCEEDED, message=text)
    if forbidden and any(phrase in text for phrase in OWN_RIGHTS):
        return None
    if POD_SECURITY in text:
        return PodRejection(attempt=attempt, final=True, reason=reasons.POD_FORBIDDEN, message=text)
    if forbidden or any(phrase in text for phrase in DENIED):
        return PodRejection(attempt=attempt, final=False, denied=True, reason=reasons.POD_DENIED, message=text)
    return PodRejection(attempt=attempt, final=True, reason=reasons.POD_INVALID, message=text)
