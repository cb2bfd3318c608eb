"""Errors of the HTTP interface, in one form for both kinds of clients.

`{"code", "message", "hint"}` as everywhere in this product, and `error` as clients of OpenAI's interface read it.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from megatronapp_common.field_errors import describe, place_of
from megatronapp_trainer.inference.errors import EngineLostError, GenerationError, QueueFullError, RequestError
from megatronapp_trainer.serve.errors import NotReadyError, SlowReaderError, StoppingError

SEE = "See /openapi.json for what there is."
UNION_TAGS = frozenset({"<text>", "<texts>", "<tokens>", "<token lists>", "<parts>"})
"""Names of union members in schemas, which are no part of a field's location."""
RETRY_S = {429: 1, 503: 5}
_PARAMS = {
    "prompt": "prompt",
    "max_new_tokens": "max_tokens",
    "stop_texts": "stop",
    "stop_tokens": "stop_token_ids",
    "candidates": "logprobs",
}
"""Names of our request fields in OpenAI's errors."""
TOO_LARGE = frozenset({"max_new_tokens"})
_ANSWERS: dict[type[GenerationError], tuple[int, str, str]] = {
    QueueFullError: (429, "queue-full", "Try again after Retry-After seconds."),
    EngineLostError: (503, "engine-lost", "The ranks are restarted; try again in a moment."),
    NotReadyError: (503, "not-ready", "/readyz answers 200 once requests are accepted."),
    SlowReaderError: (408, "slow-reader", "Read a stream while it is sent, or request fewer tokens."),
    StoppingError: (503, "stopping", "Ask another server, or this one once it is back."),
}
_FAILED = (500, "generation-failed", "See the server's log.")


class ApiError(Exception):
    """An answer that is not a success. `param` is the location in the request."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.param = param


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error. OpenAI's clients show only `error.message`, so it includes the hint."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = f"{str(error).removesuffix('.')}. {error.hint}" if error.hint else str(error)
    detail = {"message": message, "type": kind, "param": error.param, "code": error.code}
    return {"code": error.code, "message": str(error), "hint": error.hint, "error": detail}


def error_response(error: ApiError) -> JSONResponse:
    """Return the response of an error."""
    headers = {"Retry-After": str(RETRY_S[error.status])} if error.status in RETRY_S else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers=headers)


def api_error(error: GenerationError) -> ApiError:
    """Convert an error of generation to an answer."""
    message = str(error)
    if isinstance(error, RequestError):
        return _of_request(error, message)
    found = next((answer for kind, answer in _ANSWERS.items() if isinstance(error, kind)), _FAILED)
    status, code, hint = found
    return ApiError(status, code, message, hint=hint)


def _of_request(error: RequestError, message: str) -> ApiError:
    param = _PARAMS.get(error.field, error.field)
    words = message.replace(error.field, param, 1)
    if error.field in TOO_LARGE:
        return ApiError(413, "too-long", words, hint="max_model_len of /v1/models is the limit.", param=param)
    return ApiError(422, "invalid-request", words, hint=SEE, param=param)


def install(app: FastAPI) -> None:
    """Register these error answers with `app`."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(GenerationError, _on_generation_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_generation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GenerationError)
    return error_response(api_error(error))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    param = place_of(found[0], tags=UNION_TAGS).partition(".")[0] or None
    return error_response(ApiError(422, "invalid-request", describe(found, tags=UNION_TAGS), hint=SEE, param=param))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {400: "bad-request", 404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http-error")
    answer = error_response(ApiError(error.status_code, code, f"{request.url.path}: {error.detail}", hint=SEE))
    answer.headers.update(error.headers or {})
    return answer
