"""HTTP client of rank 0, which generates: runs and probes are sent to it (docs/scope-protocol.md, 6)."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol_requests import CaptureChange, ProbeRequest, RunRequest, ScoreRequest
from megatronapp_common.web.problems import HttpError

TIMEOUT_S = 10.0
START_TIMEOUT_S = 25.0
"""Limit of the start of a comparison or a sweep, whose recipes are tokenized and checked before the answer; below the
30 s after which a gateway gives up."""
SCORES_TIMEOUT_S = 300.0
"""Scores wait for all prompts in the queue, and reading a long text takes a while."""
PASSED_ON = frozenset({404, 409, 413, 422, 429, 503})
"""Statuses of answers that the caller gets unchanged."""


class Rank0Client:
    """Sends requests to rank 0. Every method raises HttpError: with rank 0's own message if it answered, and 503
    otherwise."""

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            transport=transport,
            trust_env=False,  # a proxy of the environment would get our token
        )

    async def close(self) -> None:
        """Close all connections to rank 0."""
        await self._client.aclose()

    @property
    def url(self) -> str:
        """Return the address of rank 0, without a slash at its end."""
        return str(self._client.base_url).rstrip("/")

    async def metrics(self) -> str:
        """Return the metrics of rank 0 in the text format of Prometheus."""
        return (await self._send("GET", "/metrics")).text

    async def start(self, request: RunRequest) -> dict[str, Any]:
        """Queue a run: `{"run", "position"}`."""
        return await self._request("POST", "/scope/v1/runs", request.model_dump_json(by_alias=True).encode())

    async def cancel(self, run: str) -> None:
        """Cancel a run that waits or generates."""
        await self._request("DELETE", f"/scope/v1/runs/{run}")

    async def change(self, run: str, change: CaptureChange) -> None:
        """Change the capture from the next step on."""
        await self._request("PATCH", f"/scope/v1/runs/{run}", change.model_dump_json(by_alias=True).encode())

    async def run(self, run: str) -> dict[str, Any]:
        """Return a run with all tokens so far."""
        return await self._request("GET", f"/scope/v1/runs/{run}")

    async def probe(self, probe: ProbeRequest) -> str:
        """Request exact numbers; they arrive as PART frames with the id that is returned."""
        answer = await self._request("POST", "/scope/v1/probes", probe.model_dump_json(by_alias=True).encode())
        return str(answer.get("probe"))

    async def scores(self, asked: ScoreRequest) -> Frame:
        """Return a frame SCOPE_TOKENS with the surprise, entropy and candidates at each token of a text."""
        body = asked.model_dump_json(by_alias=True).encode()
        answer = await self._send("POST", "/scope/v1/scores", body, timeout_s=SCORES_TIMEOUT_S)
        try:
            return frames.decode(answer.content)
        except FrameError as error:
            raise _failed(f"the model sent no scores: {error}") from error

    async def analyze(self, request: Mapping[str, Any]) -> Frame:
        """Return a frame SCOPE_ANALYSIS with the result of an analysis request."""
        body = json.dumps(request).encode()
        answer = await self._send("POST", "/scope/v1/analyses", body, timeout_s=SCORES_TIMEOUT_S)
        try:
            return frames.decode(answer.content)
        except FrameError as error:
            raise _failed(f"the model sent no analysis: {error}") from error

    async def start_branches(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a comparison or a sweep (`kind`: the last part of the path); the answer has its name."""
        data = json.dumps(body).encode()
        return await self._request("POST", f"/scope/v1/{kind}", data, timeout_s=START_TIMEOUT_S)

    async def list_branches(self, kind: str) -> list[str]:
        """Return the names of the comparisons or sweeps that rank 0 stores, newest first."""
        found = _json(await self._send("GET", f"/scope/v1/{kind}"))
        if not isinstance(found, list) or not all(isinstance(listed, dict) for listed in found):
            raise _failed(f"the model sent no list of {kind}")
        return [str(listed.get(kind.removesuffix("s"))) for listed in found]

    async def branches(self, kind: str, name: str) -> Frame:
        """Return a comparison or a sweep so far, as a frame SCOPE_ANALYSIS."""
        answer = await self._send("GET", f"/scope/v1/{kind}/{name}")
        try:
            frame = frames.decode(answer.content)
        except FrameError as error:
            raise _failed(f"the model sent no frame: {error}") from error
        if not isinstance(frame.header.get("state"), str):
            raise _failed("the model sent a frame without a state")
        return frame

    async def cancel_branches(self, kind: str, name: str) -> None:
        """Cancel a comparison or a sweep."""
        await self._request("DELETE", f"/scope/v1/{kind}/{name}")

    async def basis(self, frame: Frame) -> None:
        """Send the ranks a basis to project on."""
        await self._request("PUT", "/scope/v1/basis", frames.encode(frame), kind="application/octet-stream")

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        answer = await self._send(method, path, body, kind=kind, timeout_s=timeout_s)
        found = _json(answer) if answer.content else {}
        if not isinstance(found, dict):
            raise _failed(f"the model answered with {answer.status_code} and no JSON object")
        return found

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        """Return a successful answer."""
        headers = {"Content-Type": kind} if body is not None else {}
        try:
            answer = await self._client.request(method, path, content=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            what = f"the model does not answer: {type(error).__name__}"
            raise HttpError(503, "restarting", what, "Try again in a moment.") from error
        if not answer.is_success:
            raise _refusal(answer)
        return answer


def _refusal(answer: httpx.Response) -> HttpError:
    said = _json(answer)
    if answer.status_code in PASSED_ON and isinstance(said, dict) and isinstance(said.get("code"), str):
        words = str(said.get("message")), str(said.get("hint"))
        return HttpError(answer.status_code, said["code"], *words, retry_s=_retry_s(answer))
    return _failed(f"the model answered with {answer.status_code}")


def _failed(what: str) -> HttpError:
    return HttpError(503, "model-failed", what, "See the log of rank 0.")


def _json(answer: httpx.Response) -> Any:  # noqa: ANN401 - whatever JSON holds
    try:
        return answer.json()
    except ValueError:
        return None


def _retry_s(answer: httpx.Response) -> int | None:
    said = answer.headers.get("Retry-After", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 6 else None
