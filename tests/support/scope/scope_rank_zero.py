"""Rank 0 as the hub sees it: answers what section 6 of the protocol asks with the true numbers of a recorded run."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scope_analysis
import scope_session
import uvicorn
from fastapi import FastAPI, Request, Response
from prompt_server import PromptServer
from starlette.responses import JSONResponse, PlainTextResponse
from websockets.exceptions import ConnectionClosed

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_common.scope.protocol_requests import ProbeRequest

DEADLINE_S = 120
METRICS = """\
megatronapp_serve_num_requests_waiting 0.0
megatronapp_serve_num_requests_running 0.0
megatronapp_serve_requests_total{finished_reason="stop"} 2.0
megatronapp_serve_request_queue_time_seconds_bucket{le="0.1"} 2.0
megatronapp_serve_request_queue_time_seconds_bucket{le="+Inf"} 2.0
megatronapp_serve_request_queue_time_seconds_sum 0.1
"""
LAYERLESS = {"embedding", "final_norm", "logits"}
BRANCHES = "00c0ffee0000"
"""Name of the only comparison, and of the only sweep."""


def branches_frame(kind: str, state: str) -> Frame:
    """Build the frame of a comparison of one token, or of a sweep of one cell."""
    header: dict[str, Any] = {"kind": kind, kind: BRANCHES, "state": state, "prompt": "a", "error": None, "seed": 0}
    header |= {"startedAt": "2026-11-27T12:00:00.000+00:00"}
    if kind == "sweep":
        matrix = {"layers": [0], "strengths": [0.5], "positions": None, "values": [[0.25]], "digests": [["0" * 12]]}
        header |= matrix | {"metric": "meanKl", "done": 1, "cells": 1, "template": {}, "token": None}
        return build_frame(FrameType.SCOPE_ANALYSIS, header | {"ids": [1], "texts": None})
    choice = {"id": 1, "text": None, "logprob": -1.0, "otherLogprob": -1.5}
    row = {"index": 0, "position": 1, "a": choice, "b": choice, "kl": 0.25, "overlap": 9, "rank": 0}
    header |= {"mode": "free", "tokens": 1, "compared": 1, "baseline": None, "perturbation": None, "top": 10}
    header |= {"firstDivergence": None, "promptTokens": 1, "texts": ["b", "b"], "rows": [row]}
    tensors = [
        Tensor("drift", "f32", np.full((2, 1), 0.5, "<f4")),
        Tensor("heads", "f32", np.full((2, 2, 1), 0.5, "<f4")),
    ]
    return build_frame(FrameType.SCOPE_ANALYSIS, header, tensors)


def branches_answer(path: str, kind: str, state: str) -> Response:
    """List the only comparison or sweep, or return its frame."""
    if path.endswith("s"):
        return JSONResponse([{kind: BRANCHES, "state": state}])
    if not path.endswith(BRANCHES):
        return JSONResponse({"code": f"no-such-{kind}", "message": "", "hint": ""}, 404)
    return Response(frames.encode(branches_frame(kind, state)), media_type="application/octet-stream")


@dataclasses.dataclass
class RankZero:
    """`publish` takes what the ranks send to their agent; `asked` holds every request as (method, path, body)."""

    recording: scope_session.Recording
    token: str
    publish: Callable[[Frame], None] = lambda _: None
    requests: list[tuple[str, str, Any]] = dataclasses.field(default_factory=list)
    refuse: tuple[int, dict[str, str]] | None = None
    branches_state: str = "done"
    """State of the comparison and of the sweep; DELETE of one of them makes it `cancelled`."""
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/scope/v1/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        async def answer(request: Request, path: str) -> Response:
            if request.headers.get("authorization") != f"Bearer {self.token}":
                return JSONResponse({"code": "unauthorised", "message": "", "hint": ""}, 401)
            body = await request.body()
            if self.refuse is not None:
                return JSONResponse(self.refuse[1], self.refuse[0], headers={"Retry-After": "7"})
            return self.answer(request.method, path, body)

        @app.get("/metrics")
        async def metrics() -> PlainTextResponse:
            return PlainTextResponse(METRICS)

        return app

    def answer(self, method: str, path: str, body: bytes) -> Response:
        if path == "basis":
            self.requests.append((method, path, frames.decode(body)))
            return JSONResponse({})
        document: Any = json.loads(body) if body else None
        self.requests.append((method, path, document))
        if path == "probes":
            probe = f"probe-{len(self.requests)}"
            self.publish(self.probe(probe, ProbeRequest.model_validate(document)))
            return JSONResponse({"probe": probe})
        if path in {"scores", "analyses"}:
            return self.read_again(path, document)
        kind = path.partition("/")[0].removesuffix("s")
        if kind in {"comparison", "sweep"} and method == "GET":
            return branches_answer(path, kind, self.branches_state)
        if kind in {"comparison", "sweep"} and method == "DELETE":
            self.branches_state = "cancelled"
        if method == "GET":
            known = self.known_run() if path == f"runs/{scope_session.RUN}" else None
            return JSONResponse(known or {"code": "no-such-run", "message": "", "hint": ""}, 200 if known else 404)
        started = {
            "runs": {"run": scope_session.RUN, "position": 0},
            "comparisons": {"comparison": BRANCHES},
            "sweeps": {"sweep": BRANCHES},
        }
        return JSONResponse(started.get(path, {}) if method == "POST" else {})

    def read_again(self, path: str, document: Any) -> Response:
        """Scores of a text, or another analysis."""
        if path == "scores":
            found = scope_session.scores_frame(self.recording, document["ids"], document["candidates"])
            return Response(frames.encode(found), media_type="application/octet-stream")
        for name in ("token", "against"):
            if (document.get(name) or 0) >= self.recording.shape.vocabulary:
                message = f"{name}: there is no token {document[name]}"
                return JSONResponse({"code": "invalid-request", "message": message, "hint": ""}, 422)
        found = scope_analysis.analysis_frame(self.recording, document)
        return Response(frames.encode(found), media_type="application/octet-stream")

    def probe(self, name: str, request: ProbeRequest) -> Frame:
        """PART with what was asked for."""
        rows: list[tuple[int, int]] = []
        parts: list[list[Tensor]] = []
        for index, ids in enumerate(request.ids):
            first, end = request.queries or (0, len(ids))
            places = list(range(first, end, request.stride))
            rows += [(index, place) for place in places]
            parts.append([self._tensor(site, self._sites_of(list(ids)), places) for site in request.sites])
        tensors = [
            dataclasses.replace(same[0], data=np.concatenate([tensor.data for tensor in same]))
            for same in zip(*parts, strict=True)
        ]
        header = {"rank": 0, "probe": name, "step": 0, "rows": [[index, row, 1] for index, row in rows], "timeUs": 0}
        return build_frame(FrameType.SCOPE_PART, header | {"part": 0}, tensors)

    def _sites_of(self, ids: list[int]) -> dict[str, Any]:
        """Numbers of a text that the recorded run begins with; of no other, such as one with holes."""
        texts = [
            prompt + generated
            for prompt, generated in zip(self.recording.prompts, self.recording.generated, strict=True)
        ]
        return next(sites for sites, text in zip(self.recording.sites, texts, strict=True) if text[: len(ids)] == ids)

    def known_run(self) -> dict[str, Any]:
        """GET of the run: all that was generated."""
        samples = []
        for prompt, generated in zip(self.recording.prompts, self.recording.generated, strict=True):
            offsets = scope_session.offsets_of(prompt + generated)[len(prompt) :]
            texts = list(map(scope_session.text_of, generated))
            ends = [None] * (len(generated) - 1) + ["length"]
            samples.append({"ids": generated, "texts": texts, "offsets": offsets, "finished": ends})
        header = dict(scope_session.run_state(self.recording, "done").header)
        return {"run": scope_session.RUN, "state": "done", "header": header, "samples": samples}

    def _tensor(self, site: Any, sites: dict[str, Any], rows: list[int]) -> Tensor:
        turned = site.rotary == "before" and site.site in {"q", "k"}
        found = -sites[site.site] if turned else sites[site.site]
        header: dict[str, Any] = {"site": site.site, "replicated": False}
        header |= {"rotary": "before"} if turned else {}
        if site.site in LAYERLESS:
            return Tensor(site.site, "f32", found[rows], None, header)
        header["layers"] = list(site.layers)
        whole = found.transpose(2, 0, 1, 3) if site.site == "attention" else found
        data = whole[rows][:, list(site.layers)]
        if site.heads is not None:
            (head,) = site.heads
            header["heads"] = [head, head + 1]
            data = data[:, :, head : head + 1]
        if site.code == "u8s":
            return Tensor(site.site, "u8s", scope_session.codes_of(data), None, header)
        return Tensor(site.site, "f32", np.ascontiguousarray(data, "<f4"), None, header)


def sender(connection: Any) -> Callable[[Frame], None]:
    """Publishes by the connection of an agent, from any thread. What arrives after the end of the test is dropped."""
    loop = asyncio.get_running_loop()
    sending: set[asyncio.Task[None]] = set()

    async def send(data: bytes) -> None:
        with contextlib.suppress(ConnectionClosed):
            await connection.send(data)

    def begin(data: bytes) -> None:
        task = loop.create_task(send(data))
        sending.add(task)
        task.add_done_callback(sending.discard)

    def publish(frame: Frame) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed before the server of rank 0
            loop.call_soon_threadsafe(begin, frames.encode(frame))

    return publish


@contextlib.contextmanager
def serve(rank: RankZero) -> Iterator[RankZero]:
    """Serve `rank` through a real server on loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        rank.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = PromptServer(uvicorn.Config(rank.app(), log_config=None, access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            yield rank
        finally:
            server.end()
            thread.join(DEADLINE_S)
