"""A forwarded port in a real Chromium: the login of one door stays with it, whatever else this machine serves."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import door
import kube
import playwright.sync_api as pw
import pytest

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
NAMED = re.compile(r"http://door-[0-9a-f]{16}\.localhost:\d+/")
STATUS = "async () => (await fetch('api/v1/jobs')).status"
LIVE = """(path) => new Promise((done) => {
  const socket = new WebSocket(new URL(path, document.baseURI).href.replace("http", "ws"));
  socket.onopen = () => done("open"); socket.onerror = () => done("refused");
})"""
FORM = """(token) => {
  const form = document.createElement("form"), field = document.createElement("input");
  Object.assign(form, { method: "post", action: "login" });
  Object.assign(field, { name: "token", value: token });
  form.append(field); document.body.append(form); form.submit();
}"""

pytestmark = pytest.mark.browser


@pytest.fixture
def page() -> Iterator[pw.Page]:
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser.new_page()
        finally:
            browser.close()


class Spy:
    """Another server of this machine, which keeps what browsers send to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: list[str | None] = []


@pytest.fixture
def spy() -> Iterator[Spy]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kept.cookies.append(self.headers.get("Cookie"))
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(b"<!doctype html>")

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept = Spy(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kept
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def job(plane: kube.ControlPlane, namespace: str) -> door.Job:
    return door.make_job(plane, namespace, "demo", hub=False)


@pytest.fixture
def token(plane: kube.ControlPlane, namespace: str) -> str:
    return door.account(plane, namespace, "alice", grants=[door.on_jobs("get", "list")])


def test_the_login_of_a_forwarded_port_stays_there(
    reviewing: door.Door, job: door.Job, token: str, page: pw.Page, spy: Spy
) -> None:
    with reviewing.client(token) as program:
        ticket = program.post("/api/v1/tickets").json()["ticket"]
    page.goto(f"{reviewing.url}/?job={job.namespace}/demo#code={ticket}")
    assert NAMED.match(page.url)
    assert "token" not in page.url
    assert "demo" in page.url
    mine = page.url
    assert page.evaluate(STATUS) == 200
    assert page.evaluate(LIVE, f"{job.path}/live") == "open"
    (cookie,) = page.context.cookies()
    assert (cookie["domain"], cookie["httpOnly"]) == (re.sub(r"^http://|:\d+/.*$", "", mine), True)
    for host in ("127.0.0.1", "localhost", "door-0123456789abcdef.localhost"):
        page.goto(f"http://{host}:{spy.port}/")
    assert spy.cookies
    assert set(spy.cookies) == {None}
    page.goto(f"{reviewing.url}/")  # another forward, as far as a browser can tell
    assert NAMED.match(page.url)
    assert page.url.split(":")[1] not in mine
    assert page.evaluate(STATUS) == 401
    with page.expect_navigation():
        page.evaluate(FORM, token)
    assert page.evaluate(STATUS) == 200
    assert len({cookie["domain"] for cookie in page.context.cookies()}) == 2
    page.goto(mine)
    assert page.evaluate(STATUS) == 200
