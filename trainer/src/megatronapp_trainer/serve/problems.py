"""Errors of the HTTP interface, in one form for both kinds of clients.

`{"code", "message", "hint"}` as everywhere in this product, and `error` as clients of OpenAI's interface read it.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from megatronapp_common.field_errors import describe, place_of
from megatronapp_common.scope.perturbation.choice import NAME_TAG, RECIPE_TAG
from megatronapp_common.web import problems
from megatronapp_common.web.problems import HttpError, problem_response
from megatronapp_trainer.inference.errors import (
    AnalysisMemoryError,
    EngineLostError,
    GenerationError,
    QueueFullError,
    RequestError,
)
from megatronapp_trainer.serve.errors import NotReadyError, SlowReaderError, StoppingError

SEE = "See /openapi.json for what there is."
UNION_TAGS = frozenset({"<text>", "<texts>", "<tokens>", "<token lists>", "<parts>", RECIPE_TAG, NAME_TAG})
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
    AnalysisMemoryError: (503, "out-of-memory", "Request fewer rows, layers or tokens, or generate fewer at a time."),
    EngineLostError: (503, "engine-lost", "The ranks are restarted; try again in a moment."),
    NotReadyError: (503, "not-ready", "/readyz answers 200 once requests are accepted."),
    SlowReaderError: (408, "slow-reader", "Read a stream while it is sent, or request fewer tokens."),
    StoppingError: (503, "stopping", "Ask another server, or this one once it is back."),
}
_FAILED = (500, "generation-failed", "See the server's log.")


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the body of an error. OpenAI's clients show only `error.message`, so it includes the hint."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = f"{str(error).removesuffix('.')}. {error.hint}" if error.hint else str(error)
    return error.body | {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: HttpError) -> JSONResponse:
    """Return the response of an error."""
    error.retry_s = RETRY_S.get(error.status)
    return problem_response(error, error_body(error))


def http_error(error: GenerationError) -> HttpError:
    """Convert an error of generation to an answer."""
    message = str(error)
    if isinstance(error, RequestError):
        return _of_request(error, message)
    found = next((answer for kind, answer in _ANSWERS.items() if isinstance(error, kind)), _FAILED)
    status, code, hint = found
    return HttpError(status, code, message, hint=hint)


def _of_request(error: RequestError, message: str) -> HttpError:
    param = _PARAMS.get(error.field, error.field)
    words = message.replace(error.field, param, 1)
    if error.field in TOO_LARGE:
        return HttpError(413, "too-long", words, hint="max_model_len of /v1/models is the limit.", param=param)
    return HttpError(422, "invalid-request", words, hint=SEE, param=param)


def install(app: FastAPI) -> None:
    """Register these error answers with `app`."""
    converters = {
        GenerationError: lambda _, error: http_error(error),
        RequestValidationError: lambda _, error: _of_validation(error),
    }
    problems.install(app, converters, answer=error_response, where=SEE)


def _of_validation(error: RequestValidationError) -> HttpError:
    found = error.errors()
    param = place_of(found[0], tags=UNION_TAGS).partition(".")[0] or None
    return HttpError(422, "invalid-request", describe(found, tags=UNION_TAGS), SEE, param=param)
