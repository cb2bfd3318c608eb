"""Exceptions for rejections by an API server.

ApiError (an OperatorError)
├── AlreadyExistsError   409: an object of this name exists
├── ConflictError        409: the object has changed since it was read, or is not the one that was meant
├── ForbiddenError       403: no right, a quota, or pod security
│   └── NamespaceTerminatingError   the namespace accepts no new objects
├── NotFoundError        404
├── ExpiredError         410: a list or watch must begin again
├── InvalidError         422: the object breaks a rule
├── ThrottledError       429: too many requests
└── UnavailableError     5xx, or no answer
NameTakenError (an OperatorError): another owner's object has the name of one of ours
RetryReconcileError (an OperatorError): what was observed is out of date; reconcile again at once
LeaseLostError (an OperatorError): another process may lead now
"""

from collections.abc import Mapping
from typing import Any

from megatronapp_operator.errors import OperatorError

NO_ANSWER, TERMINATING = "error", "terminating"
"""Codes in metrics of a request without an answer, and of a NamespaceTerminatingError; others are HTTP statuses."""


class ApiError(OperatorError):
    """A request that the API server did not carry out. `status` is its HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, *, status: int = 0, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = dict(details or {})
        """`details` of the Status object: causes with their fields, seconds to wait."""

    @property
    def code(self) -> str:
        """Code under which metrics count the answer."""
        return str(self.status) if self.status else NO_ANSWER


class AlreadyExistsError(ApiError):
    """An object of this name exists."""


class ConflictError(ApiError):
    """The object has changed since it was read, or is not the one that was meant."""


class ForbiddenError(ApiError):
    """The right is missing, a quota is used up, or pod security forbids the object; the text says which."""


class NamespaceTerminatingError(ForbiddenError):
    """The namespace is being terminated and accepts no new objects, so the only remedy is to wait."""

    @property
    def code(self) -> str:
        """TERMINATING: an alert takes a 403 for a missing right."""
        return TERMINATING


class NotFoundError(ApiError):
    """The object or its kind does not exist."""


class ExpiredError(ApiError):
    """The resource version or continue token of a list or a watch is too old."""


class InvalidError(ApiError):
    """The object breaks the schema or a rule; `details["causes"]` says where."""


class ThrottledError(ApiError):
    """The API server requests a pause."""

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait; 1 if the answer does not say."""
        return float(self.details.get("retryAfterSeconds") or 1)


class UnavailableError(ApiError):
    """The server failed or cannot be reached. It is not known whether the request was carried out."""


class NameTakenError(OperatorError):
    """An object of another owner has the name of one of this job's objects."""


class RetryReconcileError(OperatorError):
    """The state with which a reconcile began is out of date: reconcile again at once, nothing is wrong."""


class LeaseLostError(OperatorError):
    """The lease could not be renewed in time, or has another holder: a leader must stop at once."""


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
"""Cause in the API server's answer (NamespaceTerminatingCause in k8s.io/api/core/v1)."""


def api_error_for(status: int, document: Mapping[str, Any], request: str) -> ApiError:
    """Return the exception for an answer; `document` is its Status object, as far as there is one."""
    kind = _BY_STATUS.get(status, UnavailableError if status >= SERVER_FAULT else ApiError)
    details = document.get("details") or {}
    if document.get("reason") == "AlreadyExists":
        kind = AlreadyExistsError
    if kind is ForbiddenError and any(cause.get("reason") == NAMESPACE_ENDS for cause in details.get("causes") or ()):
        kind = NamespaceTerminatingError
    message = document.get("message") or "no reason given"
    return kind(f"{request}: {message}", status=status, details=details)
