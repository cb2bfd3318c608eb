"""MegaScope's screen over a recorded session: pictures and files show its numbers, by keyboard alone too."""

import csv
import io
import json
import pathlib
import re
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import playwright.sync_api as pw
import pytest
import scope_analysis
import scope_replay
import scope_script
import scope_session
from axe import CONTRAST, RULES, violations
from canvases import expect_drawn, expect_picture, expect_to_fit, picture, wait_for
from scope_replay_page import ReplayedHub, saved

from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_common.frames import FrameType, encode
from megatronapp_common.scope.protocol import build_frame

pytestmark = pytest.mark.browser
RUN = scope_session.RUN
PINNED = (1, 2)
"""Layer and head whose attention the session holds."""
CELLS = """(canvas, {left, top, read, cells}) => {
  const context = canvas.getContext("2d"), ratio = window.devicePixelRatio;
  const across = (canvas.width / ratio - left - 1) / read, down = (canvas.height / ratio - top - 1) / read;
  return cells.map(([row, key]) => {
    const x = left + (key + 0.5) * across, y = top + (row + 0.5) * down;
    return [...context.getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3);
  });
}"""
"""Colours in the middle of cells, by the size that the canvas has while they are read."""
ROW_LABEL_PX, COLUMN_LABEL_PX = 74, 22
PROBABILITY_DARK = [
    (10, 10, 22), (34, 17, 80), (85, 22, 128), (136, 39, 129), (187, 56, 120),
    (231, 84, 99), (251, 137, 97), (254, 196, 137), (252, 253, 191),
]  # fmt: skip
"""Constants of frontend/src/render/maps.ts."""


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayedHub]:
    folder = tmp_path_factory.mktemp("replay")
    recording = scope_session.record()
    file = folder / "tiny.scope"
    core = scope_session.core_of(recording, tp=2, pp=2)
    core.runs[RUN].analyses.put(scope_analysis.recorded_lens(recording, 0))
    file.write_bytes(session_file.dump(core.feed, RUN))
    with scope_replay.replaying(file, folder / "replay.log") as running:
        yield ReplayedHub(url=running.url, token=running.token, recording=recording)


@pytest.fixture
def scope(page: pw.Page, replay: ReplayedHub) -> pw.Page:
    """A page that may read the replay."""
    page.context.set_extra_http_headers({"Authorization": f"Bearer {replay.token}"})
    return page


def query(page: pw.Page) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(page.url).query))


def colour(probability: float) -> list[float]:
    """Colour of a probability by the table: 256 steps through the stops, square root as `u8s` has it."""
    code = round(255 * float(np.sqrt(probability)))
    at = code / 255 * (len(PROBABILITY_DARK) - 1)
    left = min(int(at), len(PROBABILITY_DARK) - 2)
    low, high = np.array(PROBABILITY_DARK[left]), np.array(PROBABILITY_DARK[left + 1])
    return [float(part) for part in low + (high - low) * (at - left)]


def test_recorded_session_opens_with_its_tokens(scope: pw.Page, replay: ReplayedHub) -> None:
    scope.goto(replay.url)
    pw.expect(scope.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
    tokens = scope.get_by_test_id("tokens").get_by_role("button")
    pw.expect(tokens).to_have_count(len(replay.recording.prompts[0]) + 8)
    labels = [text.strip() for text in tokens.all_text_contents()]
    assert labels[:10] == ["T", "h", "e", "␣", "s", "e", "a", "␣", "…", "ü"]
    pw.expect(scope.get_by_test_id("why-not")).to_contain_text("recorded session")
    pw.expect(scope.get_by_role("button", name="Generate")).to_be_disabled()


def test_attention_map_paints_the_colours_of_the_exact_probabilities(scope: pw.Page, replay: ReplayedHub) -> None:
    layer, head = PINNED
    exact = replay.recording.sites[0]["attention"][layer, head]
    read = len(exact)
    replay.open(scope, "attention", layer=layer, head=head, token=0)
    heat = scope.get_by_test_id("attention-map")
    pw.expect(heat).to_have_attribute("data-drawn", f"layer {layer}, head {head}, {read} of {read} tokens")
    cells = [(row, key) for row in range(1, read) for key in range(row + 1)]
    place = {"left": ROW_LABEL_PX, "top": COLUMN_LABEL_PX, "read": read, "cells": cells}
    painted = heat.evaluate(CELLS, place)
    wrong = [
        (cell, found, colour(exact[cell]))
        for cell, found in zip(cells, painted, strict=True)
        if max(abs(a - b) for a, b in zip(found, colour(exact[cell]), strict=True)) > 8
    ]
    assert wrong == []


def test_exports_are_the_exact_numbers(scope: pw.Page, replay: ReplayedHub) -> None:
    layer, head = PINNED
    sites = replay.recording.sites[0]
    replay.open(scope, "attention", layer=layer, head=head)
    pw.expect(scope.get_by_test_id("attention-map")).to_be_visible()
    attention = np.load(io.BytesIO(saved(scope, f"Layer {layer}, head {head}", "NPY")))
    exact = sites["attention"][layer, head]
    np.testing.assert_array_equal(attention[: len(exact), : exact.shape[1]], exact)
    replay.open(scope, "layers", layer=layer, head=head, token=3)
    check_picture(scope, scope.get_by_role("region", name="Layers by tokens"))
    query_vector = np.load(io.BytesIO(saved(scope, "States of the token", "NPY")))
    np.testing.assert_array_equal(query_vector.ravel(), sites["q"][3, layer, head])
    replay.open(scope, "pca", layer=layer)
    rows = list(csv.DictReader(io.StringIO(saved(scope, "Principal components", "CSV").decode())))
    basis = scope_session.fitted(replay.recording)[layer]
    points = basis.project(sites["residual"][:1, layer])
    first = [float(rows[0][f"pc{number + 1}"]) for number in range(8)]
    np.testing.assert_allclose(first, points[0], rtol=1e-5, atol=1e-5)


def test_explained_variance_is_that_of_the_points_that_are_shown(scope: pw.Page, replay: ReplayedHub) -> None:
    layer = 2
    replay.open(scope, "pca", layer=layer)
    rows = np.concatenate([sites["residual"][:, layer] for sites in replay.recording.sites]).astype(np.float64)
    basis = scope_session.fitted(replay.recording)[layer]
    explained = basis.project(rows).var(axis=0) / rows.var(axis=0).sum()
    plane = scope.get_by_test_id("explained")
    pw.expect(plane).to_contain_text(f"{100 * (explained[0] + explained[1]):.1f} % of these {len(rows)} tokens")
    assert abs(basis.explained[:2].sum() - explained[:2].sum()) > 0.01, "else the share of the fit would do as well"
    scope.get_by_label("Up", exact=True).select_option(index=4)
    pw.expect(plane).to_contain_text(f"{100 * (explained[0] + explained[4]):.1f} %")
    panel = scope.get_by_role("region", name="Principal components")
    pw.expect(panel).to_contain_text(f"axes from this run, {len(replay.recording.prompts[0])} tokens")
    pw.expect(panel.get_by_test_id("other-axes")).to_contain_text(f"Refit takes the {len(rows)} tokens")


def test_screen_is_driven_by_keyboard_alone(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "layers")
    scope.keyboard.press("2")
    pw.expect(scope.get_by_test_id("head-atlas")).to_be_visible()
    for _ in range(60):
        scope.keyboard.press("Tab")
        if scope.evaluate("document.activeElement.dataset.testid") == "head-atlas":
            break
    spoken = scope.locator("[data-testid=head-atlas] + [aria-live]")
    for key, at in (("ArrowDown", "layer 1, head 0"), ("ArrowRight", "head 1"), ("ArrowRight", "head 2")):
        scope.keyboard.press(key)
        pw.expect(spoken).to_contain_text(f"{at}:")
    pw.expect(scope.get_by_text("preview: click or Enter to lock")).to_be_visible()
    scope.keyboard.press("Enter")
    pw.expect(scope).to_have_url(re.compile("head=2(&|$)"))
    scope.keyboard.press("m")
    filled = scope.locator("section.large")
    pw.expect(filled.get_by_test_id("head-atlas")).to_be_focused()
    whole = {"x": 0, "y": 0, "width": 1440, "height": 900}
    wait_for("the panel to fill the window", lambda: filled.bounding_box() == whole)
    scope.keyboard.press("Escape")
    pw.expect(filled).to_have_count(0)
    pw.expect(scope.get_by_test_id("head-atlas")).to_be_focused()
    scope.keyboard.press("[")
    pw.expect(scope).to_have_url(re.compile("token=16(&|$)"))
    scope.keyboard.press("n")
    pw.expect(scope).not_to_have_url(re.compile("token="))
    scope.keyboard.press("c")
    pw.expect(scope.get_by_role("heading", name="Generate")).to_have_count(0)
    scope.keyboard.press("4")
    pw.expect(scope.get_by_test_id("pca")).to_be_visible()
    scope.get_by_test_id("pca").focus()
    scope.keyboard.press("ArrowDown")
    pw.expect(scope).to_have_url(re.compile("prompt=1(&|$)"))
    scope.go_back()
    pw.expect(scope.get_by_test_id("attention-map").or_(scope.get_by_test_id("head-atlas"))).to_have_count(2)


@pytest.mark.full("a detail of the keyboard")
def test_shortcuts_work_after_the_help_is_shown(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "layers")
    for key in ("?", "Escape", "2"):
        scope.keyboard.press(key)
    pw.expect(scope.get_by_test_id("head-atlas")).to_be_visible()


@pytest.mark.full("an order of a table")
def test_row_of_attention_is_sorted_by_probability(scope: pw.Page, replay: ReplayedHub) -> None:
    layer, head = PINNED
    replay.open(scope, "attention", layer=layer, head=head, token=9)
    card = scope.get_by_role("region", name=f"Layer {layer}, head {head}")
    card.get_by_role("button", name="Table").click()
    card.get_by_role("button", name="By probability").click()
    rows = card.get_by_role("table").locator("tbody tr")
    numbers = rows.locator("td:last-child")
    pw.expect(numbers).to_have_text([re.compile(r"^\s*[\d.]+\s*$")] * 10)
    shown = [float(text) for text in numbers.all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    best = int(replay.recording.sites[0]["attention"][layer, head][9].argmax())
    pw.expect(rows.first.get_by_role("rowheader")).to_have_text(str(best))
    rows.first.get_by_role("button").click()
    pw.expect(rows.first).to_have_class("selected")


@pytest.mark.full("sizes of a panel")
def test_heads_are_as_high_as_the_map_next_to_them_or_fill_the_window(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "attention", layer=PINNED[0], head=PINNED[1])
    shown = height(scope, "attention-map", lambda found: found > 0)
    height(scope, "head-atlas", lambda found: 0.8 * shown < found <= shown + 20)
    scope.get_by_role("region", name="Heads", exact=True).get_by_role("button", name="Fill the window").click()
    pw.expect(scope.get_by_role("button", name="Restore the panel")).to_be_visible()
    height(scope, "head-atlas", lambda found: 0.75 * 900 < found < 900)


def height(page: pw.Page, name: str, holds: Callable[[float], bool]) -> float:
    """The height of a picture, once this holds of it."""
    found: list[float] = []

    def probe() -> bool:
        box = page.get_by_test_id(name).bounding_box()
        found[:] = [box["height"] if box else 0.0]
        return holds(found[0])

    wait_for(f"the height of {name}", probe)
    return found[0]


@pytest.mark.full("a switch of a panel")
def test_paths_of_principal_components_can_be_hidden(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "pca", layer=2)
    canvas = scope.get_by_test_id("pca")
    with_paths = picture(canvas)
    scope.get_by_role("button", name="Paths").click()
    picture(canvas, other_than=with_paths)
    scope.get_by_role("button", name="Paths").click()
    expect_picture(canvas, with_paths)


@pytest.mark.full("a detail of the selection")
def test_a_rank_is_a_single_selection_of_its_layers_and_heads(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "attention", layer=0, head=0)
    where = scope.get_by_test_id("where")
    pw.expect(where).to_contain_text("on rank 0 (stage 0, tensor rank 0)")
    scope.get_by_label("Rank").select_option("3: layers 2 to 3, heads 2 to 3")
    for part in ("rank=3", "layer=2", "head=2"):
        pw.expect(scope).to_have_url(re.compile(f"[?&]{part}(&|$)"))
    scope.reload()
    pw.expect(where).to_contain_text("on rank 3 (stage 1, tensor rank 1)")
    pw.expect(scope.get_by_label("Rank").locator("option:checked")).to_contain_text("3: layers 2 to 3")
    scope.get_by_test_id("head-atlas").focus()
    for key in ("ArrowUp", "Enter"):
        scope.keyboard.press(key)
    pw.expect(where).to_contain_text("layer 1, head 2, on rank 1")
    scope.keyboard.press("r")
    pw.expect(scope).to_have_url(re.compile("rank=2(&|$)"))


@pytest.mark.full("a second for each panel; the first panel of the exports is one of them")
def test_every_panel_saves_its_picture_at_its_displayed_size(scope: pw.Page, replay: ReplayedHub) -> None:
    for view, count in PANELS.items():
        replay.open(scope, view, layer=PINNED[0], head=PINNED[1])
        panels = scope.locator("[data-panel]")
        pw.expect(panels).to_have_count(count)
        if view == "attention":
            pw.expect(scope.get_by_test_id("attention-map")).to_be_visible()
        for number in range(0 if view == "layers" else 1, count):
            check_picture(scope, panels.nth(number))


def check_picture(page: pw.Page, panel: pw.Locator) -> None:
    """The picture is as large as the panel on the page, and something is painted."""

    def saved_while_at_rest() -> tuple[bytes, Any] | None:
        expect_drawn(page)
        box = panel.bounding_box()
        with page.expect_download() as download:
            panel.get_by_role("button", name="PNG").click()
        found = pathlib.Path(download.value.path()).read_bytes()
        return (found, box) if box is not None and box == panel.bounding_box() else None

    found, box = wait_for("a panel that stays as large as it is", saved_while_at_rest)
    assert found.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", found[16:24])
    assert abs(width - box["width"]) <= 1
    assert abs(height - box["height"]) <= 1
    assert len(found) > 3000, "hardly anything is painted"


PANELS = {"layers": 3, "attention": 4, "probabilities": 3, "pca": 2, "lens": 4}
"""How many each view has; the first is the same in all of them."""
VIEWS = {"1": "layers-matrix", "2": "attention-map", "3": "candidates", "4": "pca", "5": "lens-matrix"}


@pytest.mark.full("pictures are of the same colours in light; the job page is checked in both", but=("dark",))
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing_in_any_view(scope: pw.Page, replay: ReplayedHub, scheme: Any) -> None:
    scope.emulate_media(color_scheme=scheme)
    replay.open(scope, "layers", layer=PINNED[0], head=PINNED[1])
    found = []
    for key, shown in VIEWS.items():
        scope.keyboard.press(key)
        pw.expect(scope.get_by_test_id(shown)).to_be_visible()
        expect_drawn(scope)
        rules = RULES if scheme == "dark" else CONTRAST
        found += [f"{shown}: {violation}" for violation in violations(scope, rules)]
    assert found == []


@pytest.mark.full("long tables; colours of the pictures' views and of the job page's tables are checked always")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing_in_any_table(scope: pw.Page, replay: ReplayedHub, scheme: Any) -> None:
    scope.emulate_media(color_scheme=scheme)
    replay.open(scope, "layers", layer=PINNED[0], head=PINNED[1])
    found = []
    for key, shown in VIEWS.items():
        scope.keyboard.press(key)
        pw.expect(scope.get_by_test_id(shown)).to_be_visible()
        expect_drawn(scope)
        for table in scope.get_by_role("button", name="Table").all():
            table.click()
        found += [f"{shown} as a table: {violation}" for violation in violations(scope, CONTRAST)]
    assert found == []


@pytest.mark.full("sizes of panels; the job page is checked always")
def test_fits_the_window(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "layers", layer=PINNED[0], head=PINNED[1])
    for width in (768, 1024, 2200):
        scope.set_viewport_size({"width": width, "height": 768})
        for key, shown in VIEWS.items():
            scope.keyboard.press(key)
            pw.expect(scope.get_by_test_id(shown)).to_be_visible()
            expect_to_fit(scope, f"{shown} at {width}")
            assert scope.evaluate("document.querySelectorAll('*').length") < 3000


Scripted = Callable[..., None]


@pytest.fixture
def scripted(own_page: pw.Page, replay: ReplayedHub) -> Scripted:
    """Let a test act as the hub's socket, with every connection and its number from 0."""
    own_page.context.set_extra_http_headers({"Authorization": f"Bearer {replay.token}"})
    own_page.route("**/api/v1/scope", lambda route: route.fulfill(json=scope_script.HELLO))
    own_page.route("**/attention/**", lambda route: route.fulfill(status=404, json={"message": "none", "hint": ""}))

    def open_with(serve: Callable[[pw.WebSocketRoute, int], None], view: str = "layers", **selection: Any) -> None:
        count = iter(range(100))
        own_page.route_web_socket("**/api/v1/scope", lambda socket: serve(socket, next(count)))
        own_page.goto(replay.view(view, **selection))

    return open_with


def long_prompt(socket: pw.WebSocketRoute, _: int) -> None:
    for frame in (scope_script.hello(), scope_script.run_frame(), scope_script.overview(), scope_script.first_step()):
        socket.send(frame)


@pytest.mark.full("texts of a panel")
def test_numbers_of_a_neighbour_are_called_by_its_name(own_page: pw.Page, scripted: Scripted) -> None:
    scripted(long_prompt, token=6)
    states = own_page.get_by_role("region", name="States of the token")
    pw.expect(states).to_contain_text("“e” at 4")
    pw.expect(states).to_contain_text("These are the numbers of “e” at 4, not of “g” at 6.")
    with own_page.expect_download() as download:
        states.get_by_role("button", name="PNG").click()
    assert download.value.suggested_filename == "states-token4.png"
    matrix = own_page.get_by_role("region", name="Layers by tokens")
    pw.expect(matrix).to_contain_text("One token in 4 of this prompt has values.")
    own_page.get_by_test_id("layers-matrix").focus()
    own_page.keyboard.press("ArrowRight")
    pw.expect(matrix.locator("[aria-live]")).to_have_text("“e” at 4, layer 0: Norm 4")
    own_page.keyboard.press("2")
    heads = own_page.get_by_role("region", name="Heads", exact=True)
    pw.expect(heads).to_contain_text("at “e” at 4")
    pw.expect(heads).to_contain_text("not of “h” at 7")
    own_page.keyboard.press("]")
    pw.expect(heads).to_contain_text("at “i” at 8")
    pw.expect(heads.get_by_text("These are the numbers")).to_have_count(0)


@pytest.mark.full("a detail of a panel")
def test_candidates_have_texts_and_are_limited_after_the_temperature(own_page: pw.Page, scripted: Scripted) -> None:
    scripted(long_prompt, view="probabilities")
    rows = own_page.get_by_test_id("candidates").locator("tbody tr")
    pw.expect(rows.locator("th bdi")).to_have_text(["␣the", "␣a", "part of a character (token 2)", "x", "y", "z"])
    limit_row = own_page.get_by_test_id("candidates").locator("tr.cut")
    pw.expect(own_page.get_by_test_id("cuts")).to_contain_text("cut at temperature 0.5 by top-k off, top-p 0.9")
    pw.expect(limit_row).to_have_count(4)
    own_page.get_by_test_id("what-if").press("End")
    pw.expect(own_page.get_by_test_id("cuts")).to_contain_text("cut at temperature 2")
    pw.expect(limit_row).to_have_count(1)
    own_page.get_by_role("button", name="Of the run").click()
    pw.expect(limit_row).to_have_count(4)
    lines = list(csv.DictReader(io.StringIO(saved(own_page, "Candidates", "Table CSV").decode())))
    assert [line["text"] for line in lines] == [" the", " a", "\ufffd", "x", "y", "z"]
    assert [line["allowed"] for line in lines] == ["yes"] * 2 + ["no"] * 4
    probabilities = np.exp(scope_script.LOGITS) / np.exp(scope_script.LOGITS).sum()
    np.testing.assert_allclose([float(line["probability"]) for line in lines], probabilities[:6], rtol=1e-5)
    table = json.loads(saved(own_page, "Candidates", "Table JSON"))
    assert (table["position"], table["cutAt"]["topP"], table["candidates"][0]["came"]) == (20, 0.9, True)


def test_a_restarted_hub_sends_what_was_missed(own_page: pw.Page, scripted: Scripted) -> None:
    gap = {"seq": 9, "run": RUN, "what": "step", "from": 1, "to": 3, "ranks": None, "reason": "restart"}

    def resumed(socket: pw.WebSocketRoute, message: str | bytes) -> None:
        if json.loads(message)["type"] == "resume":  # what it painted it says, too
            socket.send(encode(build_frame(FrameType.SCOPE_GAP, gap)))

    def serve(socket: pw.WebSocketRoute, number: int) -> None:
        if number == 0:
            long_prompt(socket, number)
            socket.close()
            return
        socket.on_message(lambda message: resumed(socket, message))
        socket.send(scope_script.hello())

    scripted(serve, token=6)
    back = own_page.get_by_test_id("back")
    pw.expect(back).to_contain_text("Connected again after")
    pw.expect(back).to_contain_text("3 steps were skipped: the hub was restarted.")
    pw.expect(own_page.get_by_role("region", name="States of the token")).to_contain_text("“e” at 4")


@pytest.mark.full("a variant of the restarted hub")
def test_a_run_forgotten_by_the_hub_stays_and_is_marked(own_page: pw.Page, scripted: Scripted) -> None:
    def serve(socket: pw.WebSocketRoute, number: int) -> None:
        if number == 0:
            long_prompt(socket, number)
            socket.close()
        else:
            socket.send(scope_script.hello(runs=[]))

    scripted(serve, token=6, run=RUN)
    pw.expect(own_page.get_by_test_id("back")).to_contain_text("no longer knows this run")
    pw.expect(own_page.get_by_test_id("tokens")).to_be_visible()


def test_a_failed_run_and_a_full_queue_are_explained_plainly(own_page: pw.Page, scripted: Scripted) -> None:
    error = {"code": "engine-lost", "message": "The model ended.", "hint": "Ask again once it is back."}

    def serve(socket: pw.WebSocketRoute, number: int) -> None:
        long_prompt(socket, number)
        socket.send(scope_script.run_frame(seq=4, state="failed", error=error))

    def full(route: pw.Route) -> None:
        refusal = {"code": "queue-full", "message": "16 prompts wait", "hint": "Wait a little."}
        route.fulfill(status=429, json=refusal, headers={"Retry-After": "7"})

    own_page.route("**/api/v1/scope/runs", full)
    scripted(serve, view="pca")
    pw.expect(own_page.get_by_role("alert").first).to_contain_text("The model ended.")
    pca = own_page.get_by_role("region", name="Principal components")
    pw.expect(pca).to_contain_text("The run failed before these values arrived")
    pw.expect(pca).to_contain_text("Ask again once it is back.")
    pw.expect(own_page.get_by_test_id("tokens")).to_be_visible()
    own_page.get_by_role("button", name="Generate", exact=True).click()
    pw.expect(own_page.get_by_text("16 prompts wait. Wait a little. Try again in 7 s.")).to_be_visible()
