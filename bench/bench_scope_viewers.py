"""Pages that are slow, that stop reading, and a hub that is killed: what the model and a real page notice of it.

    python bench/bench_scope_viewers.py

`megatronapp serve` generates for eight prompts at once with the default capture, so that a page gets more than it could
take at 1 MB/s. Blocks of one run each take turns: no page, a page that reads, one at 1 MB/s, one that stops
reading after its greeting; each block's tokens per second, as rank 0 counts them, are compared with those of the
same round without a page. Then the hub is killed (kill -9) in the middle of a run, several times, while MegaScope is
open in Chromium: from the hub's answer on /healthz to the first new token on the page, and what the page says that it
missed. About ten minutes on two cores, otherwise idle. Exit code 1 if a goal is missed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import playwright.sync_api as pw
from scope_job import Page, Size, host, prompt_of, serving
from served_job import Served
from websockets.exceptions import ConnectionClosed

from megatronapp_common.web.tokens import TokenRole

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SLOW_BYTES_PER_S = 1_000_000
FRACTION_GOAL = 0.98
"""Least share of tokens per second that is left, as the median of rounds."""
BACK_GOAL_S = 2.0
PAUSE_S = 0.05
CHANGED = """old => new Promise((resolve, reject) => {
  const text = () => document.querySelector("[data-testid=token-place]")?.textContent.trim() ?? "";
  const late = setTimeout(() => reject(new Error(`no token came after ${old}`)), 60000);
  const look = () => { if (text() !== "" && text() !== old) { clearTimeout(late); resolve(); }
    else requestAnimationFrame(look); };
  look();
})"""


@contextlib.contextmanager
def reading(page: Page, bytes_per_s: float | None) -> Iterator[None]:
    """Read in a thread, at most at this rate; None: as fast as possible."""
    ended = threading.Event()

    def read() -> None:
        budget, last = 0.0, time.monotonic()
        while not ended.is_set():
            try:
                message = page.socket.recv(timeout=PAUSE_S)
                page.socket.send(json.dumps({"type": "credit", "bytes": len(message)}))
            except TimeoutError:
                continue
            except ConnectionClosed:  # the hub may end the connection of a page that is too slow
                return
            if bytes_per_s is not None:
                budget += len(message) / bytes_per_s
                ahead = budget - (time.monotonic() - last)
                ended.wait(max(0.0, ahead))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


@contextlib.contextmanager
def no_page(_hub: httpx.Client) -> Iterator[None]:
    yield


@contextlib.contextmanager
def reading_page(hub: httpx.Client, bytes_per_s: float | None) -> Iterator[None]:
    page = Page(hub)
    with reading(page, bytes_per_s):
        yield
    page.close()


@contextlib.contextmanager
def stopped(hub: httpx.Client) -> Iterator[None]:
    """A page that lives and does not read: its socket's buffers fill up."""
    page = Page(hub, queue=1)
    yield
    page.socket.socket.close()


LOOKERS: dict[str, Callable[[httpx.Client], contextlib.AbstractContextManager[None]]] = {
    "nobody": no_page,
    "reads": lambda hub: reading_page(hub, None),
    "slow": lambda hub: reading_page(hub, SLOW_BYTES_PER_S),
    "stopped": stopped,
}


def request_of(text: str, prompts: int, tokens: int) -> dict[str, Any]:
    """A run that no end of text ends first."""
    return {"prompts": [text] * prompts, "tokens": tokens, "sampling": {"temperature": 0}}


def block(job: Served, kind: str, request: dict[str, Any]) -> float:
    """Return the tokens per second of one run, as rank 0 reports them."""
    with job.hub() as hub, LOOKERS[kind](hub):
        page = Page(hub, deaf=True)
        header = page.wait_for_end(page.start_run(request))
    if header["state"] != "done" or not header["tokensPerSecond"]:
        raise RuntimeError(f"the run ended as {header['state']}: {header['error']}")
    return float(header["tokensPerSecond"])


def compared(job: Served, request: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Return tokens per second as fractions of those of the same round's block without a page."""
    block(job, "nobody", request)
    speeds: dict[str, list[float]] = {kind: [] for kind in LOOKERS}
    for index in range(rounds):
        kinds = list(LOOKERS)
        for kind in kinds[index % len(kinds) :] + kinds[: index % len(kinds)]:
            speeds[kind].append(block(job, kind, request))
    out = []
    for kind in list(LOOKERS)[1:]:
        fractions = sorted(speed / none for speed, none in zip(speeds[kind], speeds["nobody"], strict=True))
        summary = {
            "share_median": statistics.median(fractions),
            "share_least": fractions[0],
            "share_most": fractions[-1],
        }
        speed = {"tokens_per_second": statistics.median(speeds[kind]), "rounds": rounds}
        out.append({"looks": kind, **{name: round(value, 3) for name, value in summary.items()}, **speed})
    return out


def hub_process(job: Served) -> int:
    """Process id of the job's hub. Raises LookupError."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = path.joinpath("cmdline").read_bytes().split(b"\0")
            place = os.fsencode(job.environment["XDG_STATE_HOME"])
            if b"megatronapp_analyzer.hub" in command and any(argument.startswith(place) for argument in command):
                return int(path.name)
    raise LookupError("the job has no hub")


def answers(url: str) -> bool:
    """Return true if the hub answers."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/healthz", timeout=1, trust_env=False).is_success
    return False


def killed(job: Served, page: pw.Page, request: dict[str, Any]) -> dict[str, Any]:
    """Kill the hub in the middle of a run; how long the page needs, and what it says."""
    with job.hub() as hub:
        run = hub.post("scope/runs", json=request).raise_for_status().json()["run"]
        url = str(hub.base_url).removesuffix("/api/v1/")
    page.goto(urllib.parse.urljoin(page.url, f"/?page=scope&run={run}"))
    place = page.get_by_test_id("token-place")
    page.evaluate(CHANGED, "")
    page.wait_for_timeout(1000)
    page.keyboard.press("n")
    shown = place.inner_text()
    os.kill(hub_process(job), signal.SIGKILL)
    killed_at = time.monotonic()
    while answers(url):
        time.sleep(0.01)
    page.wait_for_timeout(200)
    shown = place.inner_text()
    while not answers(url):
        page.wait_for_timeout(10)
    up = time.monotonic()
    page.evaluate(CHANGED, shown.strip())
    back = time.monotonic() - up
    page.wait_for_timeout(500)
    banner = page.get_by_test_id("back")
    banner_text = " ".join(banner.inner_text().split()) if banner.count() else ""
    with job.hub() as hub:
        state = hub.get(f"scope/runs/{run}").json().get("state")
        hub.delete(f"scope/runs/{run}")
    return {"hub_away_s": round(up - killed_at, 2), "page_back_s": round(back, 2), "run": state, "said": banner_text}


def restarts(job: Served, request: dict[str, Any], times: int) -> Iterator[dict[str, Any]]:
    """Kills of the hub, seen by Chromium."""
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(job.entry(TokenRole.CONTROLLER))
        page.get_by_role("button", name="Generate").wait_for()
        for _ in range(times):
            yield killed(job, page, request)
        browser.close()


def main() -> int:
    """Print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a block and prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="0: only kills (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    size = Size(layers=given.layers, heads=given.heads, head_width=8, positions=1024)
    print(json.dumps({"machine": host()}), flush=True)
    with tempfile.TemporaryDirectory() as name, serving(pathlib.Path(name), size) as job:
        text = prompt_of(pathlib.Path(name), 64)
        request = request_of(text, given.prompts, given.new)
        comparisons = compared(job, request, given.rounds) if given.rounds else []
        for comparison in comparisons:
            print(json.dumps(comparison | {"goal": FRACTION_GOAL}), flush=True)
        kills = []
        for found in restarts(job, request_of(text, 1, 512), given.kills):
            kills.append(found)
            print(json.dumps(found | {"goal_s": BACK_GOAL_S}), flush=True)
    slow = any(comparison["share_median"] < FRACTION_GOAL for comparison in comparisons)
    late = any(kill["page_back_s"] > BACK_GOAL_S or not kill["said"] for kill in kills)
    return int(slow or late)


if __name__ == "__main__":
    raise SystemExit(main())
