"""Tokens, cookie, origin and the served page."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.asyncio.client
from websockets.exceptions import InvalidStatus

from megatronapp_common.frames import FrameType
from megatronapp_common.tokens import Role, derive

pytestmark = pytest.mark.asyncio
PROTECTED = [
    "/",
    "/index.html",
    "/assets/app.js",
    "/api/v1/jobs",
    "/api/v1/job",
    "/api/v1/summary",
    "/api/v1/metrics/series?name=loss",
    "/api/v1/steps",
    "/api/v1/heatmap",
    "/api/v1/timeline",
    "/api/v1/verdicts",
    "/api/v1/faults",
    "/api/v1/trace",
    "/api/v1/openapi.json",
]


def plain(hub: Any, **settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=hub.url, **settings)


@pytest.mark.parametrize("path", PROTECTED)
async def test_nothing_is_shown_without_a_token(hub: Any, path: str) -> None:
    async with plain(hub) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "megatronapp=wrong"}):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 401
            assert "demo" not in answer.text
        agent_token = derive(hub.secret, Role.AGENT)
        assert (await client.get(path, headers={"Authorization": f"Bearer {agent_token}"})).status_code == 401


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_and_metrics_are_open(hub: Any, path: str) -> None:
    async with plain(hub) as client:
        assert (await client.get(path)).status_code == 200


async def test_posting_needs_the_token(hub: Any) -> None:
    async with plain(hub) as client:
        assert (await client.post("/api/v1/faults", json={})).status_code == 401
        assert (await client.delete("/api/v1/faults/x")).status_code == 401


async def test_token_in_the_address_becomes_a_cookie(hub: Any) -> None:
    token = derive(hub.secret, Role.VIEWER)
    async with plain(hub) as client:
        answer = await client.get(f"/?token={token}")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert answer.headers["cache-control"] == "no-store"
        assert (await client.get("/api/v1/jobs")).json()[0]["name"] == "demo"


async def test_wrong_token_in_the_address_sets_nothing(hub: Any) -> None:
    async with plain(hub) as client:
        answer = await client.get("/?token=wrong")
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert "megatronapp ui" in answer.text


async def connect(url: str, headers: dict[str, str]) -> None:
    async with websockets.asyncio.client.connect(url, additional_headers=headers, proxy=None):
        pass


@pytest.mark.parametrize("role", [None, Role.VIEWER, Role.GATHER])
async def test_agent_socket_needs_the_agent_token(hub: Any, role: Role | None) -> None:
    headers = {"Authorization": f"Bearer {derive(hub.secret, role)}"} if role else {}
    with pytest.raises(InvalidStatus):
        await connect(f"ws://127.0.0.1:{hub.port}/api/v1/agent", headers)


async def test_live_socket_refuses_other_origins(hub: Any) -> None:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/live"
    for origin in ("http://evil.example", f"http://127.0.0.1:{hub.port + 1}", "null"):
        with pytest.raises(InvalidStatus):
            await connect(url, hub.bearer | {"Origin": origin})
    await connect(url, hub.bearer | {"Origin": hub.url})
    with pytest.raises(InvalidStatus):
        await connect(url, {"Origin": hub.url})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"uid": "other"}, "other-job"),
        ({"job": "other"}, "other-job"),
        ({"protocol": 2}, "protocol"),
        ({"worker": None}, "bad-hello"),
    ],
)
async def test_wrong_hello_is_told(hub: Any, fake_job: Any, changes: dict[str, object], code: str) -> None:
    async with hub.agent(fake_job(), 0) as agent:
        answer = await agent.hello(**changes)
        assert answer.type == FrameType.ERROR
        assert answer.header["code"] == code
        assert set(answer.header) == {"code", "message", "hint"}


async def test_garbage_is_told_and_harms_nobody(hub: Any, fake_job: Any) -> None:
    job = fake_job()
    garbage = [b"", b"\0" * 16, b"garbage that is no frame", "text"]
    for data in garbage:
        async with hub.agent(job, 0) as agent:
            await agent.connection.send(data)
            assert (await agent.receive()).type == FrameType.ERROR
    async with hub.agent(job, 0) as agent:
        assert (await agent.hello()).type == FrameType.WELCOME
        await agent.records(0, job.records(0, 1))
        refusal = await agent.receive()
        while refusal.type == FrameType.COMMAND:
            refusal = await agent.receive()
        assert refusal.header["code"] == "no-ring"
    assert (await hub.get("/api/v1/steps")) == []


async def test_page_is_served_with_cache_and_security_headers(tmp_path: Path, serve: Any) -> None:
    dist = tmp_path / "dist"
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text("<title>page</title>")
    (dist / "assets" / "app-1a2b.js").write_text("1")
    (tmp_path / "outside.txt").write_text("secret")
    (dist / "link.txt").symlink_to(tmp_path / "outside.txt")
    with serve(tmp_path / "state", frontend=dist) as hub:
        async with hub.client() as client:
            for path in ("/", "/jobs/demo", "/index.html"):
                page = await client.get(path)
                assert page.text == "<title>page</title>"
                assert page.headers["cache-control"] == "no-cache"
                assert "default-src 'self'" in page.headers["content-security-policy"]
                assert page.headers["x-content-type-options"] == "nosniff"
            asset = await client.get("/assets/app-1a2b.js")
            assert "immutable" in asset.headers["cache-control"]
            for path in ("/assets/none.js", "/../outside.txt", "/%2e%2e/outside.txt", "/link.txt", "/api/v1/none"):
                answer = await client.get(path)
                assert answer.status_code == 404
                assert set(answer.json()) == {"code", "message", "hint"}
