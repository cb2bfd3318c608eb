"""Two runs on MegaScope's screen: a replayed session, and the file of another checkpoint and prompt."""

import csv
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import playwright.sync_api as pw
import pytest
import scope_analysis
import scope_replay
import scope_session
from axe import CONTRAST, RULES, violations
from canvases import expect_drawn, expect_to_fit
from scope_model import TinyGptShape
from scope_replay_page import ReplayedHub, saved

from megatronapp_analyzer.scope.delivery import session_file

pytestmark = pytest.mark.browser
RUN = scope_session.RUN
LAYER, HEAD = 1, 2
"""Head whose attention both sessions hold."""
MINUS = "B \N{MINUS SIGN} A"
VIEWS = {
    "1": "difference-layers",
    "2": "difference-attention",
    "3": "difference-candidates",
    "4": "difference-pca",
    "5": "difference-lens",
}


def session(recording: scope_session.Recording, file: pathlib.Path) -> pathlib.Path:
    """Write the session of a recording with its lens."""
    core = scope_session.core_of(recording, tp=2, pp=2)
    core.runs[RUN].analyses.put(scope_analysis.recorded_lens(recording, 0))
    file.write_bytes(session_file.dump(core.feed, RUN))
    return file


@pytest.fixture(scope="module")
def other() -> scope_session.Recording:
    """Run B: of a model with learned positions, after a shorter prompt with the same beginning."""
    return scope_session.record(TinyGptShape(rotary=False), prompts=("The sea",), tokens=8)


@pytest.fixture(scope="module")
def file(other: scope_session.Recording, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return session(other, tmp_path_factory.mktemp("other") / "other checkpoint.scope")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayedHub]:
    folder = tmp_path_factory.mktemp("replay")
    recording = scope_session.record()
    with scope_replay.replaying(session(recording, folder / "tiny.scope"), folder / "replay.log") as running:
        yield ReplayedHub(url=running.url, token=running.token, recording=recording)


@pytest.fixture
def compared(page: pw.Page, replay: ReplayedHub, file: pathlib.Path) -> pw.Page:
    """A page that shows the replayed run with the file as run B."""
    page.context.set_extra_http_headers({"Authorization": f"Bearer {replay.token}"})
    replay.open(page, "layers", layer=LAYER, head=HEAD, token=12)
    page.get_by_role("button", name="Compare runs").click()
    page.get_by_label("Open a session file").set_input_files(file)
    pw.expect(page.get_by_test_id("difference-layers")).to_be_visible()
    return page


def table(page: pw.Page, card: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(saved(page, card, "CSV").decode())))


def matrix(lines: list[dict[str, str]], name: str, rows: int) -> np.ndarray:
    """Numbers of A or B, NaN where a run has none."""
    return np.array([float(line[name] or "nan") for line in lines]).reshape(rows, -1)


def test_a_session_file_of_another_checkpoint_is_subtracted_from_the_run(
    compared: pw.Page, replay: ReplayedHub, other: scope_session.Recording
) -> None:
    page = compared
    a, b = replay.recording.sites[0], other.sites[0]
    read = min(len(a["residual"]), len(b["residual"]))
    pw.expect(page.get_by_text("positions 0 to")).to_be_visible()
    pw.expect(page.get_by_text(re.compile("Tokens differ from position 7 on"))).to_be_visible()
    lines = table(page, f"Layers by tokens, {MINUS}")
    for name, sites in (("a", a), ("b", b)):
        exact = np.linalg.norm(sites["residual"][:read], axis=-1).T
        np.testing.assert_allclose(matrix(lines, name, 4), exact, rtol=2e-3)
    page.keyboard.press("2")
    pw.expect(page.get_by_test_id("difference-attention")).to_be_visible()
    attention = np.load(io.BytesIO(saved(page, f"Layer {LAYER}, head {HEAD}, {MINUS}", "NPY")))
    shown = np.tril(np.ones((read, read), bool))
    exact = (b["attention"][LAYER, HEAD][:read, :read] - a["attention"][LAYER, HEAD][:read, :read])[shown]
    np.testing.assert_allclose(attention[shown], exact, atol=8e-3)
    page.keyboard.press("5")
    pw.expect(page.get_by_test_id("difference-lens")).to_be_visible()
    page.get_by_role("radio", name="Next token").check(force=True)
    lens = table(page, f"Logit lens, {MINUS}")
    logs = [scope_analysis.lens_logs(recording, 0) for recording in (replay.recording, other)]
    following = (other.prompts[0] + other.generated[0])[3]
    cell = next(line for line in lines_of(lens, "layer 1", 2))
    found = [float(cell["a"]), float(cell["b"])]
    np.testing.assert_allclose(found, [log[2, 1, following] for log in logs], rtol=1e-3)
    page.get_by_label("Prompt", exact=True).select_option(index=1)
    pw.expect(page.get_by_text("Run B has no prompt 2")).to_be_visible()
    page.get_by_label("Prompt", exact=True).select_option(index=0)
    check_address(page)


def lines_of(lines: list[dict[str, str]], layer: str, index: int) -> Iterator[dict[str, str]]:
    return (line for line in lines if line["layer"] == layer and line["index"] == str(index))


def check_address(page: pw.Page) -> None:
    """The address names both runs and opens them; after a reload the page asks for the file."""
    pw.expect(page).to_have_url(re.compile(f"with={RUN}&file=other\\+checkpoint.scope"))
    page.keyboard.press("s")
    pw.expect(page).to_have_url(re.compile("side=a(&|$)"))
    pw.expect(page.get_by_role("region", name="Logit lens (A)")).to_be_visible()
    page.reload()
    absent = page.get_by_text("Choose the file other checkpoint.scope again")
    pw.expect(absent).to_be_visible()
    page.get_by_role("button", name="Compare runs").click()
    pw.expect(absent).to_be_hidden()
    page.go_back()
    pw.expect(absent).to_be_visible()


def test_axe_finds_nothing_in_differences_on_a_phone(compared: pw.Page) -> None:
    compared.set_viewport_size({"width": 390, "height": 844})
    found = []
    for key, shown in VIEWS.items():
        compared.keyboard.press(key)
        if key == "4":
            pw.expect(compared.get_by_text("The axes of A and B were fitted separately")).to_be_visible()
        else:
            pw.expect(compared.get_by_test_id(shown)).to_be_visible()
        expect_to_fit(compared, shown)
        found += [f"{shown}: {violation}" for violation in violations(compared, RULES)]
    assert found == []


@pytest.mark.full("colours of the pictures' views are checked in both schemes")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing_side_by_side(compared: pw.Page, scheme: Any) -> None:
    compared.emulate_media(color_scheme=scheme)
    compared.get_by_role("radio", name="A and B").check(force=True)
    found = []
    for key in VIEWS:
        compared.keyboard.press(key)
        pw.expect(compared.locator("[data-side=B]").last.get_by_role("heading").first).to_be_visible()
        expect_drawn(compared)
        found += [f"{key}: {violation}" for violation in violations(compared, RULES if key == "1" else CONTRAST)]
    assert found == []
