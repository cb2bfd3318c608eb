"""MegaScope's screen over a recorded session: pictures and files show its numbers, by keyboard alone too."""

import csv
import dataclasses
import io
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np
import playwright.sync_api as pw
import pytest
import scope_replay
import scope_session
from axe import CONTRAST, violations

pytestmark = pytest.mark.browser
RUN = scope_session.RUN
PINNED = (1, 2)
"""Layer and head whose attention the session holds."""
PIXELS = """(canvas, places) => {
  const context = canvas.getContext("2d"), ratio = window.devicePixelRatio;
  return places.map(([x, y]) => [...context.getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3));
}"""
ROW_LABEL_PX, COLUMN_LABEL_PX = 74, 22
PROBABILITY_DARK = [
    (10, 10, 22), (34, 17, 80), (85, 22, 128), (136, 39, 129), (187, 56, 120),
    (231, 84, 99), (251, 137, 97), (254, 196, 137), (252, 253, 191),
]  # fmt: skip
"""What frontend/src/render/maps.ts says."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """A session that is served, and the numbers that it was made of."""

    url: str
    token: str
    recording: scope_session.Recording

    def view(self, view: str, **selection: Any) -> str:
        """Address of a panel."""
        return f"{self.url}/?{urllib.parse.urlencode({'page': 'scope', 'view': view, **selection})}"


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    folder = tmp_path_factory.mktemp("replay")
    recording = scope_session.record()
    file = folder / "tiny.scope"
    file.write_bytes(scope_session.session(recording))
    with scope_replay.replaying(file, folder / "replay.log") as running:
        yield Replay(url=running.url, token=running.token, recording=recording)


@pytest.fixture
def scope(page: pw.Page, replay: Replay) -> pw.Page:
    """A page that may look at the replay."""
    page.context.set_extra_http_headers({"Authorization": f"Bearer {replay.token}"})
    page.goto(replay.url)
    pw.expect(page.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
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


def test_recorded_session_opens_with_its_tokens(scope: pw.Page, replay: Replay) -> None:
    tokens = scope.get_by_test_id("tokens").get_by_role("button")
    pw.expect(tokens).to_have_count(len(replay.recording.prompts[0]) + 8)
    labels = [text.strip() for text in tokens.all_text_contents()]
    assert labels[:10] == ["T", "h", "e", "␣", "s", "e", "a", "␣", "…", "ü"]
    pw.expect(scope.get_by_test_id("why-not")).to_contain_text("recorded session")
    pw.expect(scope.get_by_role("button", name="Generate")).to_be_disabled()


def test_attention_map_paints_the_colours_of_the_exact_probabilities(scope: pw.Page, replay: Replay) -> None:
    layer, head = PINNED
    exact = replay.recording.sites[0]["attention"][layer, head]
    read = len(exact)
    scope.goto(replay.view("attention", layer=layer, head=head, token=0))
    heat = scope.get_by_test_id("attention-map")
    box = heat.bounding_box()
    assert box is not None
    width, height = box["width"] - ROW_LABEL_PX - 1, box["height"] - COLUMN_LABEL_PX - 1
    cells = [(row, key) for row in range(1, read) for key in range(row + 1)]
    places = [
        [ROW_LABEL_PX + (key + 0.5) * width / read, COLUMN_LABEL_PX + (row + 0.5) * height / read] for row, key in cells
    ]
    painted = heat.evaluate(PIXELS, places)
    wrong = [
        (cell, found, colour(exact[cell]))
        for cell, found in zip(cells, painted, strict=True)
        if max(abs(a - b) for a, b in zip(found, colour(exact[cell]), strict=True)) > 8
    ]
    assert wrong == []


def saved(page: pw.Page, card: str, name: str) -> bytes:
    """The file that a button of a panel saves."""
    with page.expect_download() as download:
        page.get_by_role("region", name=card).get_by_role("button", name=name).click()
    return pathlib.Path(download.value.path()).read_bytes()


def test_exports_are_the_exact_numbers(scope: pw.Page, replay: Replay) -> None:
    layer, head = PINNED
    sites = replay.recording.sites[0]
    scope.goto(replay.view("attention", layer=layer, head=head))
    pw.expect(scope.get_by_test_id("attention-map")).to_be_visible()
    attention = np.load(io.BytesIO(saved(scope, f"Layer {layer}, head {head}", "NPY")))
    exact = sites["attention"][layer, head]
    np.testing.assert_array_equal(attention[: len(exact), : exact.shape[1]], exact)
    scope.goto(replay.view("layers", layer=layer, head=head, token=3))
    assert saved(scope, "Layers by tokens", "PNG").startswith(b"\x89PNG")
    query_vector = np.load(io.BytesIO(saved(scope, "States of the token", "NPY")))
    np.testing.assert_array_equal(query_vector.ravel(), sites["q"][3, layer, head])
    scope.goto(replay.view("pca", layer=layer))
    rows = list(csv.DictReader(io.StringIO(saved(scope, "Principal components", "CSV").decode())))
    basis = scope_session.fitted(replay.recording)[layer]
    points = basis.project(sites["residual"][:1, layer])
    first = [float(rows[0][f"pc{number + 1}"]) for number in range(8)]
    np.testing.assert_allclose(first, points[0], rtol=1e-5, atol=1e-5)


def test_screen_is_driven_by_keyboard_alone(scope: pw.Page, replay: Replay) -> None:
    scope.goto(replay.view("layers"))
    pw.expect(scope.get_by_test_id("tokens")).to_be_visible()
    scope.keyboard.press("2")
    pw.expect(scope.get_by_test_id("head-atlas")).to_be_visible()
    for _ in range(60):
        scope.keyboard.press("Tab")
        if scope.evaluate("document.activeElement.dataset.testid") == "head-atlas":
            break
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        scope.keyboard.press(key)
        scope.wait_for_function("document.querySelector('[data-testid=head-atlas] + [aria-live]').textContent !== ''")
    pw.expect(scope.get_by_text("preview: click or Enter to lock")).to_be_visible()
    scope.keyboard.press("Enter")
    pw.expect(scope).to_have_url(re.compile("head="))
    scope.keyboard.press("[")
    assert query(scope)["token"] == "16"
    scope.keyboard.press("n")
    assert "token" not in query(scope)
    scope.keyboard.press("c")
    pw.expect(scope.get_by_role("heading", name="Generate")).to_have_count(0)
    scope.keyboard.press("4")
    pw.expect(scope.get_by_test_id("pca")).to_be_visible()
    scope.get_by_test_id("pca").focus()
    scope.keyboard.press("ArrowDown")
    assert query(scope)["prompt"] == "1"
    scope.go_back()
    pw.expect(scope.get_by_test_id("attention-map").or_(scope.get_by_test_id("head-atlas"))).to_have_count(2)


VIEWS = {"1": "layers-matrix", "2": "attention-map", "3": "candidates", "4": "pca"}


def test_axe_finds_nothing_in_any_view(scope: pw.Page, replay: Replay) -> None:
    scope.goto(replay.view("layers", layer=PINNED[0], head=PINNED[1]))
    pw.expect(scope.get_by_test_id("tokens")).to_be_visible()
    found = []
    for key, shown in VIEWS.items():
        scope.keyboard.press(key)
        pw.expect(scope.get_by_test_id(shown)).to_be_visible()
        found += [f"{shown}: {one}" for one in violations(scope)]
    scope.emulate_media(color_scheme="light")
    for key, shown in VIEWS.items():
        scope.keyboard.press(key)
        pw.expect(scope.get_by_test_id(shown)).to_be_visible()
        found += [f"{shown} in light: {one}" for one in violations(scope, CONTRAST)]
        for table in scope.get_by_role("button", name="Table").all():
            table.click()
        found += [f"{shown} as a table: {one}" for one in violations(scope, CONTRAST)]
    assert found == []


def test_fits_the_window(scope: pw.Page, replay: Replay) -> None:
    scope.goto(replay.view("layers", layer=PINNED[0], head=PINNED[1]))
    pw.expect(scope.get_by_test_id("tokens")).to_be_visible()
    for width in (768, 1024, 2200):
        scope.set_viewport_size({"width": width, "height": 768})
        for key, shown in VIEWS.items():
            scope.keyboard.press(key)
            pw.expect(scope.get_by_test_id(shown)).to_be_visible()
            over = scope.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, f"{shown} is {over} pixels too wide at {width}"
            assert scope.evaluate("document.querySelectorAll('*').length") < 3000
