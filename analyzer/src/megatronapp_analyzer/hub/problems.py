"""Errors of the HTTP interface: always `{"code", "message", "hint"}` with a fitting status."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

NO_STORE = {"Cache-Control": "no-store"}


class ApiError(Exception):
    """An answer that is not a success. `status` is the HTTP status."""

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint


def problem_response(status: int, code: str, message: str, hint: str) -> JSONResponse:
    """The one shape of an error."""
    return JSONResponse({"code": code, "message": message, "hint": hint}, status, headers=NO_STORE)


def _describe(error: RequestValidationError) -> str:
    parts = (f"{'.'.join(str(place) for place in item['loc'])}: {item['msg']}" for item in error.errors())
    return "; ".join(parts)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return problem_response(error.status, error.code, str(error), error.hint)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return problem_response(422, "invalid-request", _describe(error), "See /api/v1/openapi.json for the fields.")


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    hint = "See /api/v1/openapi.json for what there is."
    code = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http-error")
    return problem_response(error.status_code, code, f"{request.url.path}: {error.detail}", hint)


def install(app: FastAPI) -> None:
    """Give `app` these error answers."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
