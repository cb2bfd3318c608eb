"""The gateway's page in a real Chromium: MegaScope, and a login that stays with a port under a separate name."""

import dataclasses
import io
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import gateway
import kube
import numpy as np
import playwright.sync_api as pw
import pytest
import recording_server
import scope_hub
import scope_session
from canvases import PATIENCE_S

from megatronapp_common import frames
from megatronapp_common.scope.protocol import unpack
from megatronapp_common.web.origin import loopback_alias

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
DIST = kube.ROOT / "frontend" / "dist"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
WINDOW: pw.ViewportSize = {"width": 1440, "height": 900}
LAYER, HEAD = 1, 2
NAMED = re.compile(r"http://gateway-[0-9a-f]{16}\.localhost:\d+/")
STATUS = "async () => (await fetch('api/v1/jobs')).status"
LIVE = """(path) => new Promise((done) => {
  const socket = new WebSocket(new URL(path, document.baseURI).href.replace("http", "ws"));
  socket.onopen = () => done("open"); socket.onerror = () => done("refused");
})"""

PATIENCE_MS = int(PATIENCE_S * 1000)
pw.expect.set_options(timeout=PATIENCE_MS)  # as in tests/browser: it holds for all tests of a process


@dataclasses.dataclass(frozen=True)
class ScopeCluster:
    """A gateway with the built page, a job whose hub plays a session, and one whose model generates."""

    entrance: gateway.Gateway
    recorded: gateway.GatewayJob
    serving: gateway.GatewayJob
    hub: scope_hub.ScopeHub
    """Hub of the job that serves."""
    viewer: str
    controller: str
    recording: scope_session.Recording

    def entry(self, token: str, job: gateway.GatewayJob, **selection: Any) -> str:
        """Address that logs a browser in once, as `megatronapp ui` makes it, at a panel of MegaScope."""
        with self.entrance.client(token) as client:
            ticket = client.post("/api/v1/tickets").raise_for_status().json()["ticket"]
        return f"{self.view(job, **selection)}#code={ticket}"

    def view(self, job: gateway.GatewayJob, **selection: Any) -> str:
        """Address of a panel."""
        query = {"job": f"{job.namespace}/{job.name}", "page": "scope", **selection}
        return f"{self.entrance.url}/?{urllib.parse.urlencode(query)}"


@pytest.fixture(scope="module")
def chromium() -> Iterator[pw.Browser]:
    """One browser for a module, closed before tests of other modules start event loops of their own."""
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: pw.Browser) -> Iterator[pw.Page]:
    """Show an empty page, and fail for errors that it reports."""
    problems: list[str] = []

    def keep(error: pw.Error) -> None:
        problems.append(str(error))

    with chromium.new_context(viewport=WINDOW, color_scheme="dark", reduced_motion="reduce") as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", keep)
        yield page
        page.goto("about:blank")  # receives the errors since the last call
    assert problems == []


@pytest.fixture(scope="module")
def paged(plane: kube.ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.Gateway]:
    """Start a gateway with the page that users get."""
    assert (DIST / "index.html").exists(), "the page is not built; run `make setup`"
    with gateway.gateway(plane, tmp_path_factory.mktemp("page"), built=DIST) as running:
        yield running


@pytest.fixture
def neighbour() -> Iterator[recording_server.RecordingServer]:
    with recording_server.running_server() as running:
        yield running


@pytest.fixture
def cluster(
    plane: kube.ControlPlane, paged: gateway.Gateway, namespace: str, tmp_path: pathlib.Path
) -> Iterator[ScopeCluster]:
    recording = scope_session.record()
    session = tmp_path / "tiny.scope"
    session.write_bytes(scope_session.session(recording))
    recorded, serving = (gateway.make_job(plane, namespace, name) for name in ("recorded", "serving"))
    tokens = {
        "viewer": gateway.account(plane, namespace, "viewer", grants=[gateway.on_jobs("get", "list")]),
        "controller": gateway.account(plane, namespace, "jane", grants=[gateway.on_jobs("get", "list", "update")]),
    }
    with (
        scope_hub.replaying(recorded, session, port=paged.hub_port, key=paged.key),
        scope_hub.generating(serving, recording, port=paged.hub_port, key=paged.key) as hub,
    ):
        yield ScopeCluster(paged, recorded, serving, hub, recording=recording, **tokens)


def keep(answers: list[pw.Response]) -> Callable[[pw.Response], None]:
    """Record answers; Playwright asks for a function that was written."""

    def take(answer: pw.Response) -> None:
        answers.append(answer)

    return take


def saved(page: pw.Page, card: str, name: str) -> bytes:
    """The file that a button of a panel saves."""
    with page.expect_download() as download:
        page.get_by_role("region", name=card).get_by_role("button", name=name, exact=True).click()
    return pathlib.Path(download.value.path()).read_bytes()


def test_a_viewer_sees_attention_and_probabilities_and_takes_the_numbers_home(
    page: pw.Page, cluster: ScopeCluster
) -> None:
    answers: list[pw.Response] = []
    page.on("response", keep(answers))
    recording = cluster.recording
    page.goto(cluster.entry(cluster.viewer, cluster.recorded, view="attention", layer=LAYER, head=HEAD))
    pw.expect(page.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
    pw.expect(page.get_by_test_id("attention-map")).to_be_visible()
    assert "code=" not in page.url
    exact = recording.sites[0]["attention"][LAYER, HEAD]
    npy = np.load(io.BytesIO(saved(page, f"Layer {LAYER}, head {HEAD}", "NPY")))
    np.testing.assert_array_equal(npy[: len(exact), : exact.shape[1]], exact)
    lines = saved(page, f"Layer {LAYER}, head {HEAD}", "CSV").decode().splitlines()
    assert len(lines) > len(exact)
    (answer, *_) = (answer for answer in answers if "/attention/" in answer.url)
    (tile,) = unpack(frames.decode(answer.body()))
    assert (answer.status, tile.name, tile.data.shape) == (200, "0,0", (len(exact), len(exact)))
    (table, *_) = (answer for answer in answers if "format=csv" in answer.url)
    assert table.headers["content-disposition"].startswith("attachment;")
    page.keyboard.press("3")
    pw.expect(page.get_by_test_id("candidates")).to_be_visible()
    assert {answer.url.split("/api/")[0] for answer in answers if "/api/" in answer.url} == {cluster.entrance.url}


@pytest.mark.full("test_scope_live has the viewer, and test_gateway_scope the rights")
def test_a_viewer_sees_why_generating_is_disabled_and_an_editor_generates(
    page: pw.Page, chromium: pw.Browser, cluster: ScopeCluster
) -> None:
    page.goto(cluster.entry(cluster.viewer, cluster.serving))
    generate = page.get_by_role("button", name="Generate")
    pw.expect(page.get_by_test_id("why-not")).to_contain_text("You may view, but not generate")
    pw.expect(generate).to_be_disabled()
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    jane = context.new_page()
    jane.goto(cluster.entry(cluster.controller, cluster.serving))
    pw.expect(jane.get_by_test_id("why-not")).to_have_count(0)
    jane.get_by_label("Prompt").first.fill("The sea ")
    jane.get_by_role("button", name="Generate").click()
    rank_zero = cluster.hub.rank_zero
    assert rank_zero is not None
    gateway.wait_for(lambda: any(path == "runs" for _, path, _ in rank_zero.requests))
    scope_hub.generate(cluster.hub, cluster.recording)
    for shown in (jane, page):
        pw.expect(shown.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
    with cluster.entrance.client(cluster.viewer) as client:
        actions = client.get(f"{cluster.serving.path}/summary").json()["actions"]
    assert [action["who"] for action in actions] == [f"system:serviceaccount:{cluster.serving.namespace}:jane"]
    context.close()


def named(paged: gateway.Gateway) -> str:
    """Return the address as `megatronapp ui` names a port that it forwards."""
    return f"http://{loopback_alias(paged.url.partition('//')[2], 'gateway')}"


@pytest.mark.full("test_ui_states has a named port in Chromium, and test_gateway the cookies")
def test_the_login_of_a_forwarded_port_stays_there(
    paged: gateway.Gateway,
    plane: kube.ControlPlane,
    namespace: str,
    page: pw.Page,
    neighbour: recording_server.RecordingServer,
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    token = gateway.account(plane, namespace, "alice", grants=[gateway.on_jobs("get", "list")])
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
