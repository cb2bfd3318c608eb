"""Guard in front of an application: no route is reached by a request that a check refuses."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from megatronapp_common.names import CloseCode
from megatronapp_common.web.problems import Answer, HttpError, problem_response


class Guard:
    """ASGI layer that passes a request on, or answers with the error that `check` returns; it closes a WebSocket."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: Callable[[Scope], HttpError | None],
        answer: Answer = problem_response,
        on_refusal: Callable[[Scope, HttpError], None] = lambda _scope, _error: None,
    ) -> None:
        """Guard `app`. `on_refusal`: is called with each request that is refused, which no route of `app` sees."""
        self._app = app
        self._check = check
        self._answer = answer
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it here."""
        error = None if scope["type"] == "lifespan" else self._check(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        self._on_refusal(scope, error)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": CloseCode.POLICY, "reason": str(error)})
        else:
            await self._answer(error)(scope, receive, send)
