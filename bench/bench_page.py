"""Cost of a job's page in Chromium at 10,000 ranks and a million spans a step: script of a frame, and time to each map.

    python bench/bench_page.py
    python bench/bench_page.py --hub      # only what the hub answers, without Chromium

A hub process with its detector gets the records of a job of PP 8 x DP 1,250 through the sockets of 40 agents, and
Chromium shows its page. While the timeline is panned, zoomed and scrolled over lanes, the script time of each frame is
from the browser's own trace: only frames in which the timeline was drawn count. About five minutes, most
of them until the hub has replayed the steps. Exit code 1 if a goal is missed.
"""

import argparse
import asyncio
import bisect
import contextlib
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import bench_hub
import httpx
import numpy as np
import playwright.async_api as pw
import websockets.asyncio.client
from bench_scope_page import CATEGORIES, CHROMIUM, FLAGS, SCRIPTS, outermost
from numpy.typing import NDArray
from scope_job import host

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

ROOT = pathlib.Path(__file__).resolve().parent.parent
PIPELINE, MICROBATCHES = 8, 10
RANKS_PER_WORKER = 250
WORKERS_AT_ONCE = 4
"""Agents that send at a time: on a busy node the hub would wait too long for the first frame of more of them."""
STEP_NS = 100_000_000
MEDIAN_GOAL_MS, P95_GOAL_MS, MAP_GOAL_S = 8.0, 16.0, 2.0
WATCH = """
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...given) {
  if (this.canvas.dataset?.testid === "timeline") performance.mark("drew");
  return clear.apply(this, given);
};
"""
EACH_FRAME = """([what, frames]) => new Promise((resolve) => {
  const canvas = document.querySelector("[data-testid=timeline]");
  const scroller = canvas.closest(".scrolls");
  const box = canvas.getBoundingClientRect();
  const wheel = (init) => canvas.dispatchEvent(new WheelEvent("wheel", {
    bubbles: true, cancelable: true, clientX: box.left + box.width / 2, clientY: box.top + 200, ...init }));
  const inputs = {
    pan: (at) => wheel({ deltaX: (at % 120 < 60 ? 1 : -1) * 40 }),
    zoom: (at) => wheel({ deltaY: (at % 80 < 40 ? -1 : 1) * 40, ctrlKey: true }),
    scroll: (at) => { scroller.scrollTop += (at % 400 < 300 ? 1 : -1) * 60; },
  };
  let at = 0;
  const step = () => {
    if (at === frames) return resolve();
    inputs[what](at++);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""
SHOWN = """(label) => {
  const canvas = [...document.querySelectorAll("canvas")].find(
    (shown) => shown.ariaLabel?.includes(label) || (label.startsWith("[") && shown.matches(label)));
  if (!canvas || canvas.width < 2 || canvas.height < 2) return false;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, Math.min(canvas.height, 200));
  return new Set(new Uint32Array(data.buffer)).size > 2;
}"""
ANSWERS = (
    "job",
    "heatmap",
    "timeline?pixels=1440&tracks=140",
    "timeline?pixels=2000&firstTrack=4000&tracks=186",
    "slowdowns",
    "blame",
)
MAPS = {
    "map of ranks": "ranks by stage",
    "timeline": "[data-testid=timeline]",
    "steps by ranks": "ranks by steps",
    "map of slowdowns": "Slowdown of stages by data-parallel ranks",
    "blamed step": "[data-testid=blamed-timeline]",
}


def header_of(rank: int, load: bench_hub.Load) -> dict[str, Any]:
    """Return the RING header of a rank of a large worker."""
    header = bench_hub.ring_header(rank, load)
    worker = rank // RANKS_PER_WORKER
    header["worker"] = worker
    header["metadata"] |= {"worker": worker, "node": f"node-{worker}", "localRank": rank % RANKS_PER_WORKER}
    return header


class Worker:
    """Agent of one worker, whose ranks of a stage send the same records but for noise."""

    def __init__(self, number: int, load: bench_hub.Load, templates: list[NDArray[np.void]]) -> None:
        self.number = number
        self._load = load
        self._templates = templates
        self._ranks = range(number * RANKS_PER_WORKER, (number + 1) * RANKS_PER_WORKER)
        self._random = np.random.default_rng(number)

    async def run(self, url: str, token: str, steps: int, begun_ns: int, places: asyncio.Semaphore) -> None:
        """Send rings and steps, once there is a place."""
        async with (
            places,
            websockets.asyncio.client.connect(
                url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None, compression=None
            ) as socket,
        ):
            names = {"job": "bench", "uid": "bench", "attempt": 0, "node": f"node-{self.number}", "protocol": 1}
            await socket.send(frames.encode(Frame(FrameType.HELLO, names | {"worker": self.number})))
            await socket.recv()
            for rank in self._ranks:
                await socket.send(frames.encode(Frame(FrameType.RING, header_of(rank, self._load))))
            for step in range(steps):
                for rank in self._ranks:
                    await socket.send(frames.encode(self._frame(rank, step, begun_ns)))
            now_ns = time.monotonic_ns()
            ring = {"heartbeatNs": now_ns, "nowNs": now_ns, "openSpan": None, "lost": 0, "closed": False, "alive": True}
            rings = [ring | {"rank": rank} for rank in self._ranks]
            status = {"rings": rings, "progress": None, "buffered": 0, "dropped": 0}
            await socket.send(frames.encode(Frame(FrameType.STATUS, status)))
            await socket.send(frames.encode(Frame(FrameType.BYE, {"reason": "done"})))

    def _frame(self, rank: int, step: int, begun_ns: int) -> Frame:
        records = self._templates[rank // self._load.data].copy()
        records["step"] = step
        records["start_ns"] += np.uint64(begun_ns + step * STEP_NS)
        passes = records["duration"] > bench_hub.PASS_NS // 16
        slow = 1.3 if rank == 4321 else 1.0
        noise = self._random.normal(slow, 0.01, int(passes.sum())).clip(0.9, 1.4)
        records["duration"][passes] = (records["duration"][passes] * noise).astype(np.uint32)
        header = {"rank": rank, "worker": self.number, "first": step * len(records), "lost": 0}
        return Frame(FrameType.RECORDS, header, records.tobytes())


async def answer_s(client: httpx.AsyncClient, path: str) -> float:
    """Seconds until the hub answers."""
    begun_s = time.monotonic()
    (await client.get(f"/api/v1/{path}")).raise_for_status()
    return round(time.monotonic() - begun_s, 2)


@contextlib.asynccontextmanager
async def job(folder: pathlib.Path, given: argparse.Namespace) -> AsyncIterator[tuple[str, str, dict[str, Any]]]:
    """A hub with the steps of the job: its address, a token for users, and its size with the times of its answers."""
    bench_hub.PIPELINE, bench_hub.MICROBATCHES = PIPELINE, MICROBATCHES
    load = bench_hub.Load(agents=given.ranks, steps_per_s=1, seconds=0)
    templates = [bench_hub.template(stage * load.data, load) for stage in range(PIPELINE)]
    secret = new_secret()
    workers = [Worker(number, load, templates) for number in range(given.ranks // RANKS_PER_WORKER)]
    async with bench_hub.hub_process(folder, secret, 2000, ROOT / "frontend" / "dist") as (_, url):
        token = derive_token(secret, TokenRole.AGENT)
        begun_ns = time.monotonic_ns() - given.steps * STEP_NS
        socket_url = url.replace("http", "ws") + "/api/v1/agent"
        viewer = derive_token(secret, TokenRole.VIEWER)
        headers = {"Authorization": f"Bearer {viewer}"}
        places = asyncio.Semaphore(WORKERS_AT_ONCE)
        await asyncio.gather(*(worker.run(socket_url, token, given.steps, begun_ns, places) for worker in workers))
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as client:
            await bench_hub.wait_for_steps(client, given.steps)
            part = (await client.get("/api/v1/timeline?pixels=1&tracks=1")).json()
            waits = {path: await answer_s(client, path) for path in ANSWERS}
        yield url, viewer, {"spans": part["window"]["spans"], "seconds to an answer of the hub, the first time": waits}


def drawn_frames(trace: bytes) -> list[float]:
    """Milliseconds of script of each frame in which the timeline was drawn, from the end of the frame before."""
    events = [event for event in json.loads(trace)["traceEvents"] if "ts" in event]
    drew = sorted(event["ts"] for event in events if event["name"] == "drew")
    drawing = [event for event in events if event["name"] == "FireAnimationFrame" and event["ph"] == "X"]
    threads = [(event["pid"], event["tid"]) for event in drawing]
    main = max(set(threads), key=threads.count)
    ends = sorted(event["ts"] + event["dur"] for event in drawing if (event["pid"], event["tid"]) == main)
    # Several callbacks of one frame end one after the other: only a pause between them ends a frame.
    ends = [end for end, after in zip(ends, [*ends[1:], ends[-1] + 10_000], strict=True) if after - end > 4_000]
    wall = [0.0] * len(ends)
    inside = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == main]
    for script in outermost([event for event in inside if event["name"] in SCRIPTS]):
        frame = bisect.bisect_left(ends, script["ts"] + script.get("dur", 0))
        if frame < len(ends):
            wall[frame] += script.get("dur", 0) / 1000
    counted = {bisect.bisect_left(ends, at) for at in drew}
    return sorted(wall[frame] for frame in counted if frame < len(ends))


async def moved(browser: pw.Browser, page: pw.Page, what: str, count: int) -> dict[str, Any]:
    """Script times of frames while one input follows another."""
    await browser.start_tracing(page=page, categories=CATEGORIES)
    await page.evaluate(EACH_FRAME, [what, count])
    times = drawn_frames(await browser.stop_tracing())
    return {
        "what": f"script time of a frame: {what}",
        "inputs": count,
        "frames_drawn": len(times),
        "ms_median": round(statistics.median(times), 2),
        "ms_p95": round(times[int(0.95 * len(times))], 2),
        "ms_most": round(times[-1], 2),
        "goals_ms": [MEDIAN_GOAL_MS, P95_GOAL_MS],
    }


async def opened(page: pw.Page, address: str) -> dict[str, Any]:
    """Seconds from opening the page until each map is drawn."""
    begun_s = time.monotonic()
    await page.goto(address)
    waits: dict[str, Callable[[], Any]] = {
        name: lambda label=label: page.wait_for_function(SHOWN, arg=label, timeout=120_000)  # type: ignore[misc]
        for name, label in MAPS.items()
    }
    shown: dict[str, float] = {}

    async def wait(name: str) -> None:
        await waits[name]()
        shown[name] = round(time.monotonic() - begun_s, 2)

    await asyncio.gather(*(wait(name) for name in waits))
    return {"what": "seconds from opening the page until a map is drawn", **shown, "goal_s": MAP_GOAL_S}


async def hub_alone(given: argparse.Namespace) -> None:
    """Print the size of the job, and the times of the hub's answers."""
    with tempfile.TemporaryDirectory() as name:
        async with job(pathlib.Path(name), given) as (_, _, size):
            print(json.dumps({"ranks": given.ranks, "steps": given.steps} | size), flush=True)


async def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of a page."""
    with tempfile.TemporaryDirectory() as name:
        async with job(pathlib.Path(name), given) as (url, token, size), pw.async_playwright() as playwright:
            print(json.dumps({"ranks": given.ranks, "steps": given.steps} | size), flush=True)
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            context = await browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="dark")
            await context.set_extra_http_headers({"Authorization": f"Bearer {token}"})
            await context.add_init_script(WATCH)
            page = await context.new_page()
            found = [await opened(page, url), await opened(page, url)]
            found[0]["what"] += ", the first time"
            timeline = page.get_by_test_id("timeline")
            await timeline.scroll_into_view_if_needed()
            if given.pictures:
                await page.screenshot(path=given.pictures, full_page=True)
            await page.evaluate(EACH_FRAME, ["zoom", 20])
            found += [await moved(browser, page, what, given.frames) for what in ("pan", "zoom", "scroll")]
            await browser.close()
    return found


def main() -> int:
    """Print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=10_000, help="a multiple of 2,000 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="whole steps that the hub has (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=240, help="inputs of each kind (default: %(default)s)")
    parser.add_argument("--hub", action="store_true", help="only the answers of the hub, without a browser")
    parser.add_argument("--pictures", help="file for a screenshot of the page")
    given = parser.parse_args()
    print(json.dumps({"machine": host()}), flush=True)
    if given.hub:
        asyncio.run(hub_alone(given))
        return 0
    found = asyncio.run(measured(given))
    for figures in found:
        print(json.dumps(figures), flush=True)
    slow = [
        frame for frame in found if frame.get("ms_median", 0) > MEDIAN_GOAL_MS or frame.get("ms_p95", 0) > P95_GOAL_MS
    ]
    late = [name for name in MAPS if found[1][name] > MAP_GOAL_S]
    return int(bool(slow or late))


if __name__ == "__main__":
    raise SystemExit(main())
