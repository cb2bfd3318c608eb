"""Errors of the cluster as answers, and the count of refused requests."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.requests import HTTPConnection

from megatronapp_common.web import problems
from megatronapp_common.web.body_limit import IncompleteBodyError
from megatronapp_common.web.problems import Convert, HttpError
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ForbiddenError


def count_error(connection: HTTPConnection, error: HttpError) -> None:
    """Count a refused request in the metrics, if there are any; one that broke off was not refused."""
    if not isinstance(error, IncompleteBodyError):
        getattr(connection.app.state, "refused", lambda _: None)(error)


def of_api(error: ApiError) -> HttpError:
    """The cluster does not answer the gateway, or does not let it do its work; never the caller's fault."""
    if isinstance(error, ForbiddenError):
        hint = "Grant the gateway this right, as the chart does, or start it with --no-reviews."
        return HttpError(503, "gateway-without-right", f"the gateway may not ask the cluster: {error}", hint)
    return HttpError(503, "cluster-not-there", f"the cluster's API does not answer: {error}", "Try again in a moment.")


def _counted(request: Request, error: HttpError | ApiError) -> HttpError:
    answer = error if isinstance(error, HttpError) else of_api(error)
    count_error(request, answer)
    return answer


def install(app: FastAPI) -> None:
    """Register these error answers with `app`."""
    converters: dict[type[Exception], Convert] = {
        HttpError: _counted,
        ApiError: _counted,
        RequestValidationError: problems.invalid_request,
    }
    problems.install(app, converters)
