"""The page of a real small training under MegaDPP that the process backend runs: a pipeline of two ranks."""

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import megatronapp_forking
import playwright.sync_api as pw
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(400)]
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


@pytest.fixture
def address(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[str]:
    """Serve the pages of the running job and return their address."""
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    command = megatronapp_forking.command(forkserver.python())
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], check=False, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    call("run", str(manifest), "--detach")
    try:
        yield call("ui", "page-test", "--print")
    finally:
        call("delete", "page-test", "--ignore-not-found", "--force")


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
        page.keyboard.press("ArrowRight")
        if details.get_by_role("heading", name="Forward, microbatch").count():
            break
    pw.expect(page.get_by_test_id("span-rank")).to_contain_text("rank 1")
    pw.expect(page.get_by_test_id("span-rank")).to_contain_text("fault injected here")
    pw.expect(page.get_by_test_id("fault")).to_contain_text("compute")
    panel = page.get_by_role("region", name="MegaDPP")
    pw.expect(panel.get_by_test_id("plan-facts")).to_contain_text("simulation with the measured times")
    pw.expect(panel.get_by_test_id("plan-rows")).to_contain_text("Before the choice, measured in 5 steps")
    pw.expect(
        panel.get_by_role("img", name=re.compile(r"^Passes that ran before their turn .* of 24$"))
    ).to_be_visible()
    pw.expect(panel.get_by_test_id("transfers")).to_contain_text("shared memory")
