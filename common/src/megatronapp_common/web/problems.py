"""Answers that are not a success: always `{"code", "message", "hint"}` with a fitting HTTP status."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatronapp_common.field_errors import describe

UNION_TAGS = frozenset({"<recipe>", "<name>"})
"""Names of union members in the schemas of hub and gateway, which are no part of a field's location."""
DOCUMENT = "/api/v1/openapi.json"
WHERE = f"See {DOCUMENT} for what there is."
_CODES = {400: "bad-request", 404: "not-found", 405: "method-not-allowed"}


class HttpError(Exception):
    """An answer that is not a success.

    `status` is the HTTP status; `retry_s`: after how many whole seconds another try may help; `param`: the field of the
    request that is wrong.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        *,
        retry_s: int | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.retry_s = retry_s
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer, also the header of an ERROR frame."""
        return {"code": self.code, "message": str(self), "hint": self.hint}


class ValidationError(Protocol):
    """A request that does not fit its schema, such as FastAPI's RequestValidationError."""

    def errors(self) -> Sequence[Any]:
        """Return what is wrong, as pydantic lists it."""


Answer = Callable[[HttpError], Response]
Convert = Callable[[Request, Any], HttpError]


def problem_response(error: HttpError, body: Mapping[str, Any] | None = None) -> JSONResponse:
    """Return the answer of an error, with another body than its own if one is given."""
    headers = error.headers | ({} if error.retry_s is None else {"Retry-After": str(error.retry_s)})
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"  # a 401 must name a scheme (RFC 9110, section 15.5.2)
    return JSONResponse(body or error.body, error.status, headers)


def invalid_request(_: Request, error: ValidationError) -> HttpError:
    """Convert a request that does not fit its schema."""
    return HttpError(
        422, "invalid-request", describe(error.errors(), tags=UNION_TAGS), f"See {DOCUMENT} for the fields."
    )


def install(
    app: Starlette,
    converters: Mapping[type[Exception], Convert],
    *,
    answer: Answer = problem_response,
    where: str = WHERE,
) -> None:
    """Register answers of HttpError, of errors of the routing, and of the exceptions of `converters`."""

    def of_routing(request: Request, error: HTTPException) -> HttpError:
        code, text = _CODES.get(error.status_code, "http-error"), f"{request.url.path}: {error.detail}"
        return HttpError(error.status_code, code, text, where, headers=error.headers)

    def handler(convert: Convert) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def handle(request: Request, error: Exception) -> Response:
            return answer(convert(request, error))

        return handle

    defaults: dict[type[Exception], Convert] = {HttpError: lambda _, error: error, HTTPException: of_routing}
    for kind, convert in (defaults | dict(converters)).items():
        app.add_exception_handler(kind, handler(convert))
