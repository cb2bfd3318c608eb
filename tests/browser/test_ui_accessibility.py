"""axe, focus, motion, colours and narrow windows, on the real page in its main states."""

import re
from typing import Any

import playwright.sync_api as pw
import pytest
from axe import violations

pytestmark = pytest.mark.browser


@pytest.fixture
def shown(page: pw.Page, slow_rank_stack: Any) -> pw.Page:
    """The job's page with a verdict and a selected step."""
    page.goto(slow_rank_stack.entry)
    panel = page.get_by_test_id("verdict")
    pw.expect(panel).to_contain_text("confirmed", timeout=60_000)
    panel.get_by_role("button", name=re.compile(r"^step \d+$")).first.click()
    pw.expect(page.get_by_test_id("timeline")).to_be_visible()
    return page


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing(shown: pw.Page, scheme: Any) -> None:
    shown.emulate_media(color_scheme=scheme)
    pw.expect(shown.locator("html")).to_have_attribute("data-theme", scheme)
    shown.get_by_test_id("timeline").focus()
    shown.keyboard.press("ArrowRight")
    for table in (re.compile("^Table$"), re.compile("as a table$")):
        shown.get_by_role("button", name=table).click()
    assert violations(shown) == []


def test_axe_finds_nothing_on_the_other_pages(shown: pw.Page) -> None:
    shown.keyboard.press("?")
    pw.expect(shown.get_by_role("dialog")).to_be_visible()
    assert violations(shown) == []
    shown.keyboard.press("Escape")
    shown.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    assert violations(shown) == []


def test_every_tab_stop_has_a_visible_focus(shown: pw.Page) -> None:
    shown.reload()
    pw.expect(shown.get_by_test_id("timeline")).to_be_visible()
    shown.keyboard.press("Tab")
    seen: list[str] = []
    for _ in range(120):
        stop = shown.evaluate(
            """() => {
              const element = document.activeElement;
              const shape = element.matches("input[type=radio]") ? element.nextElementSibling : element;
              const style = getComputedStyle(shape);
              const name = element.getAttribute("aria-label") || element.textContent.trim() || element.tagName;
              return element === document.body ? null : [name.slice(0, 40), parseFloat(style.outlineWidth)];
            }"""
        )
        if stop is None:
            break
        assert stop[1] >= 2, f"no visible focus on {stop[0]}"
        seen.append(stop[0])
        shown.keyboard.press("Tab")
    assert seen[0] == "Skip to the job"
    assert len(seen) > 25
    assert any("ranks by steps" in name for name in seen)
    assert any("Step" in name and "ranks" in name for name in seen)


def test_the_selected_colours_are_saved(shown: pw.Page) -> None:
    switch = shown.get_by_role("button", name="Colours")
    html = shown.locator("html")
    switch.click()
    pw.expect(switch).to_have_accessible_name(re.compile("dark"))
    switch.click()
    pw.expect(html).to_have_attribute("data-theme", "light")
    shown.reload()
    pw.expect(html).to_have_attribute("data-theme", "light")


def test_nothing_moves_where_less_motion_is_wished(own_page: pw.Page, slow_rank_stack: Any) -> None:
    own_page.route("**/api/v1/job", lambda route: None)
    own_page.route_web_socket("**/api/v1/live", lambda socket: None)
    own_page.goto(slow_rank_stack.entry)
    pw.expect(own_page.locator("[data-state=loading]")).to_be_visible()
    running = "document.getAnimations().filter(animation => animation.playState === 'running').length"
    assert own_page.evaluate(running) == 0
    own_page.emulate_media(reduced_motion="no-preference")
    assert own_page.evaluate(running) > 0


def test_fits_the_window_and_stays_small(shown: pw.Page) -> None:
    assert shown.evaluate("document.querySelectorAll('*').length") < 1500
    for width in (360, 768, 2200):
        shown.set_viewport_size({"width": width, "height": 800})
        overflow = shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{overflow} pixels too wide at {width}"
        pw.expect(shown.get_by_test_id("heatmap")).to_be_visible()
