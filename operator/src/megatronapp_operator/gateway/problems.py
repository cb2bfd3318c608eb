"""Answers that are not a success: always `{"code", "message", "hint"}` with a fitting status."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from megatronapp_common.field_errors import describe
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ForbiddenError
from megatronapp_operator.errors import OperatorError

WHERE = "See /api/v1/openapi.json for what there is."


class GatewayError(OperatorError):
    """A request that the gateway refuses. `status` is the HTTP status; `retry_s` is when another try may help."""

    def __init__(self, status: int, code: str, message: str, hint: str, *, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.retry_s = retry_s


def problem_response(status: int, code: str, message: str, hint: str) -> JSONResponse:
    """The one shape of an error."""
    body = {"code": code, "message": message, "hint": hint}
    return JSONResponse(body, status, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None)


def gateway_error_response(refusal: GatewayError) -> JSONResponse:
    """The answer for a refusal."""
    answer = problem_response(refusal.status, refusal.code, str(refusal), refusal.hint)
    if refusal.retry_s is not None:
        answer.headers["Retry-After"] = str(refusal.retry_s)
    return answer


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    count_error(request, error)
    return gateway_error_response(error)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    refusal = of_api(error)
    count_error(request, refusal)
    return gateway_error_response(refusal)


def count_error(connection: HTTPConnection, refusal: GatewayError) -> None:
    """Let the metrics know, where there are any."""
    getattr(connection.app.state, "refused", lambda _: None)(refusal)


def of_api(error: ApiError) -> GatewayError:
    """The cluster does not answer the gateway, or does not let it do its work; never the caller's fault."""
    if isinstance(error, ForbiddenError):
        hint = "Whoever installed the chart must give the gateway this right, or start it with --no-reviews."
        return GatewayError(503, "gateway-without-right", f"the gateway may not ask the cluster: {error}", hint)
    return GatewayError(
        503, "cluster-not-there", f"the cluster's API does not answer: {error}", "Try again in a moment."
    )


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    hint = "See /api/v1/openapi.json for the fields."
    return problem_response(422, "invalid-request", describe(error.errors()), hint)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http-error")
    answer = problem_response(error.status_code, code, f"{request.url.path}: {error.detail}", WHERE)
    answer.headers.update(error.headers or {})
    return answer


def install(app: FastAPI) -> None:
    """Give `app` these error answers."""
    app.add_exception_handler(GatewayError, _on_refusal)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
