"""MegaScope's example on real nodes: its text is fetched, its model trained, served and captured through the
gateway."""

import json
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import playwright.sync_api as pw
import pytest
from cluster import gateways
from cluster.jobs import LONG_S, E2eJob, example, space, volume
from cluster.runtime import Cluster

pytestmark = pytest.mark.timeout(3600)
CLAIM = "scope-tiny"
PROMPT, TOKENS = "def __init__(self", 8
PAGE_MS = 60_000
COMPLETE = pathlib.Path(__file__).parents[2] / "support" / "cluster" / "complete.py"
POST = """async ([path, body]) => {
  const headers = {"Content-Type": "application/json"};
  return (await fetch(path, {method: "POST", headers, body: JSON.stringify(body)})).status;
}"""


@pytest.fixture(scope="module")
def namespace_of_all(cluster: Cluster, release: str) -> Iterator[str]:
    with space(cluster, "scope") as namespace:
        volume(cluster, namespace, CLAIM)
        yield namespace
    cluster.kubectl("delete", "persistentvolume", CLAIM, "--wait=false")


@pytest.fixture(scope="module")
def trained(cluster: Cluster, namespace_of_all: str) -> E2eJob:
    job = E2eJob(cluster, namespace_of_all, example("scope-tiny"))
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the training", 2 * LONG_S)
    return job


@pytest.fixture(scope="module")
def served(cluster: Cluster, trained: E2eJob) -> E2eJob:
    job = E2eJob(cluster, trained.namespace, example("scope-tiny-serve"))
    job.wait(lambda: job.status().get("phase") == "Running", "a model that takes requests")
    return job


@pytest.fixture(scope="module")
def completion(served: E2eJob) -> dict[str, Any]:
    """Return the model's answer to a program of the namespace, by the Service."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True})
    arguments = (COMPLETE.read_text(encoding="utf-8"), f"http://{served.name}-serve:8000/v1/completions", body)
    pod = (f"{served.name}-hub", "-n", served.namespace)
    answer: dict[str, Any] = json.loads(served.cluster.kubectl("exec", *pod, "--", "python", "-c", *arguments))
    return answer


def test_trains_on_the_text_of_the_demo(trained: E2eJob) -> None:
    losses = trained.losses()[0]
    assert max(losses) == trained.status()["progress"]["totalIterations"] - 1
    assert losses[max(losses)] < losses[min(losses)] - 2


def test_serves_its_model_by_the_service(cluster: Cluster, served: E2eJob, completion: dict[str, Any]) -> None:
    slices = cluster.get(
        "endpointslices", "-n", served.namespace, "-l", f"kubernetes.io/service-name={served.name}-serve"
    )
    assert [end["conditions"]["ready"] for item in slices["items"] for end in item["endpoints"]] == [True]
    assert completion["usage"]["completion_tokens"] == TOKENS


def test_a_viewer_reads_and_cannot_generate(
    cluster: Cluster, served: E2eJob, page: pw.Page, complaints: list[str]
) -> None:
    token = gateways.person(cluster, served.namespace, "view", "vera")
    with gateways.forwarded(cluster) as address:
        log_in(page, address, token, served)
        complaints.clear()
        pw.expect(page.get_by_test_id("why-not")).to_contain_text("You may view", timeout=PAGE_MS)
        pw.expect(page.get_by_role("button", name="Generate")).to_be_disabled()
        path = f"/api/v1/jobs/{served.namespace}/{served.name}/scope/runs"
        assert page.evaluate(POST, [path, {"prompts": [PROMPT], "tokens": TOKENS}]) == 403
        page.goto("about:blank")  # receives the complaint about it
        complaints.clear()


def test_editor_types_a_prompt_and_sees_attention_and_probabilities(
    served: E2eJob, completion: dict[str, Any], page: pw.Page, complaints: list[str], tmp_path: pathlib.Path
) -> None:
    token = gateways.person(served.cluster, served.namespace, "edit", "eda")
    with gateways.forwarded(served.cluster) as address:
        log_in(page, address, token, served)
        complaints.clear()
        generate(page)
        see(page, completion, tmp_path)


def test_page_by_megatronapp_ui(
    served: E2eJob, completion: dict[str, Any], page: pw.Page, tmp_path: pathlib.Path
) -> None:
    with gateways.opened(served.cluster, served) as address:
        page.goto(address)
        to_scope(page)
        generate(page)
        see(page, completion, tmp_path)


def log_in(page: pw.Page, address: str, token: str, job: E2eJob) -> None:
    """Log in with a token of the cluster, and open the model from the list of jobs."""
    page.goto(address)
    page.get_by_label("Token").fill(token, timeout=PAGE_MS)
    page.get_by_role("button", name="Log in").click()
    row = page.get_by_role("row").filter(has_text=job.name)
    row.get_by_role("link", name=job.name).click(timeout=PAGE_MS)
    to_scope(page)


def to_scope(page: pw.Page) -> None:
    """Wait for MegaScope's screen, with which the page of a job that serves begins."""
    pw.expect(page.get_by_role("heading", name="MegaScope")).to_be_visible(timeout=PAGE_MS)


def generate(page: pw.Page) -> None:
    """A new run: the one before it, which the page shows until the new one has a name, may say the same."""
    page.get_by_label("Prompt 1").fill(PROMPT, timeout=PAGE_MS)
    page.get_by_label("New tokens").fill(str(TOKENS))
    page.get_by_label("Temperature", exact=True).fill("0")
    before = run_of(page.url)
    page.get_by_role("button", name="Generate").click()
    page.wait_for_url(lambda url: run_of(url) not in {before, None}, timeout=PAGE_MS)
    pw.expect(page.get_by_test_id("run-state")).to_contain_text(f"Done: {TOKENS} new tokens", timeout=PAGE_MS)


def run_of(url: str) -> str | None:
    """The run that an address names."""
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query)).get("run")


def see(page: pw.Page, completion: dict[str, Any], folder: pathlib.Path) -> None:
    """The tokens that the API gives, a head's attention and the candidates; left before the way to it is closed."""
    generated = page.get_by_test_id("tokens").get_by_role("button")
    expected = completion["usage"]["total_tokens"]
    pw.expect(generated).to_have_count(expected, timeout=PAGE_MS)
    ids = completion["choices"][0]["token_ids"]
    for button, token in zip(generated.all()[-TOKENS:], ids, strict=True):
        pw.expect(button).to_have_attribute("title", re.compile(rf"\btoken {token} at "))
    page.locator("body").press("2")
    pw.expect(page.get_by_test_id("attention-map")).to_be_visible(timeout=PAGE_MS)
    page.screenshot(path=folder / "attention.png", full_page=True)
    page.locator("body").press("3")
    chosen = page.get_by_test_id("candidates").locator("tr.chosen th")
    pw.expect(chosen).to_have_attribute("title", f"token {ids[-1]}", timeout=PAGE_MS)
    page.screenshot(path=folder / "probabilities.png", full_page=True)
    page.goto("about:blank")
