"""Analyses on MegaScope's screen over a recorded session: logit lens, attribution, scores of heads."""

import csv
import io
import re
from collections.abc import Iterator

import numpy as np
import playwright.sync_api as pw
import pytest
import scope_analysis
import scope_replay
import scope_session
from axe import RULES, violations
from scope_replay_page import ReplayedHub, saved

from megatronapp_analyzer.scope.delivery import session_file

pytestmark = pytest.mark.browser
RUN = scope_session.RUN
LAYER, POSITION = 1, 5


@pytest.fixture(scope="module")
def recording() -> scope_session.Recording:
    return scope_session.record()


@pytest.fixture(scope="module")
def replay(recording: scope_session.Recording, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayedHub]:
    folder = tmp_path_factory.mktemp("replay")
    core = scope_session.core_of(recording, tp=2, pp=2)
    analyses = core.runs[RUN].analyses
    likeliest = int(scope_analysis.lens_logs(recording, 0)[POSITION, LAYER].argmax())
    ids = recording.prompts[0] + recording.generated[0]
    for token in (None, likeliest):
        analyses.put(scope_analysis.recorded_lens(recording, 0, token))
        attributed = ids[POSITION + 1] if token is None else token
        request = {"kind": "attribution", "row": POSITION, "token": attributed, "against": None}
        request |= {"neurons": 10, "order": "contribution"}
        analyses.put(scope_analysis.recorded(recording, 0, request, ids[: POSITION + 1]))
    analyses.put(scope_analysis.recorded(recording, 0, {"kind": "heads"}, ids[:-1]))
    file = folder / "tiny.scope"
    file.write_bytes(session_file.dump(core.feed, RUN))
    with scope_replay.replaying(file, folder / "replay.log") as running:
        yield ReplayedHub(url=running.url, token=running.token, recording=recording)


@pytest.fixture
def scope(page: pw.Page, replay: ReplayedHub) -> pw.Page:
    """A page that may read the replay."""
    page.context.set_extra_http_headers({"Authorization": f"Bearer {replay.token}"})
    return page


def test_the_lens_shows_what_each_layer_predicts(scope: pw.Page, replay: ReplayedHub) -> None:
    logs = scope_analysis.lens_logs(replay.recording, 0)
    layer, position = LAYER, POSITION
    replay.open(scope, "lens", layer=layer, token=position)
    best = np.argsort(-logs[position, layer], kind="stable")[:10]
    rows = scope.get_by_test_id("lens-candidates").locator("tbody tr")
    pw.expect(rows).to_have_count(10)
    for number, token in enumerate(best):
        pw.expect(rows.nth(number).get_by_role("rowheader")).to_have_attribute("title", f"token {token}")
    matrix = scope.get_by_role("region", name="Logit lens")
    lines = list(csv.DictReader(io.StringIO(saved(scope, "Logit lens", "CSV").decode())))
    cell = next(line for line in lines if (line["layer"], line["position"]) == (str(layer), str(position)))
    assert float(cell["probability"]) == pytest.approx(np.exp(logs[position, layer].max()), rel=1e-4)
    following = (replay.recording.prompts[0] + replay.recording.generated[0])[position + 1]
    assert int(cell["rank of the next token"]) == (logs[position, layer] > logs[position, layer, following]).sum()
    scope.get_by_test_id("lens-matrix").focus()
    scope.keyboard.press("ArrowDown")
    pw.expect(matrix.locator("[aria-live]")).to_contain_text("layer 2 predicts")
    pw.expect(scope).to_have_url(re.compile("layer=2(&|$)"))
    scope.keyboard.press("ArrowUp")
    pw.expect(scope).to_have_url(re.compile(f"layer={layer}(&|$)"))
    pw.expect(rows.first.get_by_role("rowheader")).to_have_attribute("title", f"token {best[0]}")
    rows.first.get_by_role("button", name="Follow").click()
    pw.expect(matrix.get_by_role("radio", name="Followed")).to_be_checked()
    matrix.get_by_role("button", name="Table").click()
    pw.expect(matrix.get_by_role("table")).to_contain_text("rank 0")


def test_contributions_of_a_logit_are_shown_and_sum_up(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "lens", layer=LAYER, token=POSITION)
    panel = scope.get_by_role("region", name="Attribution")
    contributions = scope.get_by_test_id("attribution-contributions").locator("tbody tr")
    pw.expect(contributions).to_have_count(11)
    lines = list(csv.DictReader(io.StringIO(saved(scope, "Attribution", "CSV").decode())))
    token = (replay.recording.prompts[0] + replay.recording.generated[0])[POSITION + 1]
    logit = float(replay.recording.sites[0]["logits"][POSITION, token])
    assert lines[-1]["component"] == "logit"
    assert float(lines[-1]["contribution"]) == pytest.approx(logit, rel=1e-4)
    assert sum(float(line["contribution"]) for line in lines[:-1]) == pytest.approx(logit, abs=1e-2)
    pw.expect(scope.get_by_test_id("attribution-neurons").locator("tbody tr")).to_have_count(10)
    scope.get_by_test_id("attribution-heads").focus()
    scope.keyboard.press("ArrowRight")
    pw.expect(scope).to_have_url(re.compile("head=1(&|$)"))
    panel.get_by_role("button", name="Table").click()
    pw.expect(panel.get_by_role("table")).to_contain_text(f"layer {LAYER}, head 1")
    assert violations(scope, RULES) == []


def test_heads_are_found_by_their_scores(scope: pw.Page, replay: ReplayedHub) -> None:
    replay.open(scope, "attention", layer=0, head=0)
    panel = scope.get_by_role("region", name="Find heads")
    pw.expect(panel).to_contain_text("No scores yet")
    panel.get_by_role("button", name="Compute").click()
    best = scope.get_by_test_id("best-heads").get_by_role("button")
    pw.expect(best).to_have_count(5)
    pw.expect(best.first).to_have_text("layer 3, head 3: 0.333")
    best.first.click()
    pw.expect(scope).to_have_url(re.compile("layer=3&head=3(&|$)"))
    rows = list(csv.DictReader(io.StringIO(saved(scope, "Find heads", "CSV").decode())))
    assert float(rows[-1]["previous"]) == pytest.approx(0.33)
    panel.get_by_role("radio", name="Random, twice").check(force=True)
    panel.get_by_role("button", name="Compute").click()
    pw.expect(panel).to_contain_text("Scores of heads were not recorded")
    assert violations(scope, RULES) == []
