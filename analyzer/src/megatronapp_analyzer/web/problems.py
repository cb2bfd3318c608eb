"""Errors of the HTTP interface: always `{"code", "message", "hint"}` with a fitting status."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from megatronapp_common.field_errors import describe

NO_STORE = {"Cache-Control": "no-store"}


class ApiError(Exception):
    """An answer that is not a success. `status` is the HTTP status; `retry_s`: when to ask again, in whole seconds."""

    def __init__(self, status: int, code: str, message: str, hint: str, *, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.retry_s = retry_s


def problem_response(status: int, code: str, message: str, hint: str, *, retry_s: int | None = None) -> JSONResponse:
    """The one shape of an error."""
    headers = NO_STORE if retry_s is None else NO_STORE | {"Retry-After": str(retry_s)}
    return JSONResponse({"code": code, "message": message, "hint": hint}, status, headers=headers)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return problem_response(error.status, error.code, str(error), error.hint, retry_s=error.retry_s)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    hint = "See /api/v1/openapi.json for the fields."
    return problem_response(422, "invalid-request", describe(error.errors()), hint)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    hint = "See /api/v1/openapi.json for what there is."
    code = {400: "bad-request", 404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http-error")
    return problem_response(error.status_code, code, f"{request.url.path}: {error.detail}", hint)


def install(app: FastAPI) -> None:
    """Give `app` these error answers."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
