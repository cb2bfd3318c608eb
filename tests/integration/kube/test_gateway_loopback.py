"""Port under a separate name in a real Chromium: a login stays with it, next to all other servers of this machine."""

import pathlib
import re
from collections.abc import Iterator

import gateway
import kube
import playwright.sync_api as pw
import pytest
import recording_server

from megatronapp_common.web.origin import loopback_alias

DIST = pathlib.Path(__file__).parents[3] / "frontend" / "dist"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
NAMED = re.compile(r"http://gateway-[0-9a-f]{16}\.localhost:\d+/")
STATUS = "async () => (await fetch('api/v1/jobs')).status"
LIVE = """(path) => new Promise((done) => {
  const socket = new WebSocket(new URL(path, document.baseURI).href.replace("http", "ws"));
  socket.onopen = () => done("open"); socket.onerror = () => done("refused");
})"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.full(
        "starts a gateway and a browser; test_ui_states has a named port in Chromium, test_gateway cookies"
    ),
]


@pytest.fixture
def page() -> Iterator[pw.Page]:
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser.new_page()
        finally:
            browser.close()


@pytest.fixture
def paged(plane: kube.ControlPlane, tmp_path: pathlib.Path) -> Iterator[gateway.Gateway]:
    """Start a gateway with the page that users get."""
    assert (DIST / "index.html").exists(), "the page is not built; run `make setup`"
    with gateway.gateway(plane, tmp_path, built=DIST) as running:
        yield running


@pytest.fixture
def neighbour() -> Iterator[recording_server.RecordingServer]:
    with recording_server.running_server() as running:
        yield running


@pytest.fixture
def job(plane: kube.ControlPlane, namespace: str) -> gateway.GatewayJob:
    return gateway.make_job(plane, namespace, "demo", hub=False)


@pytest.fixture
def token(plane: kube.ControlPlane, namespace: str) -> str:
    return gateway.account(plane, namespace, "alice", grants=[gateway.on_jobs("get", "list")])


def named(paged: gateway.Gateway) -> str:
    """Return the address as `megatronapp ui` names a port that it forwards."""
    return f"http://{loopback_alias(paged.url.partition('//')[2], 'gateway')}"


def test_the_login_of_a_forwarded_port_stays_there(
    paged: gateway.Gateway,
    job: gateway.GatewayJob,
    token: str,
    page: pw.Page,
    neighbour: recording_server.RecordingServer,
) -> None:
    with paged.client(token) as program:
        ticket = program.post("/api/v1/tickets").json()["ticket"]
    page.goto(f"{named(paged)}/?job={job.namespace}/demo#code={ticket}")
    pw.expect(page.get_by_role("navigation")).to_contain_text(f"{job.namespace}/demo")
    assert NAMED.match(page.url)
    assert ticket not in page.url
    assert "demo" in page.url
    mine = page.url
    assert page.evaluate(STATUS) == 200
    assert page.evaluate(LIVE, f"{job.path}/live") == "open"
    (cookie,) = page.context.cookies()
    assert (cookie["domain"], cookie["httpOnly"]) == (re.sub(r"^http://|:\d+/.*$", "", mine), True)
    for host in ("127.0.0.1", "localhost", "gateway-0123456789abcdef.localhost"):
        page.goto(f"http://{host}:{neighbour.port}/")
    assert neighbour.cookies
    assert set(neighbour.cookies) == {None}
    page.goto(f"{paged.url}/")
    assert page.url == f"{paged.url}/"
    assert page.evaluate(STATUS) == 401
    page.goto(f"{named(paged)}/")  # another forward, as far as a browser can tell
    assert page.evaluate(STATUS) == 401
    page.get_by_label("Token").fill(token)
    with page.expect_navigation():
        page.get_by_role("button", name="Log in").click()
    assert page.evaluate(STATUS) == 200
    assert len({cookie["domain"] for cookie in page.context.cookies()}) == 2
    page.goto(mine)
    assert page.evaluate(STATUS) == 200
