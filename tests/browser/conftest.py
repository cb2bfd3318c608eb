"""A real hub with real agents over real ring files, and a real Chromium; the simulator plays the trainer."""

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import threading
import types
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import playwright.sync_api as pw
import pytest
from canvases import PATIENCE_S, wait_for
from ports import reserved_ports

import megatronapp_native
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.names import Env
from megatronapp_common.shared_documents import DocumentWriter
from megatronapp_common.trace import DURATION_UNIT_NS, NO_MICROBATCH, Metric, RecordKind
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

ROOT = pathlib.Path(__file__).parents[2]
DIST = ROOT / "frontend" / "dist"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DEADLINE_S = 120.0
REST_S = 0.5
"""Pause of a feed after each step: hub and page take processor time for each, and hardly a test needs many."""
VERDICT_REST_S = 1.0
PATIENCE_MS = int(PATIENCE_S * 1000)
"""Deadline of each expectation and action: a busy machine is no failure."""
WINDOW: pw.ViewportSize = {"width": 1440, "height": 900}
FIELDS = ("step", "ordinal", "aux", "comm", "microbatch", "kind", "chunk", "layer", "flags")
JOB = """\
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: tiny-gpt, uid: 7d1c}
spec: {nodes: 2, procPerNode: 2, trace: {enabled: true}}
"""


pw.expect.set_options(timeout=PATIENCE_MS)

TEST_S = 1200
"""Deadline of a test with its fixtures, in which several expectations may take long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_S))


def load_simulator() -> types.ModuleType:
    """The pipeline simulator of the benchmarks, which is no package."""
    spec = importlib.util.spec_from_file_location("pipeline_simulator", ROOT / "bench" / "pipeline_simulator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class Feed:
    """Substitute for the trainer: it writes simulated steps of 2 workers x 2 ranks (PP2 x DP2) into real rings, in real
    time."""

    shm: pathlib.Path
    faults: tuple[dict[str, Any], ...] = ()
    total: int = 4000
    step: int = 0
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        self._simulator = load_simulator()
        self.layout = JobLayout.grid(pp=2, dp=2, ranks_per_worker=2)
        faults = tuple(self._simulator.Fault(**fault) for fault in self.faults)
        noise = self._simulator.Noise(
            body=0.06, rank_step=0.04, queue_fraction=0.4, queue_s=6e-4, delivery_s=2e-4, gap_s=1e-4
        )
        job = self._simulator.Job(layout=self.layout, forward_s=4e-3, noise=noise, faults=faults)
        self._run = self._simulator.Simulator(job, seed=3)
        self._stop = threading.Event()
        self.prefixes = [f"feed{os.getpid()}-{worker}" for worker in range(2)]
        self._writers = [self._writer(rank) for rank in range(self.layout.world)]
        self._progress = DocumentWriter(self.shm / f"{self.prefixes[1]}.progress")
        self._thread = threading.Thread(target=self._play, daemon=True)

    def start(self) -> None:
        """Continue from now on; it may have begun already."""
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for writer in self._writers:
            writer.close(True)
        self._progress.close(unlink=True)

    def _writer(self, rank: int) -> megatronapp_native.RingWriter:
        place, worker = self.layout.coordinates[rank], self.layout.workers[rank]
        comms = self._run.comms[rank]
        metadata = {
            "rank": rank,
            "localRank": rank % 2,
            "worker": worker,
            "node": self.layout.nodes[rank],
            "address": f"127.0.0.{2 + worker}",
            "pid": os.getpid(),
            "world": self.layout.world,
            "layout": {"tensor": 1, "pipeline": 2, "virtualPipeline": 1, "data": 2, "context": 1, "expert": 1},
            "coordinates": dataclasses.asdict(place),
            "comms": [{"slot": slot, "kind": comm.kind, "members": list(comm.members)} for slot, comm in comms.items()],
            "device": "cpu",
            "totalIterations": self.total,
            "numMicrobatches": 4,
        }
        path = self.shm / f"{self.prefixes[worker]}.rank{rank}.ring"
        writer = megatronapp_native.RingWriter(str(path), 65536, 0, json.dumps(metadata).encode())
        writer.clock_pair()
        return writer

    def _play(self) -> None:
        while not self._stop.is_set() and self.step < self.total:
            view = self._run.step(self.step)
            duration_s = (view.end_ns - view.start_ns) / 1e9
            shift = megatronapp_native.monotonic_ns() - view.start_ns
            self._stop.wait(duration_s + self.rest_s)
            for row in view.records:
                self._record(row, shift)
            self._sample(self.step, duration_s)
            self.step += 1

    def _record(self, row: Any, shift: int) -> None:
        step, ordinal, aux, comm, microbatch, kind, chunk, layer, flags = (int(row[name]) for name in FIELDS)
        start_ns, duration_ns = int(row["start_ns"]) + shift, int(row["duration"]) * DURATION_UNIT_NS
        self._writers[int(row["rank"])].record(
            start_ns, duration_ns, step, ordinal, aux, comm, microbatch, kind, chunk, layer, flags
        )

    def _sample(self, step: int, duration_s: float) -> None:
        loss = 2.2 + 6.0 / (1 + step / 18) + 0.05 * ((step * 7919) % 13 - 6) / 6
        bits = struct.unpack("<I", struct.pack("<f", loss))[0]
        now = megatronapp_native.monotonic_ns()
        self._writers[2].record(now, 0, step, 0, bits, int(Metric.LOSS), NO_MICROBATCH, int(RecordKind.METRIC), 0, 0, 0)
        tokens = 4 * 2 * 256 / duration_s
        self._progress.write(
            {
                "attempt": 0,
                "iteration": step + 1,
                "totalIterations": self.total,
                "loss": loss,
                "learningRate": 1e-3,
                "gradNorm": 1.0,
                "tokensPerSecond": tokens,
                "tflopsPerGpu": None,
                "secondsLeft": (self.total - step - 1) * duration_s,
                "consumedSamples": (step + 1) * 8,
                "validationLoss": None,
                "state": "training",
                "updatedAt": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            }
        )


@dataclasses.dataclass
class Stack:
    """A hub, its agents and the feed that they serve."""

    url: str
    token: str
    viewer_token: str
    feed: Feed
    hub: subprocess.Popen[bytes]
    start_hub: Callable[[int], subprocess.Popen[bytes]]

    @property
    def entry(self) -> str:
        """Address that a person opens, once."""
        return f"{self.url}/#code={self.call('codes', 'POST')['code']}"

    def call(self, path: str, method: str = "GET") -> Any:
        """Return what the hub answers to the owner of the job."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def kill_hub(self) -> None:
        self.hub.kill()
        self.hub.wait()

    def restart_hub(self) -> None:
        """The same hub on the same port."""
        self.hub = self.start_hub(int(self.url.rpartition(":")[2]))


def start(module: str, arguments: list[str], environment: dict[str, str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=os.environ | environment, stdout=output, stderr=output
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End all at once: agents drain for long after one signal, and end at once after a second one; no hub reads what
    they would send."""
    process.send_signal(signal.SIGCONT)
    for patience_s in (0.3, 10):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    process.kill()
    process.wait()


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        end(process)


def hub_url(log: pathlib.Path, process: subprocess.Popen[bytes]) -> Callable[[], str | None]:
    """Return the hub's address, read from its log."""

    def probe() -> str | None:
        text = log.read_text(encoding="utf-8")
        assert process.poll() is None, text
        found = re.search(r"listening on (http://\S+)\s", text)  # the whole line is there
        return found[1] if found else None

    return probe


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def running_stack(folder: pathlib.Path, feed: Feed) -> Iterator[Stack]:
    """Start everything, and stop all of it again."""
    secret, secret_file, job_file = new_secret(), folder / "secret", folder / "job.yaml"
    secret_file.write_text(secret)
    job_file.write_text(JOB)
    base: dict[str, str] = {
        Env.SECRET_FILE: str(secret_file),
        Env.JOB: "tiny-gpt",
        Env.JOB_UID: "7d1c",
        Env.SHM_DIR: str(feed.shm),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(feed.stop)
        log = folder / "hub.log"
        hubs: list[subprocess.Popen[bytes]] = []
        stack.callback(end_all, hubs)  # the last of all: agents wait for a hub that is away

        def start_hub(port: int) -> subprocess.Popen[bytes]:
            places = {"--job-file": job_file, "--state-dir": folder / "hub", "--frontend": DIST}
            flags = ["--port", str(port), *(str(part) for pair in places.items() for part in pair)]
            process = start("megatronapp_analyzer.hub", flags, base, log)
            hubs.append(process)
            address = wait_for("the hub's address", hub_url(log, process))
            wait_for("the hub to answer", lambda: answers(f"{address}/healthz"))
            return process

        (port,) = stack.enter_context(reserved_ports(1))  # no other process takes it between two hubs
        hub = start_hub(port)
        url = wait_for("the hub's address", hub_url(log, hub))
        for worker, prefix in enumerate(feed.prefixes):
            own: dict[str, str] = {Env.ATTEMPT: "0", Env.WORKER_INDEX: str(worker), Env.NODE_NAME: f"node-{worker}"}
            agent_environment = base | own | {Env.SHM_PREFIX: prefix, Env.HUB_URL: url}
            agent = start("megatronapp_analyzer.agent", [], agent_environment, folder / f"agent-{worker}.log")
            stack.callback(end, agent)
        token, viewer_token = (derive_token(secret, role) for role in (TokenRole.CONTROLLER, TokenRole.VIEWER))
        yield Stack(url=url, token=token, viewer_token=viewer_token, feed=feed, hub=hub, start_hub=start_hub)


@pytest.fixture(scope="module")
def chromium() -> Iterator[pw.Browser]:
    """One browser for a module, closed before tests of other modules start event loops of their own."""
    assert (DIST / "index.html").exists(), "the page is not built; run `make setup`"
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def slow_rank_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A job whose rank 2 computes three times as long from step 25 on, once a verdict names it.

    From then on it is slower, so that each page keeps up with it.
    """
    folder = tmp_path_factory.mktemp("slow")
    feed = Feed(shm=folder, faults=({"rank": 2, "kind": "compute", "factor": 3.0, "from_step": 25},))
    with running_stack(folder, feed) as stack:
        feed.start()
        wait_for("a verdict", lambda: any(found["state"] == "confirmed" for found in stack.call("verdicts")))
        feed.rest_s = VERDICT_REST_S
        yield stack


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A healthy job for tests that leave its agents alone; no step has ended until one calls feed.start()."""
    folder = tmp_path_factory.mktemp("shared")
    with running_stack(folder, Feed(shm=folder, rest_s=REST_S)) as stack:
        yield stack


@pytest.fixture
def healthy_stack(tmp_path: pathlib.Path) -> Iterator[Stack]:
    """Start a healthy job; its ranks are up and no step has ended until feed.start()."""
    with running_stack(tmp_path, Feed(shm=tmp_path, rest_s=REST_S)) as stack:
        yield stack


@dataclasses.dataclass
class SharedPage:
    """A page for the tests of a module: a new renderer costs three times the processor time of a test's page."""

    browser: pw.Browser
    page: pw.Page | None = None

    def get(self) -> pw.Page:
        """Return the page, or a new one if its context was closed."""
        if self.page is None or self.page.is_closed():
            context = self.browser.new_context(viewport=WINDOW, color_scheme="dark", reduced_motion="reduce")
            context.set_default_timeout(PATIENCE_MS)
            self.page = context.new_page()
        return self.page


@pytest.fixture(scope="module")
def shared_page(chromium: pw.Browser) -> SharedPage:
    """Keep a page with its context; both close with the browser."""
    return SharedPage(chromium)


def reset(page: pw.Page) -> None:
    """Undo what a test changed, but routes of sockets and listeners, which stay until a page is closed."""
    page.unroute_all()
    page.keyboard.up("Control")
    page.mouse.move(0, 0)
    page.set_viewport_size(WINDOW)
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.context.clear_cookies()
    page.context.set_extra_http_headers({})
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "local_storage"})  # of tabs, too
    session.detach()


@contextlib.contextmanager
def checked(page: pw.Page) -> Iterator[pw.Page]:
    """Fail for errors that the page reports. Reset it afterwards; close its context if that fails."""
    problems: list[str] = []

    def keep(error: pw.Error) -> None:
        problems.append(str(error))

    page.on("pageerror", keep)
    try:
        yield page
    finally:
        try:
            page.goto("about:blank")  # receives the errors since the last call
            page.remove_listener("pageerror", keep)
            reset(page)
        except pw.Error:
            page.context.close()
    assert problems == []


@pytest.fixture
def page(shared_page: SharedPage) -> Iterator[pw.Page]:
    """Show an empty page."""
    with checked(shared_page.get()) as shown:
        yield shown


@pytest.fixture
def own_page(shared_page: SharedPage) -> Iterator[pw.Page]:
    """A page for tests that add listeners or act as the other end of its sockets, which stays until it is closed."""
    with shared_page.get().context.new_page() as own, checked(own) as shown:
        yield shown
