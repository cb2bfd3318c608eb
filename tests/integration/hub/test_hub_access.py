"""Tokens, cookie, origin and the served page."""

import asyncio
import contextlib
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websocket_clients
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from shared_tls import SHARED_TLS
from websockets.exceptions import InvalidStatus

from megatronapp_analyzer.hub.http.agent_socket import LOG_S, AgentRefusals
from megatronapp_analyzer.hub.http.login import cookie_name
from megatronapp_analyzer.hub.state.agent_link import RIVAL_S
from megatronapp_analyzer.hub.state.totals import HubTotals
from megatronapp_common.frames import FrameType
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.static_pages import ELSEWHERE_MARK
from megatronapp_common.web.tokens import TokenRole, derive_token

pytestmark = pytest.mark.asyncio
DEADLINE_S = 120.0
PROTECTED = [
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
    "/api/v1/trace/windows",
    "/api/v1/openapi.json",
]


def plain(hub: Any, **settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=hub.url, verify=SHARED_TLS, timeout=DEADLINE_S, **settings)


@pytest.mark.parametrize("path", PROTECTED)
async def test_nothing_is_shown_without_a_token(hub: Any, path: str) -> None:
    async with plain(hub) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "megatronapp=wrong"}):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 401
            assert "demo" not in answer.text
        agent_token = derive_token(hub.secret, TokenRole.AGENT)
        assert (await client.get(path, headers={"Authorization": f"Bearer {agent_token}"})).status_code == 401


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_and_metrics_are_open(hub: Any, path: str) -> None:
    async with plain(hub) as client:
        assert (await client.get(path)).status_code == 200


async def test_posting_needs_the_token(hub: Any) -> None:
    async with plain(hub) as client:
        assert (await client.post("/api/v1/faults", json={})).status_code == 401
        assert (await client.post("/api/v1/trace/windows", json={"steps": 1})).status_code == 401
        assert (await client.delete("/api/v1/faults/x")).status_code == 401
        assert (await client.delete("/api/v1/trace/windows/x")).status_code == 401


async def new_code(hub: Any, role: TokenRole = TokenRole.VIEWER) -> str:
    async with hub.client(role) as program:
        answer = await program.post("/api/v1/codes")
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    return str(answer.json()["code"])


async def test_a_code_or_the_token_becomes_a_cookie_and_a_code_does_so_once(hub: Any) -> None:
    code, token = await new_code(hub), derive_token(hub.secret, TokenRole.VIEWER)
    for shown, again in ((code, 401), (token, 303)):
        async with plain(hub) as client, plain(hub) as other:
            answer = await client.post("/login", data={"token": shown}, headers={"Origin": hub.url})
            assert (answer.status_code, answer.headers["location"]) == (303, "./")
            cookie = answer.headers["set-cookie"].lower()
            assert cookie.startswith(f"{cookie_name('uid-1')}=")
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert token not in cookie
            assert answer.headers["cache-control"] == "no-store"
            assert (await client.get("/api/v1/jobs")).json()[0]["name"] == "demo"
            assert (await other.post("/login", data={"token": shown})).status_code == again


async def test_what_is_no_code_and_no_token_sets_nothing(hub: Any) -> None:
    agent = derive_token(hub.secret, TokenRole.AGENT)
    async with plain(hub) as client:
        for shown in ("", "wrong", agent, "\u00e4\ud800".encode("utf-8", "replace").decode(), "%00"):
            answer = await client.post("/login", data={"token": shown})
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
            assert "megatronapp ui" in answer.text
        assert (await client.post("/login", content=b"\xff\x00=")).status_code == 401
        assert (await client.post("/login", content=b"token=" + b"a" * 5000)).status_code == 413


async def test_no_token_or_code_in_a_query_opens_anything(hub: Any) -> None:
    code, token = await new_code(hub), derive_token(hub.secret, TokenRole.VIEWER)
    async with plain(hub) as client:
        for query in ({"token": token}, {"code": code}):
            for path in ("/", "/api/v1/jobs"):
                answer = await client.get(path, params=query)
                assert answer.status_code in {401, 404}
                assert "set-cookie" not in answer.headers


async def test_only_who_shows_the_token_gets_codes(hub: Any) -> None:
    async with plain(hub) as client:
        assert (await client.post("/api/v1/codes")).status_code == 401
        await client.post("/login", data={"token": await new_code(hub)})
        refused = await client.post("/api/v1/codes")
        assert (refused.status_code, refused.json()["code"]) == (403, "token-needed")
        agent = {"Authorization": f"Bearer {derive_token(hub.secret, TokenRole.AGENT)}"}
        assert (await client.post("/api/v1/codes", headers=agent)).status_code == 401


async def test_a_page_of_another_origin_does_nothing_with_the_cookie(hub: Any) -> None:
    elsewhere = {"Origin": f"http://127.0.0.1:{hub.port + 1}"}
    async with plain(hub) as client:
        assert (await client.post("/login", data={"token": await new_code(hub)}, headers=elsewhere)).status_code == 403
        await client.post("/login", data={"token": await new_code(hub, TokenRole.CONTROLLER)})
        for site, status in (("same-site", 403), ("cross-site", 403), ("same-origin", 200), ("none", 200)):
            assert (await client.get("/api/v1/jobs", headers={"Sec-Fetch-Site": site})).status_code == status
        refused = await client.delete("/api/v1/faults/x", headers=elsewhere)
        assert (refused.status_code, refused.json()["code"]) == (403, "other-origin")
        assert (await client.delete("/api/v1/faults/x", headers={"Origin": hub.url})).status_code == 404
    async with hub.client() as program:
        assert (await program.get("/api/v1/jobs", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 200


async def test_browsers_of_two_jobs_on_two_ports_stay_logged_in(tmp_path: Path, serve: Any) -> None:
    """One browser sends all its cookies to both, as it would at 127.0.0.1."""
    with contextlib.ExitStack() as stack:
        hubs = [stack.enter_context(serve(tmp_path / uid, uid=uid)) for uid in ("uid-one", "uid-two")]
        async with httpx.AsyncClient(timeout=DEADLINE_S, verify=SHARED_TLS) as browser:
            for hub in hubs:
                await browser.post(f"{hub.url}/login", data={"token": await new_code(hub)})
            for hub in hubs:
                assert (await browser.get(f"{hub.url}/api/v1/jobs")).status_code == 200
            assert len(browser.cookies) == 2


async def connect(url: str, headers: dict[str, str]) -> None:
    async with websocket_clients.connect(url, additional_headers=headers):
        pass


@pytest.mark.parametrize("role", [None, TokenRole.VIEWER, TokenRole.GATHER])
async def test_agent_socket_needs_the_agent_token(hub: Any, role: TokenRole | None) -> None:
    headers = {"Authorization": f"Bearer {derive_token(hub.secret, role)}"} if role else {}
    with pytest.raises(InvalidStatus):
        await connect(f"ws://127.0.0.1:{hub.port}/api/v1/agent", headers)
    assert 'megascan_protocol_errors_total{job_id="demo"} 1.0' in await metrics(hub)


async def metrics(hub: Any) -> str:
    async with plain(hub) as client:
        return (await client.get("/metrics")).text


async def test_refused_agents_are_counted_and_logged_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    """Agents with a wrong token try every few seconds, of a large gang all."""
    totals, now_s = HubTotals(), [100.0]
    refusals = AgentRefusals(totals, now_s=lambda: now_s[0])
    error = HttpError(401, "unauthorised", "missing or wrong token")
    scope = {"type": "websocket", "path": "/api/v1/agent", "client": ("10.1.2.3", 40000)}
    for elapsed_s in (0.0, 1.0, LOG_S - 1.5, 1.0):
        now_s[0] += elapsed_s
        refusals.note(scope, error)
    lines = [record.message for record in caplog.records]
    assert lines == [
        f"agent refused: missing or wrong token, from 10.1.2.3; {count} since the last such line" for count in (1, 3)
    ]
    refusals.note(scope | {"path": "/api/v1/live"}, error)
    refusals.note(scope | {"type": "http"}, error)
    assert totals.protocol_errors == 4


async def test_agents_that_replace_each_other_are_counted(hub: Any, fake_job: Any) -> None:
    """A connection that is replaced late was lost, and its agent has connected again."""
    async with hub.agent(fake_job(), 0) as first, hub.agent(fake_job(), 0) as second, hub.agent(fake_job(), 0) as third:
        assert (await first.hello()).type == FrameType.WELCOME
        hub.hub.links[0, 0].since_s -= RIVAL_S
        assert (await second.hello()).type == FrameType.WELCOME
        assert hub.hub.totals.protocol_errors == 0
        assert (await third.hello()).type == FrameType.WELCOME
        assert 'megascan_protocol_errors_total{job_id="demo"} 1.0' in await metrics(hub)


async def test_live_socket_refuses_other_origins(hub: Any) -> None:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/live"
    for origin in ("http://evil.example", f"http://127.0.0.1:{hub.port + 1}", "null"):
        with pytest.raises(InvalidStatus):
            await connect(url, hub.bearer | {"Origin": origin})
    await connect(url, hub.bearer | {"Origin": hub.url})
    async with plain(hub) as browser:
        await browser.post("/login", data={"token": await new_code(hub)})
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    await connect(url, {"Origin": hub.url, "Cookie": cookie})
    with pytest.raises(InvalidStatus):
        await connect(url, {"Origin": f"http://127.0.0.1:{hub.port + 1}", "Cookie": cookie})
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
async def test_a_wrong_hello_is_refused_with_its_code(
    hub: Any, fake_job: Any, changes: dict[str, object], code: str
) -> None:
    async with hub.agent(fake_job(), 0) as agent:
        answer = await agent.hello(**changes)
        assert answer.type == FrameType.ERROR
        assert answer.header["code"] == code
        assert set(answer.header) == {"code", "message", "hint"}


async def test_garbage_is_refused_and_breaks_no_other_connection(hub: Any, fake_job: Any) -> None:
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


PAGE = "<html><head><title>page</title></head></html>"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """Folder of a built page."""
    dist = tmp_path / "dist"
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text(PAGE)
    (dist / "assets" / "app-1a2b.js").write_text("1")
    (tmp_path / "outside.txt").write_text("secret")
    (dist / "link.txt").symlink_to(tmp_path / "outside.txt")
    return dist


@pytest.fixture
def paged(tmp_path: Path, dist: Path, serve: Any) -> Iterator[Any]:
    """A hub with a page."""
    with serve(tmp_path / "state", frontend=dist) as hub:
        yield hub


async def test_page_is_open_and_served_with_cache_and_security_headers(paged: Any) -> None:
    async with plain(paged) as client:
        for path in ("/", "/jobs/demo", "/index.html"):
            page = await client.get(path)
            assert page.text == PAGE
            assert page.headers["cache-control"] == "no-cache"
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert page.headers["x-content-type-options"] == "nosniff"
        asset = await client.get("/assets/app-1a2b.js")
        assert "immutable" in asset.headers["cache-control"]
        for path in ("/assets/none.js", "/../outside.txt", "/%2e%2e/outside.txt", "/link.txt", "/api/v1/none"):
            answer = await client.get(path, headers=paged.bearer)
            assert answer.status_code == 404
            assert set(answer.json()) == {"code", "message", "hint"}


async def request_raw(hub: Any, target: bytes) -> int:
    """Status of a request whose target no client library would write."""
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.port)
    writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    with contextlib.suppress(ConnectionError):  # the hub closes it, too
        await writer.wait_closed()
    return int(line.split()[1])


@pytest.mark.parametrize(
    "target",
    [
        "/%00",
        "/a%00b",
        "/" + "a" * 300,
        "/" + "a/" * 3000,
        "/%ff",
        "/..",
        "/a/../..",
        "/..%2f..%2fetc%2fpasswd",
        "/a%5c..%5cb",
        "//etc/passwd",
        "/assets/%00.js",
        "/assets/" + "a" * 5000 + ".js",
        "/%ed%a0%80",
        "/%2e%2e/%2e%2e",
        "/a%0d%0aX-Evil:%201",
    ],
)
async def test_no_path_is_too_odd(paged: Any, target: str) -> None:
    assert await request_raw(paged, target.encode()) == 404


async def test_no_bytes_of_a_path_are_too_odd(paged: Any) -> None:
    def request_all() -> None:
        with httpx.Client(base_url=paged.url, verify=SHARED_TLS, timeout=DEADLINE_S) as client:

            @settings(max_examples=examples(60), deadline=None, database=None)
            @given(st.binary(max_size=60))
            def request_with_host(name: bytes) -> None:
                answer = client.get("/" + urllib.parse.quote_from_bytes(name, safe="/.%"))
                assert answer.status_code in {200, 401, 404}
                assert "secret" not in answer.text

            request_with_host()

    await asyncio.to_thread(request_all)


async def test_a_page_knows_that_another_site_led_to_it(paged: Any) -> None:
    async with plain(paged) as client:
        for site, elsewhere in (("cross-site", 1), ("same-site", 1), ("odd", 1), ("none", 0), ("same-origin", 0)):
            answer = await client.get("/", headers={"Sec-Fetch-Site": site})
            assert (answer.status_code, answer.text.count(ELSEWHERE_MARK)) == (200, elsewhere)


async def test_a_browser_at_a_common_name_is_redirected_to_an_alias(tmp_path: Path, dist: Path, serve: Any) -> None:
    """Check that this happens only where the hub knows that such a name leads to it alone."""
    opens = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for named in (True, False):
        with serve(tmp_path / str(named), frontend=dist, named=named) as hub:
            async with plain(hub) as client:
                led = await client.get("/?step=3", headers=opens)
                there = await client.get("/", headers=opens | {"Host": f"hub-1.localhost:{hub.port}"})
                unreachable = await client.get("/", headers=opens | {"Host": f"127.0.0.5:{hub.port}"})
                quiet = await client.get("/")
        assert (there.status_code, unreachable.status_code, quiet.status_code) == (200, 200, 200)
        assert led.status_code == (307 if named else 200)
        if named:
            expected = rf"http://hub-[0-9a-f]{{16}}\.localhost:{hub.port}/\?step=3"
            assert re.fullmatch(expected, led.headers["location"])
