"""Login of a browser at a hub: by a code after `#` or by a token, invisible to all others on this machine."""

import re
from collections.abc import Iterator
from typing import Any

import playwright.sync_api as pw
import pytest
import recording_server

pytestmark = pytest.mark.browser
NAMED = re.compile(r"http://hub-[0-9a-f]{16}\.localhost:\d+/$")


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


def test_a_link_of_another_site_logs_no_browser_in_and_uses_no_code_up(
    page: pw.Page, shared_stack: Any, neighbour: recording_server.RecordingServer
) -> None:
    entry = shared_stack.entry
    neighbour.page = f'<!doctype html><a href="{entry}">look</a>'
    page.goto(f"http://127.0.0.1:{neighbour.port}/")
    page.get_by_role("link", name="look").click()
    pw.expect(asks(page)).to_be_visible()
    pw.expect(page.get_by_role("alert")).to_contain_text("another site")
    assert NAMED.match(page.url)
    assert page.context.cookies() == []
    page.goto(entry)
    pw.expect(job(page)).to_be_visible()


def test_a_wrong_token_is_reported_and_can_be_corrected(page: pw.Page, shared_stack: Any) -> None:
    page.goto(shared_stack.url)
    pw.expect(asks(page)).to_be_visible()
    for token in ("wrong", shared_stack.token):
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        if token == "wrong":
            pw.expect(page.locator("p")).to_contain_text("no token of this job")
    pw.expect(job(page)).to_be_visible()


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
