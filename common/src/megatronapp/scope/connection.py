"""HTTP connection to a hub, below its interface of MegaScope (docs/scope-protocol.md, section 8)."""

import time
from collections.abc import Mapping
from typing import Any

import httpx

from megatronapp.scope.errors import ScopeError

API = "/api/v1/scope"
LEAST_PAUSE_S = 0.05


class HubConnection:
    """Requests of one client. Not for several threads at once."""

    def __init__(self, client: httpx.Client, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._through_gateway = "/api/v1/jobs/" in str(client.base_url)

    def close(self) -> None:
        """Close all connections to the hub."""
        self._client.close()

    def log_in(self, code: str) -> None:
        """Log in by a code, as a browser does. Raises ScopeError."""
        origin = str(self._client.base_url).rstrip("/")
        answer = self._send("POST", "/login", data={"token": code}, headers={"Origin": origin})
        if answer.status_code != httpx.codes.SEE_OTHER:
            hint = "A code is good once and for a minute; print a new address with `megatronapp ui JOB --print`."
            raise ScopeError("the hub refused the code", code="unauthorised", hint=hint, status=answer.status_code)

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> httpx.Response:
        """Return the answer of a route below `/api/v1/scope`, once what it needs is computed. Raises ScopeError."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        end = time.monotonic() + self._timeout_s
        while (answer := self.request("GET", path, query=given)).status_code == httpx.codes.ACCEPTED:
            pause = max(LEAST_PAUSE_S, answer.json()["retryMs"] / 1000)
            if time.monotonic() + pause > end:
                hint = "The model may be busy; raise timeout_s."
                raise ScopeError(f"no numbers within {self._timeout_s:g} s", code="timeout", hint=hint)
            time.sleep(pause)
        return answer

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """Return a successful answer of a route below `/api/v1/scope`. Raises ScopeError."""
        place = "/scope" if self._through_gateway else API
        place += f"/{path}" if path else ""
        answer = self._send(method, place, params=query, json=body)
        if answer.is_success:
            return answer
        problem = _problem_of(answer)
        raise ScopeError(
            problem.get("message") or f"the hub answered with {answer.status_code}",
            code=problem.get("code") or "refused",
            hint=problem.get("hint") or "",
            status=answer.status_code,
        )

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - options of httpx
        try:
            return self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            message = f"{self._client.base_url} does not answer: {type(error).__name__}"
            raise ScopeError(message, code="unreachable", hint="Check the address.") from error


def _problem_of(answer: httpx.Response) -> dict[str, str]:
    try:
        problem = answer.json()
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
