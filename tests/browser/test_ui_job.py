"""One job's page against a real hub: it names the slow rank, leads to the evidence, and is accessible."""

import re
import urllib.parse
from typing import Any

import playwright.sync_api as pw
import pytest
from axe import CONTRAST, RULES, violations
from canvases import expect_drawn, expect_to_fit, picture, view, wait_for
from perfetto_rule import read_perfetto

pytestmark = pytest.mark.browser
ORANGE = """canvas => {
  if (!("drawn" in canvas.dataset)) return null;
  const ratio = window.devicePixelRatio, left = canvas.width - 230 * ratio, context = canvas.getContext("2d");
  return [0, 1, 2, 3].map(rank => {
    const { data } = context.getImageData(left, (28 * rank + 8) * ratio, 200 * ratio, 1);
    const orange = Array.from({ length: data.length / 4 }, (_, at) => data[4 * at] > data[4 * at + 2] + 80);
    return orange.filter(Boolean).length / orange.length;
  });
}"""
"""The share of orange among the newest steps of each rank; null before it is drawn."""
READ = "path => fetch(path).then(answer => answer.json())"


def query(page: pw.Page) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(page.url).query))


@pytest.fixture
def verdict(page: pw.Page, slow_rank_stack: Any) -> pw.Locator:
    """The panel, once it names the rank."""
    page.goto(slow_rank_stack.entry)
    panel = page.get_by_test_id("verdict")
    pw.expect(panel).to_contain_text("confirmed")
    return panel


def choose_evidence(page: pw.Page, verdict: pw.Locator) -> int:
    """Click the first evidence step; returns it.

    In a single call: the verdict moves on, and the address may name another step from before.
    """
    chip = verdict.get_by_role("button", name=re.compile(r"^step \d+$")).first
    step = int(chip.evaluate("chip => { const text = chip.textContent; chip.click(); return text.match(/\\d+/)[0]; }"))
    pw.expect(page).to_have_url(re.compile(rf"[?&]step={step}\b"))
    return step


def test_names_the_slow_rank_and_its_cost(page: pw.Page, verdict: pw.Locator) -> None:
    pw.expect(verdict.get_by_role("heading", level=2)).to_contain_text("Rank 2")
    pw.expect(verdict).to_contain_text("slow compute")
    pw.expect(page).to_have_title("▲ Rank 2: slow compute (tiny-gpt)")
    pw.expect(verdict).to_contain_text(re.compile(r"\+[\d.]+ ms\s*on every step"))
    pw.expect(page.get_by_role("button", name=re.compile("^Rank 2 .*named by a verdict"))).to_be_visible()
    pw.expect(page.get_by_role("button", name=re.compile("named by a verdict"))).to_have_count(1)


def test_a_trace_around_the_evidence_is_downloaded(page: pw.Page, verdict: pw.Locator) -> None:
    with page.expect_download() as waiting:
        verdict.get_by_role("link", name="Trace").click()
    assert waiting.value.suggested_filename == "tiny-gpt-verdict.pftrace"
    ranks = {span.track.partition(" (")[0] for span in read_perfetto(waiting.value.path().read_bytes()).spans}
    assert "rank 2" in ranks


def test_heat_map_paints_the_slow_rank_as_slow_and_its_peers_not(page: pw.Page, verdict: pw.Locator) -> None:
    heat = page.get_by_test_id("heatmap")

    def is_slow() -> bool:
        # Steps arrive while the map is read, and a peer may be slow at single ones: most steps decide.
        orange = heat.evaluate(ORANGE)
        return bool(orange) and orange[2] > 0.5 > max(orange[0], orange[1], orange[3])

    wait_for("a map of rank 2 in orange, and of no other", is_slow)


def test_evidence_leads_all_panels_to_its_step(page: pw.Page, verdict: pw.Locator) -> None:
    step = choose_evidence(page, verdict)
    wait_for("the rank in the address", lambda: query(page) == {"step": str(step), "rank": "2"})
    pw.expect(page.get_by_role("heading", name=f"Step {step} on all ranks")).to_be_visible()
    pw.expect(page.get_by_text(f"8 steps up to {step}")).to_be_visible()
    pw.expect(page.get_by_role("button", name=re.compile("^Rank 2 "))).to_have_attribute("aria-pressed", "true")


@pytest.mark.full("the evidence above selects by the same address")
def test_selection_survives_a_reload_and_the_back_button(page: pw.Page, verdict: pw.Locator) -> None:
    step = choose_evidence(page, verdict)
    page.reload()
    pw.expect(page.get_by_role("heading", name=f"Step {step} on all ranks")).to_be_visible()
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible()
    page.get_by_role("button", name="Next step").click()
    pw.expect(page).to_have_url(re.compile(f"step={step + 1}"))
    page.go_back()
    pw.expect(page).to_have_url(re.compile(f"step={step}\\b"))


def test_span_by_keyboard_then_to_the_other_end_of_its_transfer(page: pw.Page, verdict: pw.Locator) -> None:
    timeline = timeline_of(page, choose_evidence(page, verdict))
    timeline.focus()
    details = page.get_by_role("complementary", name="Selected span")
    for _ in range(40):
        before = page.url
        page.keyboard.press("ArrowRight")
        pw.expect(page).not_to_have_url(before)
        if details.get_by_role("button", name="Other end").count():
            break
    pw.expect(details.get_by_role("button", name="Other end")).to_be_visible()
    pw.expect(details).to_contain_text("Duration")
    here = page.get_by_test_id("span-rank").inner_text()
    page.keyboard.press("f")
    pw.expect(page.get_by_test_id("span-rank")).not_to_have_text(here)
    pw.expect(page).not_to_have_url(re.compile(r"[?&]rank=2(&|$)"))
    page.keyboard.press("Escape")
    pw.expect(page).not_to_have_url(re.compile("span="))


@pytest.mark.full("trackLayout.test.ts has the arithmetic")
def test_timeline_zooms_by_wheel_and_key_pans_by_drag_and_fits(page: pw.Page, verdict: pw.Locator) -> None:
    timeline = timeline_of(page, choose_evidence(page, verdict))
    page.mouse.move(5, 5)
    whole = view(timeline)
    timeline.hover(position={"x": 400, "y": 60})
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    zoomed = view(timeline, other_than=whole)
    timeline.hover(position={"x": 400, "y": 60})
    page.mouse.down()
    timeline.hover(position={"x": 250, "y": 60})
    page.mouse.up()
    panned = view(timeline, other_than=zoomed)
    timeline.focus()
    page.keyboard.press("+")
    view(timeline, other_than=panned)
    page.keyboard.press("0")
    pw.expect(timeline).to_have_attribute("data-drawn", whole)


def timeline_of(page: pw.Page, step: int) -> pw.Locator:
    """The timeline, once it shows this step and no longer that before."""
    timeline = page.get_by_test_id("timeline")
    pw.expect(timeline).to_have_attribute("aria-label", re.compile(f"^Step {step} on "))
    pw.expect(page.locator("[aria-busy=true]", has=timeline)).to_have_count(0)
    return timeline


@pytest.mark.full("the zoom by wheel shows the same handler")
def test_wheel_without_control_scrolls_the_page(page: pw.Page, verdict: pw.Locator) -> None:
    pw.expect(page.get_by_test_id("timeline")).to_be_visible()  # what is below the map makes the page high enough
    heat = page.get_by_test_id("heatmap")
    expect_drawn(page)
    heat.hover()
    page.mouse.wheel(0, 300)
    page.wait_for_function("window.scrollY > 0")


@pytest.mark.full("spans are chosen by keyboard above")
def test_heat_map_by_keyboard(page: pw.Page, verdict: pw.Locator) -> None:
    page.get_by_test_id("heatmap").focus()
    page.keyboard.press("Home")
    pw.expect(page).to_have_url(re.compile(r"step=0\b"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    pw.expect(page.get_by_text(re.compile("^step 1, rank 2: Slowdown against peers"))).to_be_attached()
    wait_for("the cell in the address", lambda: query(page) == {"step": "1", "rank": "2"})


def test_metric_switch_and_table_show_the_same_numbers_as_the_hub(page: pw.Page, verdict: pw.Locator) -> None:
    page.get_by_role("radio", name="Compute").check()
    pw.expect(page).to_have_url(re.compile("metric=compute"))
    pw.expect(page.get_by_role("img", name="Colours: Compute time")).to_be_visible()
    page.get_by_role("button", name="Table", exact=True).click()
    rows = page.get_by_role("region", name="Ranks by steps as a table").get_by_role("row")

    def same() -> bool:
        head, *cells = re.split(r"\s*\t\s*", rows.nth(5).inner_text())  # at once: rows move on with every step
        answer = page.evaluate(READ, f"api/v1/heatmap?metric=compute&from={head}&to={head}")
        value = answer["values"][2][0]
        # The newest steps may still be without this rank, on the page or in the hub.
        return bool(value) and cells[2] == (f"{value * 1e3:.1f} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms")

    wait_for("the hub's numbers in the table", same)


def test_slow_ranks_show_cost_culprit_and_victims(page: pw.Page, verdict: pw.Locator) -> None:
    slow = page.get_by_test_id("slow-ranks")
    suspect = slow.get_by_test_id("suspects").get_by_role("row").nth(1)
    pw.expect(suspect).to_contain_text(re.compile(r"Rank 2.*slow compute.*confirmed.*\+[\d.]+ ms"))
    slow.get_by_role("button", name="Numbers").click()
    cells = slow.get_by_role("region", name="Slowdowns of stages and replicas")
    pw.expect(cells.get_by_role("row", name=re.compile("▲ stage 1, data 0"))).to_contain_text("2")
    places = slow.get_by_role("application", name=re.compile("^Slowdown of stages"))
    places.focus()
    page.keyboard.press("ArrowDown")
    pw.expect(slow.get_by_text(re.compile(r"^stage 1, data 0, rank 2: [\d.]+\S$"))).to_be_attached()
    pw.expect(page).to_have_url(re.compile(r"[?&]rank=2(&|$)"))
    slow.get_by_role("button", name="Compare").click()
    pw.expect(slow.get_by_test_id("compared")).to_contain_text(re.compile(r"Slowdown of the job.*\+\d+ %"))
    step = choose_evidence(page, verdict)
    blame = page.get_by_test_id("blame")
    pw.expect(blame.get_by_role("heading", name=f"Lost time of step {step}")).to_be_visible()
    pw.expect(blame.get_by_test_id("blamed").get_by_role("row").first).to_contain_text(re.compile("Rank 2.*compute"))
    pw.expect(blame.get_by_test_id("victims")).to_contain_text(re.compile(r"waited [\d.]+ m?s for rank 2"))
    pw.expect(page.get_by_test_id("tracer")).to_contain_text("worker 1")


@pytest.mark.full("axe opens the same table")
def test_all_evidence_as_a_table(page: pw.Page, verdict: pw.Locator) -> None:
    verdict.get_by_role("button", name=re.compile("as a table")).click()
    table = verdict.get_by_role("table")
    pw.expect(table.get_by_role("columnheader")).to_have_count(5)
    pw.expect(table.get_by_role("row").nth(2)).to_be_attached()


def test_is_live(page: pw.Page, verdict: pw.Locator, slow_rank_stack: Any) -> None:
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live")
    target = slow_rank_stack.feed.step + 2
    page.wait_for_function(
        "target => Number(document.querySelector('.fact b')?.textContent.replace(/,/g, '')) > target", arg=target
    )


def test_fault_can_be_injected_and_ended(page: pw.Page, verdict: pw.Locator) -> None:
    form = page.get_by_role("form", name="Inject a fault")
    form.get_by_label("Rank").select_option("1")
    form.get_by_label("Kind").select_option("host")
    form.get_by_label("Factor").fill("2.5")
    form.get_by_label("Steps").fill("500")
    form.get_by_role("button", name="Inject").click()
    fault = page.get_by_test_id("fault")
    pw.expect(fault).to_have_count(1)
    pw.expect(fault).to_contain_text("2.50")
    pw.expect(page.get_by_text("fault injected", exact=True)).to_be_visible()
    fault.get_by_role("button", name="End").click()
    pw.expect(fault).to_have_count(0)


def test_jobs_page_lists_the_job_and_leads_back(page: pw.Page, verdict: pw.Locator) -> None:
    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    row = page.get_by_role("row").nth(1)
    pw.expect(row).to_contain_text("Rank 2")
    row.get_by_role("link", name="tiny-gpt").click()
    pw.expect(page.get_by_role("heading", name="tiny-gpt")).to_be_visible()


def test_curves_zoom_with_the_heat_map_and_select_the_step_under_the_pointer(
    page: pw.Page, verdict: pw.Locator
) -> None:
    loss = page.get_by_role("img", name=re.compile("^Loss over steps, newest [0-9.]+"))
    curve, heat = loss.locator("canvas"), page.get_by_test_id("heatmap")

    def zoom() -> None:
        loss.hover(position={"x": 300, "y": 40})
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        pw.expect(page.get_by_title("All steps (0)")).to_be_enabled()  # the view no longer grows with the job

    zoom()
    curve_before, heat_before = view(curve), view(heat)
    zoom()
    view(curve, other_than=curve_before)
    view(heat, other_than=heat_before)
    page.mouse.move(5, 5)
    readout = page.get_by_text(re.compile(r"^step \d+, loss [0-9.]+, step time [0-9.]+ m?s$"))
    pw.expect(readout).to_have_count(0)
    curve_picture, heat_picture = picture(curve), picture(heat)
    loss.hover(position={"x": 300, "y": 40})
    pw.expect(readout).to_be_visible()
    picture(curve, other_than=curve_picture)
    picture(heat, other_than=heat_picture)
    step = int(readout.inner_text().split()[1].rstrip(","))
    loss.click(position={"x": 300, "y": 40})
    pw.expect(page).to_have_url(re.compile(rf"[?&]step={step}\b"))


@pytest.fixture
def shown(page: pw.Page, verdict: pw.Locator) -> pw.Page:
    """The job's page with a verdict and a selected step."""
    choose_evidence(page, verdict)
    pw.expect(page.get_by_test_id("timeline")).to_be_visible()
    return page


def test_axe_finds_nothing_in_either_scheme(shown: pw.Page) -> None:
    shown.get_by_test_id("timeline").focus()
    shown.keyboard.press("ArrowRight")
    for table in (re.compile("^Table$"), re.compile("^Numbers$"), re.compile("as a table$")):
        shown.get_by_role("button", name=table).click()
    for scheme, rules in (("dark", RULES), ("light", CONTRAST)):
        shown.emulate_media(color_scheme=scheme)
        pw.expect(shown.locator("html")).to_have_attribute("data-theme", scheme)
        assert violations(shown, rules) == [], scheme


@pytest.mark.full("a dialog and a table in the colours of the job's page")
def test_axe_finds_nothing_on_the_other_pages(shown: pw.Page) -> None:
    shown.keyboard.press("?")
    pw.expect(shown.get_by_role("dialog")).to_be_visible()
    assert violations(shown) == []
    shown.keyboard.press("Escape")
    shown.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    pw.expect(shown.get_by_role("row").nth(1)).to_contain_text("tiny-gpt")
    assert violations(shown) == []


def test_every_tab_stop_has_a_visible_focus(shown: pw.Page) -> None:
    shown.reload()
    pw.expect(shown.get_by_test_id("heatmap")).to_be_visible()
    pw.expect(shown.get_by_test_id("timeline")).to_be_visible()
    expect_drawn(shown)
    shown.keyboard.press("Tab")
    seen: list[str] = []
    for _ in range(160):
        stop = shown.evaluate(
            """() => {
              const element = document.activeElement;
              const shape = element.matches("input[type=radio]") ? element.nextElementSibling : element;
              const style = getComputedStyle(shape);
              const name = element.getAttribute("aria-label") || element.textContent.trim() || element.tagName;
              return element === document.body ? null : [name.slice(0, 40), parseFloat(style.outlineWidth)];
            }"""
        )
        shown.keyboard.press("Tab")
        if stop is None:  # behind the last one; or the page has replaced what had the focus, and goes on from its place
            continue
        if stop[0] in seen[:1]:
            break
        assert stop[1] >= 2, f"no visible focus on {stop[0]}"
        seen.append(stop[0])
    assert seen[0] == "Skip to the job"
    assert len(seen) > 25
    assert any("ranks by steps" in name for name in seen)
    assert any("Step" in name and "ranks" in name for name in seen)


@pytest.mark.full("a setting of the browser")
def test_the_selected_colours_are_saved(shown: pw.Page) -> None:
    switch = shown.get_by_role("button", name="Colours")
    html = shown.locator("html")
    switch.click()
    pw.expect(switch).to_have_accessible_name(re.compile("dark"))
    switch.click()
    pw.expect(html).to_have_attribute("data-theme", "light")
    shown.reload()
    pw.expect(html).to_have_attribute("data-theme", "light")


@pytest.mark.full("a setting of the browser")
def test_nothing_moves_where_less_motion_is_wished(own_page: pw.Page, slow_rank_stack: Any) -> None:
    own_page.route("**/api/v1/job", lambda route: None)
    own_page.route_web_socket("**/api/v1/live", lambda socket: None)
    own_page.goto(slow_rank_stack.entry)
    pw.expect(own_page.locator("[data-state=loading]")).to_be_visible()
    running = "document.getAnimations().filter(animation => animation.playState === 'running').length"
    assert own_page.evaluate(running) == 0
    own_page.emulate_media(reduced_motion="no-preference")
    own_page.wait_for_function(f"{running} > 0")


def test_fits_the_window_and_stays_small(shown: pw.Page) -> None:
    assert shown.evaluate("document.querySelectorAll('*').length") < 1500
    for width in (360, 768, 2200):
        shown.set_viewport_size({"width": width, "height": 800})
        pw.expect(shown.get_by_test_id("heatmap")).to_be_visible()
        expect_to_fit(shown, f"the page at {width}")
