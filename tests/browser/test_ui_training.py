"""The page of real small trainings that the process backend runs: a pipeline under MegaDPP, ranks of MegaFBD."""

import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import megatronapp_forking
import playwright.sync_api as pw
import pytest
from axe import CONTRAST, violations
from canvases import expect_to_fit, wait_for

from megatronapp_trainer.data import tokenizer as tokenizers

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(1200)]
ITERATIONS = 12
START_MS = 240_000
"""Importing torch and megatron-core takes long on a busy machine."""
MANIFEST = f"""\
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {{name: page-test}}
spec:
  nodes: 2
  procPerNode: 1
  parallelism: {{pipeline: 2}}
  model: {{type: gpt, numLayers: 2, hiddenSize: 32, numAttentionHeads: 2, seqLength: 16, vocabSize: 64}}
  training: {{microBatchSize: 1, globalBatchSize: 4, trainIters: {ITERATIONS}, lr: 1.0e-3}}
  data: {{mock: true}}
  dpp: {{enabled: true}}
  trace: {{enabled: true}}
  analyzer: {{enabled: true, retainSeconds: 300}}
  faults: [{{rank: 1, kind: compute, factor: 3, fromStep: 6, steps: 100}}]
"""
ROLES = f"""\
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {{name: page-test}}
spec:
  nodes: 1
  procPerNode: 3
  parallelism: {{data: 2}}
  fbd: {{enabled: true, backwardPerForward: 2, ship: auto}}
  model:
    {{type: gpt, numLayers: 2, hiddenSize: 32, numAttentionHeads: 2, seqLength: 16, vocabSize: 300,
      attentionDropout: 0.0, hiddenDropout: 0.0}}
  training: {{microBatchSize: 1, globalBatchSize: 4, trainIters: {ITERATIONS}, lr: 1.0e-3}}
  data: {{mock: true, tokenizer: TOKENIZER}}
  trace: {{enabled: true}}
  analyzer: {{enabled: true, retainSeconds: 300}}
  scope: {{training: {{enabled: false, captureEvery: 4, probeTexts: [the whale dives]}}}}
"""


@contextlib.contextmanager
def running(manifest: str, forkserver: Any, folder: pathlib.Path) -> Iterator[str]:
    """Run the job, serve its page and return the address."""
    file = folder / "job.yaml"
    file.write_text(manifest)
    command = megatronapp_forking.command(forkserver.python())
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], check=False, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    call("run", str(file), "--detach")
    try:
        yield call("ui", "page-test", "--print")
    finally:
        call("delete", "page-test", "--ignore-not-found", "--force")


@pytest.fixture
def address(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[str]:
    """Return the address of the page of a pipeline under MegaDPP."""
    with running(MANIFEST, forkserver, tmp_path) as found:
        yield found


@pytest.mark.full("half a minute of training; test_ui_job has all panels, and test_scope_live ranks that serve")
def test_shows_a_real_training_to_its_end(address: str, page: pw.Page) -> None:
    page.goto(address)
    pw.expect(page.get_by_role("heading", name="page-test")).to_be_visible()
    state = page.get_by_role("region", name="State of the job")
    pw.expect(state).to_contain_text(f"{ITERATIONS} / {ITERATIONS}", timeout=START_MS)
    pw.expect(state).to_contain_text("PP2")
    pw.expect(state).to_contain_text("2 ranks on 2 workers")
    pw.expect(page.get_by_role("img", name=re.compile(r"^Loss over steps, newest \d"))).to_be_visible()
    page.goto(f"{page.url.partition('?')[0]}?step=7&rank=1")
    timeline = page.get_by_test_id("timeline")
    timeline.focus()
    details = page.get_by_role("complementary", name="Selected span")
    for _ in range(60):
        before = page.url
        page.keyboard.press("ArrowRight")
        pw.expect(page).not_to_have_url(before)
        if details.get_by_role("heading", name="Forward, microbatch").count():
            break
    pw.expect(details.get_by_role("heading", name="Forward, microbatch")).to_be_visible()
    pw.expect(page.get_by_test_id("span-rank")).to_contain_text("rank 1")
    pw.expect(page.get_by_test_id("span-rank")).to_contain_text("fault injected here")
    pw.expect(page.get_by_test_id("fault")).to_contain_text("compute")
    panel = page.get_by_role("region", name="MegaDPP")
    pw.expect(panel.get_by_test_id("plan-facts")).to_contain_text("the measured times of the first steps")
    pw.expect(panel.get_by_test_id("plan-rows")).to_contain_text("Before the choice, measured in 5 steps")
    pw.expect(
        panel.get_by_role("img", name=re.compile(r"^Passes that ran before their turn .* of 24$"))
    ).to_be_visible()
    pw.expect(panel.get_by_test_id("transfers")).to_contain_text("shared memory")


def watch_layers(page: pw.Page) -> None:
    """Both layers in the steps 4, 8 and 12, of which the forward rank and the backward ranks each have a part."""
    panel = page.get_by_role("region", name="Layers over steps")
    heat = panel.get_by_test_id("layers-heat")
    pw.expect(heat).to_have_attribute("aria-label", re.compile("^residual of 2 layers by 3 captured steps"))
    pw.expect(panel.get_by_test_id("layers-warning")).to_have_count(0)
    panel.get_by_label("Site").select_option("gradients")
    pw.expect(heat).to_have_attribute("aria-label", re.compile("^gradients of 3 layers by 3 captured steps"))
    heat.press("ArrowDown")
    pw.expect(panel.get_by_test_id("captured-cell")).to_contain_text("gradients, layer 0, step 12")
    panel.get_by_role("button", name="Table").click()
    pw.expect(panel.get_by_test_id("data-table").get_by_role("row")).to_have_count(4)
    with page.expect_download() as saved:
        panel.get_by_role("button", name="CSV").click()
    assert len(pathlib.Path(saved.value.path()).read_text().splitlines()) == 1 + 3 * 3
    panel.get_by_role("button", name="Table").click()


def watch_texts(page: pw.Page) -> None:
    """The text after steps 4 and 12, which a forward rank of two replicas has run."""
    panel = page.get_by_role("region", name="Probe texts")
    pw.expect(panel).to_contain_text("Step 12")
    pw.expect(panel.get_by_test_id("probe-attention")).to_be_visible()
    panel.get_by_role("slider").fill("0")
    pw.expect(panel).to_contain_text("Step 4")
    panel.get_by_role("combobox", name="Layer").select_option("1")
    pw.expect(panel.get_by_test_id("probe-attention")).to_have_attribute("aria-label", re.compile("layer 1, step 4:"))
    pw.expect(panel.get_by_test_id("data-table")).to_contain_text("%")
    panel.get_by_role("button", name="Table").click()
    pw.expect(panel.get_by_test_id("data-table").first).to_contain_text("1.00")


@pytest.mark.full("a training of three ranks; MegaFbdPanel.test.ts has the panel's texts")
def test_shows_the_roles_of_ranks_and_axe_finds_nothing(forkserver: Any, tmp_path: pathlib.Path, page: pw.Page) -> None:
    tokenizers.train(["the whale dives"], 280).backend.save(str(tmp_path / "tokenizer.json"))
    roles = ROLES.replace("TOKENIZER", str(tmp_path / "tokenizer.json"))
    with running(roles, forkserver, tmp_path) as address:
        page.goto(address)
        state = page.get_by_role("region", name="State of the job")
        pw.expect(state).to_contain_text(f"{ITERATIONS} / {ITERATIONS}", timeout=START_MS)
        panel = page.get_by_role("region", name="MegaFBD")
        pw.expect(panel.get_by_test_id("ship-facts")).to_contain_text("2 replicas")
        pw.expect(panel.get_by_test_id("modes").get_by_role("row")).to_have_count(4)
        pw.expect(panel.get_by_test_id("roles")).to_contain_text("1 forward rank")
        pw.expect(panel.get_by_test_id("roles")).to_contain_text("2 backward ranks")
        pw.expect(panel.get_by_test_id("shipments")).to_contain_text("2 → 0")
        pw.expect(panel.get_by_role("img", name=re.compile("^Waits over steps"))).to_be_visible()
        legend = page.get_by_role("list", name="Colours of the spans")
        pw.expect(legend).to_contain_text("Shipment to a backward rank")
        pw.expect(page.get_by_text("Stage 0, forward")).to_be_visible()
        watch_layers(page)
        watch_texts(page)
        assert violations(page) == []
        page.emulate_media(color_scheme="light")
        pw.expect(page.locator("html")).to_have_attribute("data-theme", "light")
        assert violations(page, CONTRAST) == []


def perturb(page: pw.Page, bar: pw.Locator) -> None:
    """Perturb weights for the next step and undo it; activations are refused with MegaDPP, and the bar says why."""
    bar.get_by_text("Perturb", exact=True).first.click()
    order = bar.get_by_role("button", name="Perturb", exact=True)
    order.click()
    in_force = bar.get_by_test_id("training-perturbed")
    pw.expect(in_force).to_contain_text(re.compile("perturbed by [0-9a-f]{12}"))
    assert violations(page) == []
    bar.get_by_role("button", name="Undo").click()
    pw.expect(in_force).to_be_hidden()
    bar.get_by_label("Example").select_option("One vector added after each layer")
    order.click()
    pw.expect(bar.get_by_role("alert")).to_contain_text("The order perturb was refused: ")
    bar.get_by_text("Perturb", exact=True).first.click()


@pytest.mark.full("a training of two ranks; ControlBar.test.ts has the orders and texts")
def test_a_training_is_paused_stepped_and_stopped_from_its_page(
    forkserver: Any, tmp_path: pathlib.Path, page: pw.Page
) -> None:
    controlled = MANIFEST.replace(f"trainIters: {ITERATIONS}", "trainIters: 1000000")
    controlled = re.sub(r"  (trace|faults): .*\n", "", controlled)
    controlled += f"  checkpoint: {{save: {tmp_path / 'checkpoints'}}}\n  scope: {{training: {{startPaused: true}}}}\n"
    with running(controlled, forkserver, tmp_path) as address:
        page.goto(address)
        bar = page.get_by_role("region", name="Control")
        state, detail = bar.get_by_test_id("training-state"), bar.get_by_test_id("training-detail")
        pw.expect(state).to_have_text("Paused", timeout=START_MS)
        pw.expect(bar).to_contain_text("no client controls this training")
        assert violations(page) == []
        bar.get_by_role("spinbutton", name="Steps").fill("3")
        bar.get_by_role("button", name="Step", exact=True).click()
        pw.expect(bar).to_contain_text("you control this training")
        header = page.get_by_role("region", name="State of the job")
        pw.expect(header).to_contain_text("3 / 1")
        pw.expect(state).to_have_text("Paused")
        pw.expect(detail).to_contain_text(re.compile("^for [0-9]"))
        perturb(page, bar)
        page.locator("body").press("p")
        pw.expect(state).to_have_text("Running")
        bar.get_by_role("button", name="Pause").click()
        pw.expect(state).to_have_text("Paused")
        page.set_viewport_size({"width": 390, "height": 844})
        expect_to_fit(page, "the page of a phone")
        page.emulate_media(color_scheme="light")
        pw.expect(page.locator("html")).to_have_attribute("data-theme", "light")
        assert violations(page, CONTRAST) == []
        bar.get_by_role("button", name="Stop…").click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        pw.expect(state).to_have_text("Ended")
        tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
        wait_for("the checkpoint of the end", tracker.exists)
