"""What an API server refuses, as exceptions.

ApiError (an OperatorError)
├── AlreadyExistsError   409: an object of this name is there
├── ConflictError        409: the object has changed since it was read, or is not the one that was meant
├── ForbiddenError       403: no right, a quota, or pod security
│   └── NamespaceEndsError   the namespace is on its way out, and takes nothing new
├── NotFoundError        404
├── GoneError            410: a list or watch must begin afresh
├── InvalidError         422: the object breaks a rule
├── ThrottledError       429: too many requests
└── UnavailableError     5xx, or no answer at all
NameTakenError (an OperatorError): something else has the name of one of our objects
AgainError (an OperatorError): what was seen is out of date; look again at once
LeaseLostError (an OperatorError): somebody else may lead now
"""

from collections.abc import Mapping
from typing import Any

from megatronapp_operator.errors import OperatorError


class ApiError(OperatorError):
    """A request that the API server did not carry out. `status` is its HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, *, status: int = 0, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = dict(details or {})
        """`details` of the Status object: causes with their fields, seconds to wait."""


class AlreadyExistsError(ApiError):
    """An object of this name is there."""


class ConflictError(ApiError):
    """The object has changed since it was read, or is not the one that was meant."""


class ForbiddenError(ApiError):
    """No right to it, a quota is used up, or pod security does not allow it; the text says which."""


class NamespaceTerminatingError(ForbiddenError):
    """Nothing new is taken into a namespace that is being terminated: there is nothing to do but wait."""


class NotFoundError(ApiError):
    """No such object, or no such kind."""


class ExpiredError(ApiError):
    """What a list or a watch went on from is too old."""


class InvalidError(ApiError):
    """The object breaks the schema or a rule; `details["causes"]` says where."""


class ThrottledError(ApiError):
    """The API server asks for a pause."""

    @property
    def retry_after_s(self) -> float:
        """How long; 1 if it does not say."""
        return float(self.details.get("retryAfterSeconds") or 1)


class UnavailableError(ApiError):
    """It failed by itself, or cannot be reached. Whether the request was carried out is not known."""


class NameTakenError(OperatorError):
    """Something that is not this job's has the name of one of its objects."""


class RetryReconcileError(OperatorError):
    """What a look at a job began with is out of date: look again at once, nothing is wrong."""


class LeaseLostError(OperatorError):
    """The lease could not be renewed in time, or has another holder: who led must stop at once."""


_BY_STATUS: dict[int, type[ApiError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: ExpiredError,
    422: InvalidError,
    429: ThrottledError,
}
SERVER_FAULT = 500
NAMESPACE_ENDS = "NamespaceTerminating"
"""Cause that the API server names (NamespaceTerminatingCause in k8s.io/api/core/v1)."""


def api_error_for(status: int, document: Mapping[str, Any], request: str) -> ApiError:
    """The exception for an answer; `document` is its Status object, as far as there is one."""
    kind = _BY_STATUS.get(status, UnavailableError if status >= SERVER_FAULT else ApiError)
    details = document.get("details") or {}
    if document.get("reason") == "AlreadyExists":
        kind = AlreadyExistsError
    if kind is ForbiddenError and any(one.get("reason") == NAMESPACE_ENDS for one in details.get("causes") or ()):
        kind = NamespaceTerminatingError
    message = document.get("message") or "no reason given"
    return kind(f"{request}: {message}", status=status, details=details)
