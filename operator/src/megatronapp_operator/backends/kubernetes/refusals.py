"""What it means for a job that the API server did not take a pod. Pure."""

from megatronapp_operator.backends.kubernetes.errors import ApiError, ForbiddenError, InvalidError
from megatronapp_operator.plan import Refusal

QUOTA = "exceeded quota"
OWN_RIGHTS = ("cannot create resource", "cannot patch resource", "because it is being terminated")
"""Words of a 403 that says nothing about the pod: we lack a right, or the whole namespace goes."""
BAD_REQUEST = 400


def refusal_of(error: ApiError, attempt: int) -> Refusal | None:
    """What the plan is told; None for an error that the same request may not meet again, or that is not the job's."""
    text = str(error)
    if isinstance(error, ForbiddenError):
        if QUOTA in text:
            return Refusal(attempt=attempt, final=False, reason="QuotaExceeded", message=text)
        if any(words in text for words in OWN_RIGHTS):
            return None
        return Refusal(attempt=attempt, final=True, reason="PodForbidden", message=text)
    if isinstance(error, InvalidError) or error.status == BAD_REQUEST:
        return Refusal(attempt=attempt, final=True, reason="PodInvalid", message=text)
    return None
