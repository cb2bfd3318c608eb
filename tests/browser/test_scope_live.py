"""MegaScope's screen over a live model of two ranks: typing, viewing, stopping, changing, and a rank that is killed."""

import contextlib
import math
import os
import pathlib
import re
import signal
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import megatronapp_forking
import numpy as np
import playwright.sync_api as pw
import pytest
import yaml
from axe import RULES, violations
from canvases import PATIENCE_S, wait_for
from served_job import Served, make_model, served

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.job import load_job
from megatronapp_common.job.arguments import megatron_arguments
from megatronapp_common.web.tokens import TokenRole

pytestmark = [pytest.mark.browser, pytest.mark.process]
LAYER, HEAD = 1, 2
ROOT = pathlib.Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "scope-plugin-serve.yaml").read_text())
WIDTH, PIXELS = 4 * 32, 8
"""Sizes of the MLP and of the example's site."""
LONG = 512
PATIENCE_MS = int(PATIENCE_S * 1000)
POST = """async (asked) => {
  const headers = {"Content-Type": "application/json"};
  return (await fetch("/api/v1/scope/runs", {method: "POST", headers, body: JSON.stringify(asked)})).status;
}"""
TOO_WIDE = """() => document.documentElement.scrollWidth <= document.documentElement.clientWidth ? [] :
  [...document.querySelectorAll("main *")].filter((one) => one.getBoundingClientRect().right > innerWidth)
    .map((one) => one.outerHTML.slice(0, 120)).slice(0, 12)"""
"""Script that lists the elements beyond the right edge of a page that is wider than its window."""
TOPS = """() => new Set([..."qkv"].map(
  name => document.querySelector(`[data-testid=strip-${name}]`)?.getBoundingClientRect().y)).size"""
"""Script that counts the heights at which the strips of query, key and value begin."""
CODE_STEP = 1 / 255
"""Step of code `u8s`: the root of a probability is off by half of it at most."""


@pytest.fixture(scope="module")
def job(
    run_ranks: Callable[..., list[Any]], forkserver: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A pipeline of two ranks with the sites of the example: tensor shards would have half of each."""
    model = make_model(run_ranks, tmp_path_factory.mktemp("model"))
    (variable,) = MANIFEST["spec"]["env"]
    arguments = megatron_arguments(load_job(MANIFEST))
    at = arguments.index("--scope-plugins")
    with (
        pytest.MonkeyPatch.context() as environment,
        tempfile.TemporaryDirectory() as state,  # a short name, for the sockets in it
    ):
        environment.setenv(variable["name"], str(ROOT / variable["value"]))
        flags = ["--pipeline-model-parallel-size", "2", *arguments[at : at + 2]]
        command = megatronapp_forking.command(forkserver.python())
        with served(pathlib.Path(state), model, "live", *flags, megatronapp=command) as started:
            started.until_phase("Running", 0)
            started.until_ready()
            yield started


class Screen:
    """MegaScope as a user of a role sees it."""

    def __init__(self, page: pw.Page, job: Served, role: TokenRole = TokenRole.CONTROLLER) -> None:
        self.page, self.job = page, job
        with page.expect_websocket(lambda socket: socket.url.endswith("/api/v1/scope")) as found:
            page.goto(job.entry(role))
        self.socket = found.value
        self.state = page.get_by_test_id("run-state")
        self.go = page.get_by_role("button", name="Generate")
        pw.expect(self.go).to_be_visible()

    def submit(self, prompt: str, tokens: int) -> None:
        """Fill the form in, press Generate, and wait until the new run is the one that the page shows."""
        self.fill(prompt, tokens)
        self.start()

    def start(self, button: pw.Locator | None = None) -> None:
        """Press Generate, or another button, and wait until the address names another run."""
        before = urllib.parse.urlsplit(self.page.url).query
        (button or self.go).click()
        self.page.wait_for_url(lambda url: urllib.parse.urlsplit(url).query != before)

    def fill(self, prompt: str, tokens: int) -> None:
        """A greedy run, in the form: no sampled end of text ends a long run first."""
        self.page.get_by_label("Prompt 1").fill(prompt)
        self.page.get_by_label("New tokens").fill(str(tokens))
        self.page.get_by_label("Temperature", exact=True).fill("0")

    def generate(self, text: str) -> dict[str, Any]:
        """Press Generate, wait until the new run is in this state, and return what the hub reports of it."""
        self.start()
        self.until(text)
        return self.header()

    def until(self, text: str) -> None:
        """Wait until the run is so far."""
        pw.expect(self.state).to_contain_text(text)

    def sees(self, condition: Callable[[Frame], bool]) -> Any:
        """Return a block that ends when such a frame has been received since its beginning."""
        return self.socket.expect_event("framereceived", lambda data: condition(frames.decode(data)))

    @property
    def run(self) -> str:
        """The run that the address names."""
        found: dict[str, str] = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.page.url).query))
        return found["run"]

    def header(self) -> dict[str, Any]:
        """Return what the hub reports of that run."""
        with self.job.hub() as hub:
            found: dict[str, Any] = hub.get(f"scope/runs/{self.run}").raise_for_status().json()
        return found

    def values(self, site: str, **place: int) -> np.ndarray:
        """Return the hub's numbers of a site; repeat the request until they are ready."""
        with self.job.hub() as hub:
            path, given = f"scope/runs/{self.run}/values/{site}", {"sample": 0, **place}
            while (answer := hub.get(path, params=given)).status_code == 202:
                self.page.wait_for_timeout(answer.json()["retryMs"])
            return np.array(answer.raise_for_status().json()["values"])


def test_a_prompt_becomes_tokens_attention_and_probabilities(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    pw.expect(page.get_by_text("Nothing generated yet")).to_be_visible()
    check_introduction(screen)
    screen.submit("hello world", 8)
    screen.until("Done: 8 new tokens")
    first = screen.run
    prompt = screen.header()["prompts"][0]["ids"]
    pw.expect(page.get_by_test_id("tokens").get_by_role("button")).to_have_count(len(prompt) + 8)
    check_attention(screen, len(prompt) + 6)
    check_candidates(screen, len(prompt) + 6)
    screen.submit("whales", 4)
    screen.until("Done: 4 new tokens")
    page.locator("body").press("4")
    pw.expect(page.get_by_test_id("pca")).to_be_visible()
    check_difference(screen, first)


@pytest.mark.full("three runs; the form and the settings of a run are tested without a model")
def test_a_run_without_a_seed_is_repeated_by_its_settings_after_a_reload(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    screen.fill("hello world", 12)
    page.get_by_label("Temperature", exact=True).fill("2")
    page.get_by_label("Seed").fill("")
    first = screen.generate("Done:")  # of a drawn seed, for which an end of text may come before 12 tokens
    seed = first["sampling"]["seed"]
    assert 0 <= seed < 2**53
    page.reload()
    pw.expect(page.get_by_test_id("settings")).to_contain_text(f"temperature 2, top-p 0.95, seed {seed}")
    page.get_by_label("Prompt 1").fill("something else")
    page.get_by_label("New tokens").fill("3")
    page.get_by_role("button", name="Use these settings").click()
    pw.expect(page.get_by_label("Prompt 1")).to_have_value("hello world")
    pw.expect(page.get_by_label("Seed")).to_have_value(str(seed))
    again = screen.generate("Done:")
    assert again["run"] != first["run"]
    assert [token["id"] for token in again["generated"][0]] == [token["id"] for token in first["generated"][0]]
    page.get_by_label("Seed").fill(str(seed + 1))
    other = screen.generate("Done:")
    assert [token["id"] for token in other["generated"][0]] != [token["id"] for token in first["generated"][0]]


def check_difference(screen: Screen, other: str) -> None:
    """Two runs of one server have the same axes; the lens of both is requested."""
    page = screen.page
    page.get_by_role("button", name="Compare runs").click()
    page.get_by_label("Compare with").select_option(value=other)
    pw.expect(page.get_by_test_id("difference-pca")).to_be_visible()
    page.locator("body").press("5")
    pw.expect(page.get_by_test_id("difference-lens")).to_be_visible()
    page.locator("body").press("2")
    pw.expect(page.get_by_test_id("difference-attention")).to_be_visible()


def check_introduction(screen: Screen) -> None:
    """The caption names the next step, and the button that runs the example is on the first screen of a phone."""
    page = screen.page
    pw.expect(page.get_by_test_id("first-visit")).to_contain_text("Press Generate to run the example prompt")
    pw.expect(page.get_by_label("Prompt 1")).not_to_have_value("")
    pw.expect(page.get_by_label("MLP 1")).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 844})
    pw.expect(screen.go).to_be_in_viewport(ratio=1)
    assert violations(page, RULES) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("button", name="Hide this").press("Enter")
    page.reload()
    pw.expect(screen.go).to_be_enabled()
    pw.expect(page.get_by_test_id("first-visit")).to_have_count(0)


def check_attention(screen: Screen, query: int) -> None:
    """The last row of a head, as the table shows it, is what the hub says."""
    page = screen.page
    page.goto(f"{page.url.partition('?')[0]}?page=scope&run={screen.run}&view=attention&layer={LAYER}&head={HEAD}")
    card = page.get_by_role("region", name=f"Layer {LAYER}, head {HEAD}")
    card.get_by_role("button", name="Table").click()
    rows = card.get_by_role("table").locator("tbody tr")
    exact = screen.values("attention", layer=LAYER, head=HEAD)[query]
    numbers = rows.locator("td:last-child")
    pw.expect(numbers).to_have_text([re.compile(r"^\s*[\d.]+\s*$")] * (query + 1))
    shown = [float(text) for text in numbers.all_inner_texts()]
    np.testing.assert_allclose(np.sqrt(shown), np.sqrt(exact[: query + 1]), atol=CODE_STEP + 5e-4)
    with page.expect_download() as download:
        card.get_by_role("button", name="NPY").click()
    saved = np.load(pathlib.Path(download.value.path()))
    np.testing.assert_array_equal(saved[query, : query + 1], exact[: query + 1].astype(np.float32))


def check_candidates(screen: Screen, position: int, token: int | None = None) -> None:
    """Probabilities of what could follow are the softmax of the hub's logits. `token`: the one to select first."""
    if token is not None:
        screen.page.get_by_test_id("tokens").get_by_role("button").nth(token).click()
    screen.page.locator("body").press("3")
    table = screen.page.get_by_test_id("candidates")
    row = table.locator("tbody tr").first
    logits = screen.values("logits", position=position).ravel()
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    best = int(logits.argmax())
    pw.expect(row.get_by_role("rowheader")).to_have_attribute("title", f"token {best}")
    percent, logit = row.locator("td.number").all_inner_texts()
    assert float(percent.split()[0]) / 100 == pytest.approx(probabilities[best], rel=0.01)
    assert float(logit) == pytest.approx(logits[best], abs=0.006)
    assert math.isclose(probabilities.sum(), 1)


def test_a_recipe_is_built_compared_and_swept_in_the_lab(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    screen.fill("hello world", 4)
    page.get_by_role("radio", name="Perturbation").check(force=True)
    page.get_by_role("radio", name="MLP 2", exact=True).check(force=True)
    page.get_by_label("What is done").select_option("Set to zero")
    page.get_by_role("button", name="Add to the recipe").click()
    pw.expect(page.get_by_test_id("changes")).to_contain_text("mlp2 layer 0: zero")
    page.get_by_label("B reads").select_option("its own tokens")
    page.get_by_role("button", name="Compare with the model as it is").click()
    pw.expect(page.get_by_role("button", name=re.compile(", free, "))).to_be_visible()
    page.get_by_label("B reads").select_option("A's tokens")
    page.get_by_role("button", name="Compare with the model as it is").click()
    ended = page.get_by_role("button", name=re.compile(", teacher-forced, done"))
    pw.expect(ended).to_have_attribute("aria-pressed", "true")  # it is shown, not the one before
    pw.expect(page.get_by_test_id("comparison-state")).to_contain_text("done: 4 of at most 4 tokens")
    summary, _ = branches(job, "comparisons")
    numbers = branches(job, f"comparisons/{summary['comparison']}")
    rows = page.get_by_test_id("compared-tokens").locator("tbody tr")
    pw.expect(rows).to_have_count(4)
    shown = [float(text) for text in rows.locator("td:nth-child(4)").all_inner_texts()]
    np.testing.assert_allclose(shown, [row["kl"] for row in numbers["rows"]], rtol=1e-3)
    pw.expect(page.get_by_text(f"digest {summary['perturbation']['digest']}", exact=True)).to_be_visible()
    pw.expect(page.get_by_test_id("drift")).to_be_visible()
    pw.expect(page.get_by_test_id("head-changes")).to_be_visible()
    page.get_by_label("What is done").select_option(index=0)
    page.get_by_role("button", name="Add to the recipe").click()
    page.get_by_role("textbox", name="Strengths").fill("0, 1")
    page.get_by_role("button", name="Sweep all layers").click()
    pw.expect(page.get_by_test_id("sweep-state")).to_contain_text("done: 4 of 4 cells")
    (sweep,) = branches(job, "sweeps")
    values = branches(job, f"sweeps/{sweep['sweep']}")["values"]
    assert [row[0] for row in values] == [0, 0]
    panel = page.get_by_role("region", name="Mean KL, nats by layer and strength", exact=True)
    panel.get_by_role("button", name="Table").click()
    pw.expect(page.get_by_role("region", name="Mean KL, nats by layer and strength as a table")).to_be_visible()
    sweep_positions(page, job)
    check_phone(page)
    screen.start(page.get_by_role("button", name="Run perturbed"))
    screen.until("Done: 4 new tokens")
    pw.expect(page.get_by_test_id("perturbation")).to_contain_text("Perturbed: ")
    page.get_by_role("radio", name="Perturbation").check(force=True)  # the recipe is there, and the newest results
    pw.expect(page.get_by_test_id("changes")).to_contain_text("mlp2 layer 0: zero")
    pw.expect(page.get_by_test_id("comparison-state")).to_contain_text("done: 4 of at most 4 tokens")
    pw.expect(page.get_by_test_id("sweep-state")).to_contain_text("done: 4 of 4 cells")


def sweep_positions(page: pw.Page, job: Served) -> None:
    """Patch from another prompt, layer by layer and position by position."""
    page.get_by_label("What is done").select_option("Patch from another prompt")
    add = page.get_by_role("button", name="Add to the recipe")
    pw.expect(add).to_be_disabled()
    page.get_by_label("Other prompt").fill("world hello hello")
    add.click()
    pw.expect(page.get_by_test_id("changes")).to_contain_text("mlp2 layer 0: patch from “world hello hello”")
    page.get_by_label("Positions of the prompt").fill("0-1")
    page.get_by_role("button", name="Sweep all layers").click()
    shown = page.get_by_role("region", name="Mean KL, nats by layer and position", exact=True)
    pw.expect(shown).to_be_visible()
    pw.expect(page.get_by_test_id("sweep-state")).to_contain_text("done: 4 of 4 cells")
    found = branches(job, f"sweeps/{branches(job, 'sweeps')[0]['sweep']}")
    assert (found["positions"], found["template"]["action"]["type"]) == ([0, 1], "patch")
    assert found["values"][0][0] > 0
    page.get_by_role("button", name="Remove change 3").click()


def branches(job: Served, path: str) -> Any:
    """Return what the hub reports of comparisons or sweeps."""
    with job.hub() as hub:
        return hub.get(f"scope/{path}").raise_for_status().json()


def check_phone(page: pw.Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    wait_for("elements within the window", lambda: page.evaluate(TOO_WIDE) == [])
    assert violations(page, RULES) == []
    page.set_viewport_size({"width": 1440, "height": 900})


def test_tokens_of_a_prompt_have_surprise_and_candidates(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    screen.submit("hello world", 2)
    screen.until("Done: 2 new tokens")
    length = len(screen.header()["prompts"][0]["ids"])
    scored = page.get_by_test_id("tokens").get_by_role("button", name=re.compile("surprisal"))
    pw.expect(scored).to_have_count(length - 1 + 2)
    check_candidates(screen, 0, token=1)


@pytest.mark.full("heads are pinned during a run below; the hub's tests pin them before one")
def test_heads_pinned_before_a_run_have_rows_from_its_first_token(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    screen.fill("hello", 2)
    assert screen.generate("Done: 2 new tokens")["capture"]["pinned"] == []
    page.locator("body").press("2")
    page.get_by_role("button", name="Pin", exact=True).click()
    pw.expect(page.get_by_role("button", name="Pinned", exact=True)).to_be_visible()
    with screen.sees(lambda frame: frame.type == FrameType.SCOPE_ROWS) as rows:
        found = screen.generate("Done: 2 new tokens")
    places = frames.decode(rows.value).header["rows"]
    assert {(layer, head) for _, layer, head, _ in places} == {(0, 0)}
    assert found["capture"]["pinned"] == [{"layer": 0, "head": 0}]
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("body").press("1")
    check_strips_are_level(page)


def check_strips_are_level(page: pw.Page) -> None:
    """Query, key and value begin at the same height, also where their titles have little room."""
    for name in "qkv":
        pw.expect(page.get_by_test_id(f"strip-{name}")).to_be_visible()
    wait_for("strips at the same height", lambda: page.evaluate(TOPS) == 1)


@pytest.mark.full("a long run; the change of a capture is tested on the ranks")
def test_the_capture_changes_during_a_run_until_it_is_stopped(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    page.locator("body").press("2")
    with slowed(job.rank(1)):
        screen.submit("hello", LONG)
        screen.until("Generating")
        pin = page.get_by_role("button", name="Pin", exact=True)
        with screen.sees(lambda frame: frame.type == FrameType.SCOPE_ROWS) as rows:
            pin.click()
        places = frames.decode(rows.value).header["rows"]
        assert {(layer, head) for _, layer, head, _ in places} == {(0, 0)}
        assert screen.header()["capture"]["pinned"] == [{"layer": 0, "head": 0}]
        with screen.sees(lambda frame: frame.type == FrameType.SCOPE_STEP and "mlp1" not in names(frame)):
            page.locator("summary", has_text="Capture").click()
            page.get_by_label("MLP 1").uncheck()
        page.get_by_role("button", name="Stop").click()
        screen.until("Stopped")
    found = screen.header()
    assert found["state"] == "cancelled"
    assert 0 < len(found["generated"][0]) < LONG


@contextlib.contextmanager
def slowed(process: int) -> Iterator[None]:
    """Stop a rank nine tenths of the time: a long run outlasts what a page on a busy machine does meanwhile."""
    ended = threading.Event()

    def alternate() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(0.01):
                os.kill(process, signal.SIGSTOP)
                ended.wait(0.09)
                os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def names(frame: Frame) -> set[str]:
    return {tensor["n"] for tensor in frame.header["tensors"]}


def test_a_wrong_expression_is_marked_at_its_column(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    page.locator("summary", has_text="Capture").click()
    field = page.get_by_label("A pixel of Q, K, V")
    field.fill("data.meen(dim=-1)")
    screen.fill("hello", 4)
    with page.expect_response(lambda answer: answer.request.method == "POST" and answer.status == 422):
        screen.go.click()
    pw.expect(field).to_have_attribute("aria-invalid", "true")
    pw.expect(page.get_by_text("column 6: 'meen' is not known; did you mean mean?")).to_be_visible()
    assert page.locator("pre.caret").text_content() == " " * 5 + "^"
    field.fill("data.abs().mean()")
    assert screen.generate("Done: 4 new tokens")["capture"]["expression"]["qkv"] == "data.abs().mean()"


def test_a_viewer_reads_and_cannot_generate(page: pw.Page, job: Served) -> None:
    with job.hub() as hub:
        request = {"prompts": ["hello"], "tokens": 4, "sampling": {"temperature": 0}}
        hub.post("scope/runs", json=request).raise_for_status()
    screen = Screen(page, job, TokenRole.VIEWER)
    screen.until("Done: 4 new tokens")
    pw.expect(page.get_by_test_id("why-not")).to_contain_text("controller role")
    pw.expect(screen.go).to_be_disabled()
    assert page.evaluate(POST, {"prompts": ["hello"], "tokens": 1}) == 403
    page.get_by_title("The page of the job").click()
    pw.expect(page.get_by_test_id("latencies")).to_be_visible()
    pw.expect(page.get_by_test_id("served-ranks").get_by_role("row")).to_have_count(3)  # the head and two ranks
    page.go_back()
    pw.expect(screen.go).to_be_visible()


@pytest.mark.full("a plugin on the ranks; their tests and those of the panel have it")
def test_sites_of_the_example_are_on_the_page_with_their_numbers(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    screen.submit("hello", 2)
    screen.until("Done: 2 new tokens")
    page.get_by_test_id("tokens").get_by_role("button").nth(1).click()
    card = page.get_by_role("region", name="Sites of plugins")
    card.get_by_label("Files of").select_option("activations")
    saved = activations(page, card)
    np.testing.assert_allclose(saved, screen.values("activations", layer=0, position=1).ravel(), rtol=1e-6)
    check_pixels(card, saved)


def activations(page: pw.Page, card: pw.Locator) -> np.ndarray:
    """The exact numbers of the first layer, as the page saves them."""
    with page.expect_download() as download:
        card.get_by_role("button", name="NPY").click()
    found: np.ndarray = np.load(pathlib.Path(download.value.path())).ravel()
    assert found.shape == (WIDTH,)
    return found


def check_pixels(card: pw.Locator, exact: np.ndarray) -> None:
    """Pixels of the first layer, as the table shows them: the largest sizes of pieces of the exact vector."""
    card.get_by_role("button", name="Table", exact=True).click()
    pw.expect(card.get_by_role("columnheader")).to_have_text(["Number", "activations", "input_norm"])
    column = card.get_by_role("table").locator("tbody tr td:nth-child(2)")
    pw.expect(column.nth(PIXELS - 1)).to_contain_text(f"(layer 0, pixel {PIXELS - 1})")
    cells = column.all_inner_texts()[:PIXELS]
    shown = [float(text.split()[0]) for text in cells]
    np.testing.assert_allclose(shown, np.abs(exact).reshape(PIXELS, -1).max(axis=1), rtol=6e-3)
    assert cells[-1].endswith(f"(layer 0, pixel {PIXELS - 1})")


@pytest.mark.full("a gang that restarts; its restart and what a page shows of a failed run are tested by themselves")
def test_a_killed_rank_is_reported_and_the_page_works_again(page: pw.Page, job: Served) -> None:
    screen = Screen(page, job)
    process = job.rank(1)
    with slowed(process):
        screen.submit("hello", LONG)
        screen.until("Generating")
        os.kill(process, signal.SIGKILL)
    pw.expect(page.get_by_test_id("why-not")).to_contain_text("The ranks restart")
    screen.until("Failed")
    pw.expect(screen.go).to_be_disabled()
    pw.expect(screen.go).to_be_enabled(timeout=2 * PATIENCE_MS)
    screen.submit("hello", 4)
    screen.until("Done: 4 new tokens")
    pw.expect(page.get_by_test_id("tokens").get_by_role("button", name=re.compile("surprisal"))).to_have_count(4)
    page.get_by_title("The page of the job").click()
    restarts = job.status()["attempt"]
    assert restarts > 0
    pw.expect(page.locator("[data-fact=Restarts]")).to_have_text(str(restarts))
