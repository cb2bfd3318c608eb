"""Page while there is nothing, nothing yet, nothing any more, or no access.

A browser logs in by a code after `#` or by a token, invisible to all others on this machine.
"""

import re
import time
from collections.abc import Iterator
from typing import Any

import playwright.sync_api as pw
import pytest
import recording_server
from canvases import wait_for

from megatronapp_analyzer.hub.http.login import CODE_LIFE_S

pytestmark = pytest.mark.browser
NAMED = re.compile(r"http://hub-[0-9a-f]{16}\.localhost:\d+/$")


def state(page: pw.Page, kind: str) -> pw.Locator:
    return page.locator(f"[data-state={kind}]")


def test_loading_then_empty_then_steps(own_page: pw.Page, shared_stack: Any) -> None:
    assert shared_stack.feed.step == 0, "the first of those that share the job"
    waiting: list[pw.Route] = []
    released: list[bool] = []

    def hold(route: pw.Route) -> None:
        """The page may ask only after it has shown that it does."""
        if released:
            route.continue_()
        else:
            waiting.append(route)

    own_page.route("**/api/v1/job", hold)
    own_page.route_web_socket("**/api/v1/live", lambda socket: socket.connect_to_server() if released else None)
    own_page.goto(shared_stack.entry)
    pw.expect(state(own_page, "loading")).to_contain_text("Loading the job")
    released.append(True)
    for route in waiting:
        route.continue_()
    pw.expect(state(own_page, "empty").first).to_contain_text("No step has ended yet")
    own_page.unroute_all()
    own_page.reload()
    pw.expect(own_page.get_by_test_id("verdict")).to_contain_text("No step has ended yet")
    shared_stack.feed.start()
    pw.expect(own_page.get_by_test_id("heatmap")).to_be_visible()
    pw.expect(own_page.get_by_test_id("verdict")).to_contain_text("No rank stands out")
    pw.expect(state(own_page, "empty")).to_have_count(0)


def test_the_model_screen_of_a_training_job_explains_that_it_trains(page: pw.Page, shared_stack: Any) -> None:
    page.goto(shared_stack.entry.replace("/#", "/?page=scope#"))
    pw.expect(state(page, "empty")).to_contain_text("This job trains, so there is no model to generate with")
    pw.expect(state(page, "empty")).to_contain_text("megatronapp serve --load")


def test_an_error_shows_the_remedy_and_heals_by_retry(page: pw.Page, shared_stack: Any) -> None:
    page.route("**/api/v1/job", lambda route: route.fulfill(status=500, json={}))
    page.goto(shared_stack.entry)
    pw.expect(state(page, "error")).to_contain_text("500")
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.unroute("**/api/v1/job")
    # The page also tries once by itself as its connection opens: if that succeeds just now, the button has gone.
    state(page, "error").get_by_role("button").evaluate_all("found => found.forEach((button) => button.click())")
    pw.expect(page.get_by_role("heading", name="tiny-gpt")).to_be_visible()


def test_without_a_token_nothing_is_shown(page: pw.Page, shared_stack: Any) -> None:
    page.goto(shared_stack.url)
    pw.expect(page.locator("pre")).to_have_text("megatronapp ui <your job>")
    pw.expect(page.locator("body")).to_contain_text("megatronapp get lists the names of your jobs")
    pw.expect(page.locator("body")).not_to_contain_text("tiny-gpt")


def test_a_refused_page_explains_how_to_open_it(page: pw.Page, shared_stack: Any) -> None:
    refusal = {"code": "unauthorised", "message": "missing or wrong token", "hint": ""}
    page.route("**/api/v1/**", lambda route: route.fulfill(status=401, json=refusal))
    page.goto(shared_stack.entry)
    pw.expect(page.get_by_role("heading", name="This page needs to know that you may see this job")).to_be_visible()
    command = re.compile("^megatronapp ui (tiny-gpt|<your job>)$")  # the live socket may have sent its name before
    pw.expect(page.locator("pre")).to_have_text(command)


def test_a_step_no_longer_stored_is_an_error_of_the_timeline_only(page: pw.Page, shared_stack: Any) -> None:
    shared_stack.feed.start()
    page.goto(shared_stack.entry)
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible()
    page.goto(f"{page.url.partition('?')[0]}?step=99999")
    pw.expect(state(page, "error")).to_contain_text("99999")
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible()
    page.get_by_role("button", name="Try again").click()
    pw.expect(page.get_by_test_id("timeline")).to_be_visible()


@pytest.fixture
def neighbour() -> Iterator[recording_server.RecordingServer]:
    with recording_server.running_server() as running:
        yield running


def job(page: pw.Page) -> pw.Locator:
    return page.get_by_role("heading", name="tiny-gpt")


def asks(page: pw.Page) -> pw.Locator:
    return page.get_by_role("heading", name="This page needs to know that you may see this job")


def test_a_code_opens_the_page_once_and_its_cookie_stays_with_a_name_of_its_own(
    page: pw.Page, shared_stack: Any, neighbour: recording_server.RecordingServer
) -> None:
    entry = shared_stack.entry
    page.goto(entry)
    pw.expect(job(page)).to_be_visible()
    mine = page.url
    assert NAMED.match(mine)
    (cookie,) = page.context.cookies()
    assert (cookie["domain"], cookie["httpOnly"], cookie["sameSite"]) == (
        mine.split("/")[2].split(":")[0],
        True,
        "Strict",
    )
    assert shared_stack.token not in cookie["value"]
    page.reload()
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live")
    for host in ("127.0.0.1", "localhost", "hub-0123456789abcdef.localhost"):
        page.goto(f"http://{host}:{neighbour.port}/")
    assert set(neighbour.cookies) == {None}
    page.goto(entry)
    pw.expect(page.get_by_role("alert")).to_contain_text("already used")
    page.get_by_label("Token").fill(shared_stack.token)
    page.get_by_role("button", name="Log in").click()
    pw.expect(job(page)).to_be_visible()
    assert shared_stack.token not in page.url
    page.goto(mine)
    pw.expect(job(page)).to_be_visible()


@pytest.mark.full("test_hub_access has the request")
def test_a_link_of_another_site_logs_no_browser_in_and_uses_no_code_up(
    page: pw.Page, shared_stack: Any, neighbour: recording_server.RecordingServer
) -> None:
    def used_within_its_life() -> bool:
        begin, entry = time.monotonic(), shared_stack.entry
        neighbour.page = f'<!doctype html><a href="{entry}">look</a>'
        page.goto(f"http://127.0.0.1:{neighbour.port}/")
        page.get_by_role("link", name="look").click()
        pw.expect(asks(page)).to_be_visible()
        pw.expect(page.get_by_role("alert")).to_contain_text("another site")
        assert NAMED.match(page.url)
        assert page.context.cookies() == []
        page.goto(entry)
        pw.expect(job(page).or_(page.get_by_role("alert"))).to_be_visible()
        return job(page).is_visible() or time.monotonic() - begin < CODE_LIFE_S

    wait_for("a code that is used in time", used_within_its_life)
    pw.expect(job(page)).to_be_visible()


@pytest.mark.full("test_hub_access has the request")
def test_a_wrong_token_is_reported_and_can_be_corrected(page: pw.Page, shared_stack: Any) -> None:
    page.goto(shared_stack.url)
    pw.expect(asks(page)).to_be_visible()
    for token in ("wrong", shared_stack.token):
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        if token == "wrong":
            pw.expect(page.locator("p")).to_contain_text("no token of this job")
    pw.expect(job(page)).to_be_visible()


def test_a_viewer_sees_why_faults_cannot_be_injected(page: pw.Page, shared_stack: Any) -> None:
    page.goto(shared_stack.url)
    page.get_by_label("Token").fill(shared_stack.viewer_token)
    page.get_by_role("button", name="Log in").click()
    inject = page.get_by_role("button", name="Inject")
    pw.expect(inject).to_have_attribute("title", "Needs the controller role")
    pw.expect(inject).to_be_disabled()


def test_a_lost_connection_leaves_the_picture_with_its_time_and_heals(page: pw.Page, shared_stack: Any) -> None:
    shared_stack.feed.start()
    page.goto(shared_stack.entry)
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible()
    shared_stack.kill_hub()
    banner = state(page, "stale")
    pw.expect(banner).to_contain_text(re.compile(r"Connection lost at \d\d:\d\d:\d\d"))
    pw.expect(banner).to_contain_text(re.compile(r"Next try in \d+ s|Trying now"))
    pw.expect(page.get_by_test_id("connection")).to_have_text("Not connected")
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible()
    pw.expect(banner.get_by_role("button", name="Connect now")).to_be_visible()
    shared_stack.restart_hub()
    banner.evaluate_all("found => found[0]?.querySelector('button').click()")  # the page may have connected by itself
    pw.expect(banner).to_have_count(0)
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live")


@pytest.mark.full("a stack of its own; test_hub_listening shows that such a hub takes no name")
def test_who_has_the_other_address_of_the_port_sees_neither_code_nor_cookie(page: pw.Page, healthy_stack: Any) -> None:
    """Check with a listener at [::1], the first address of a name below `localhost` in Chromium, open to all on the
    machine."""
    port = int(healthy_stack.url.rpartition(":")[2])
    healthy_stack.kill_hub()
    with recording_server.running_server("::1", port) as other:
        healthy_stack.restart_hub()
        page.goto(healthy_stack.entry)
        pw.expect(job(page)).to_be_visible()
        assert page.url == f"{healthy_stack.url}/"
        page.reload()
        pw.expect(page.get_by_test_id("connection")).to_have_text("Live")
        assert other.cookies == []
