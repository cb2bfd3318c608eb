import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import scope_rank_zero
import uvicorn
import websocket_clients
import websockets.asyncio.client
from numpy.typing import NDArray
from prompt_server import PromptServer
from scope_pages import recording
from shared_tls import SHARED_TLS

from megatronapp_analyzer.align.clocks import AlignedStep
from megatronapp_analyzer.hub.archive import spooled_ingest
from megatronapp_analyzer.hub.http.app import create_app
from megatronapp_analyzer.hub.http.broadcast import LiveFeed
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import ControlSettings, HubSettings, JobIdentity
from megatronapp_analyzer.model import JobLayout, RankLiveness, StepRecords, Verdict
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import Env
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RECORD, Flag, Metric, RecordKind
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret
from megatronapp_native import RingWriter

DEADLINE_S = 300.0
MS = 1_000_000


def row(**fields: int) -> NDArray[np.void]:
    out = np.zeros(1, RECORD)
    out["comm"], out["microbatch"] = NO_COMM, NO_MICROBATCH
    for name, value in fields.items():
        out[name] = value
    return out


@dataclasses.dataclass
class FakeJob:
    """A pipeline of two stages times `data` replicas; every step lasts 10 ms, every message is matched."""

    data: int = 2
    attempt: int = 0
    boot_id: str = "boot"
    monotonic0_ns: int = 1_000_000_000
    ranks_per_worker: int = 2
    real_offset_ns: int = dataclasses.field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    @property
    def world(self) -> int:
        return 2 * self.data

    @property
    def workers(self) -> int:
        return self.world // self.ranks_per_worker

    def worker_of(self, rank: int) -> int:
        return rank // self.ranks_per_worker

    def ranks_of(self, worker: int) -> range:
        return range(worker * self.ranks_per_worker, (worker + 1) * self.ranks_per_worker)

    def ring_header(self, rank: int) -> dict[str, Any]:
        stage, replica = divmod(rank, self.data)
        forward, backward = [replica, replica + self.data], [replica + self.data, replica]
        metadata = {
            "rank": rank,
            "localRank": rank % self.ranks_per_worker,
            "worker": self.worker_of(rank),
            "node": f"node-{self.worker_of(rank)}",
            "address": "127.0.0.2",
            "pid": 1,
            "world": self.world,
            "layout": {"tensor": 1, "pipeline": 2, "virtualPipeline": 1, "data": self.data, "context": 1, "expert": 1},
            "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": replica, "pp": stage},
            "comms": [{"slot": 0, "kind": "p2p", "members": forward}, {"slot": 1, "kind": "p2p", "members": backward}],
            "device": "cpu",
            "totalIterations": 1000,
            "numMicrobatches": 1,
            "recordCostNs": 1000.0,
        }
        return {
            "rank": rank,
            "worker": self.worker_of(rank),
            "metadata": metadata,
            "bootId": self.boot_id,
            "clockPairs": [[0, self.real_offset_ns]],
            "capacity": 65536,
        }

    def records(self, rank: int, step: int, *, slow: float = 1.0) -> NDArray[np.void]:
        start = self.monotonic0_ns + step * 10 * MS
        compute = int(3 * MS * slow) // 8
        first = rank < self.data
        to_peer = {"comm": 0 if first else 1, "step": step, "ordinal": 0}
        from_peer = {"comm": 1 if first else 0, "step": step, "ordinal": 0}
        parts = [
            row(
                kind=RecordKind.FORWARD,
                step=step,
                start_ns=start,
                duration=compute,
                microbatch=0,
                flags=Flag.AUX_RUN_QUEUE,
            ),
            row(
                kind=RecordKind.SEND_POST,
                start_ns=start + 3 * MS,
                duration=100,
                flags=Flag.AUX_BYTES,
                aux=64,
                **to_peer,
            ),
            row(kind=RecordKind.RECV_WAIT, start_ns=start + 4 * MS, duration=MS // 8, **from_peer),
            row(kind=RecordKind.BACKWARD, step=step, start_ns=start + 5 * MS, duration=compute, microbatch=0),
            row(kind=RecordKind.STEP, step=step, start_ns=start, duration=10 * MS // 8),
        ]
        if rank == self.world - 1:
            loss = int(np.array([5.0 - 0.01 * step], "<f4").view("<u4")[0])
            parts.append(row(kind=RecordKind.METRIC, comm=Metric.LOSS, step=step, start_ns=start + 10 * MS, aux=loss))
        return np.concatenate(parts)


class FakeAgent:
    """Client that speaks only the agent's side of the protocol."""

    def __init__(self, job: FakeJob, worker: int, connection: websockets.asyncio.client.ClientConnection) -> None:
        self.job = job
        self.worker = worker
        self.connection = connection
        self.next_index = dict.fromkeys(job.ranks_of(worker), 0)

    async def send(self, kind: int, header: Mapping[str, Any], body: bytes = b"") -> None:
        await self.connection.send(frames.encode(Frame(kind, header, body)))

    async def receive(self) -> Frame:
        message = await asyncio.wait_for(self.connection.recv(), DEADLINE_S)
        assert isinstance(message, bytes)
        return frames.decode(message)

    async def hello(self, **changes: object) -> Frame:
        header = {
            "job": "demo",
            "uid": "uid-1",
            "attempt": self.job.attempt,
            "worker": self.worker,
            "node": f"node-{self.worker}",
            "address": "127.0.0.2",
            "pid": 1,
            "protocol": 1,
        }
        await self.send(FrameType.HELLO, header | changes)
        answer = await self.receive()
        self.next_index.update({entry["rank"]: entry["next"] for entry in answer.header.get("rings", ())})
        return answer

    async def rings(self) -> None:
        for rank in self.job.ranks_of(self.worker):
            await self.send(FrameType.RING, self.job.ring_header(rank))

    async def records(self, rank: int, records: NDArray[np.void], *, first: int | None = None) -> None:
        index = self.next_index[rank] if first is None else first
        self.next_index[rank] = index + len(records)
        header = {"rank": rank, "worker": self.worker, "first": index, "lost": 0}
        await self.send(FrameType.RECORDS, header, records.tobytes())

    async def steps(self, steps: Sequence[int], **how: float) -> None:
        for step in steps:
            for rank in self.job.ranks_of(self.worker):
                await self.records(rank, self.job.records(rank, step, **how))

    async def status(self, *, progress: Mapping[str, Any] | None = None, **changes: object) -> None:
        now_ns = time.monotonic_ns()
        entry = {
            "heartbeatNs": now_ns,
            "nowNs": now_ns,
            "openSpan": None,
            "deviceSpan": None,
            "lost": 0,
            "closed": False,
            "alive": True,
            "processState": "S",
        }
        rings = [{"rank": rank} | entry | changes for rank in self.job.ranks_of(self.worker)]
        await self.send(FrameType.STATUS, {"rings": rings, "progress": progress, "buffered": 0, "dropped": 0})


class FakeDetector:
    """Detector that returns what a test put into `script`: by step for finished steps, once for liveness."""

    def __init__(self, script: "Script", layout: JobLayout) -> None:
        self._script = script
        script.layouts.append(layout)

    def observe(self, step: StepRecords, aligned: AlignedStep | None = None) -> list[Verdict]:
        self._script.seen.append((step.attempt, step.step))
        verdict = self._script.by_step.get(step.step, [])
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def observe_liveness(self, now_ns: int, ranks: Sequence[RankLiveness]) -> list[Verdict]:
        self._script.liveness.append([entry.rank for entry in ranks])
        return self._script.hung


@dataclasses.dataclass
class Script:
    by_step: dict[int, list[Verdict] | Exception] = dataclasses.field(default_factory=dict)
    hung: list[Verdict] = dataclasses.field(default_factory=list)
    layouts: list[JobLayout] = dataclasses.field(default_factory=list)
    seen: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    liveness: list[list[int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RunningHub:
    """Hub with a real uvicorn server on loopback."""

    hub: Hub
    live: LiveFeed
    port: int
    secret: str
    state_dir: Path
    script: Script
    server: PromptServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {derive_token(self.secret, TokenRole.VIEWER)}"}

    def client(self, role: TokenRole = TokenRole.VIEWER, **settings: Any) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {derive_token(self.secret, role)}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=DEADLINE_S, verify=SHARED_TLS, **settings)

    async def get(self, path: str) -> Any:
        async with self.client() as client:
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            return answer.json()

    @contextlib.asynccontextmanager
    async def agent(self, job: FakeJob, worker: int) -> AsyncIterator[FakeAgent]:
        headers = {"Authorization": f"Bearer {derive_token(self.secret, TokenRole.AGENT)}"}
        url = f"ws://127.0.0.1:{self.port}/api/v1/agent"
        async with websocket_clients.connect(url, additional_headers=headers, compression=None) as connection:
            yield FakeAgent(job, worker, connection)

    @contextlib.asynccontextmanager
    async def page(self, **headers: str) -> AsyncIterator[websockets.asyncio.client.ClientConnection]:
        url = f"ws://127.0.0.1:{self.port}/api/v1/live"
        async with websocket_clients.connect(
            url, additional_headers=self.bearer | headers, compression=None, max_queue=None
        ) as connection:
            yield connection


def wait_until_judging(hub: Hub, thread: threading.Thread) -> None:
    """Wait for the detector of a hub that was just started: until then its summary answers 503."""
    deadline = time.monotonic() + DEADLINE_S
    while not (hub.ready and hub.analysis.caught_up):
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def serve_hub(
    state_dir: Path,
    secret: str,
    *,
    uid: str = "uid-1",
    frontend: Path | None = None,
    named: bool = False,
    limits: StoreLimits | None = None,
    control: ControlSettings | None = None,
    gpu_hour_price: float | None = None,
    spool: SpoolLimits | None = None,
    script: Script | None = None,
) -> Iterator[RunningHub]:
    script = script or Script()
    settings = HubSettings(
        job=JobIdentity(name="demo", uid=uid, control=control, gpu_hour_price=gpu_hour_price),
        state_dir=state_dir,
        store=limits or StoreLimits(),
        spool=spool,
        tick_s=0.05,
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        hub = Hub(settings, LocalJudge(lambda layout: FakeDetector(script, layout)))
        hub.scope.core.ingest.assembler.wait_s = DEADLINE_S  # frames that are late are tested elsewhere
        app = create_app(hub, secret=secret, frontend=frontend, named=named)
        config = uvicorn.Config(
            app,
            ws="websockets-sansio",
            ws_ping_interval=None,  # answers to pings would be late on a busy computer
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = PromptServer(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            wait_until_judging(hub, thread)
            yield RunningHub(hub, app.state.live, port, secret, state_dir, script, server)
        finally:
            server.end()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture(autouse=True, scope="session")
def patient_spool() -> Iterator[None]:
    """Let the end of a hub wait for a slow disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spooled_ingest, "CLOSE_S", DEADLINE_S)
        yield


@pytest.fixture
def secret() -> str:
    return new_secret()


@pytest.fixture(scope="session")
def serve_as() -> Callable[..., contextlib.AbstractContextManager[RunningHub]]:
    """Start a hub with a secret of one's own: `with serve_as(state_dir, secret) as hub`."""
    return serve_hub


@pytest.fixture
def serve(secret: str) -> Callable[..., contextlib.AbstractContextManager[RunningHub]]:
    """Start a hub: `with serve(state_dir, frontend=..., limits=...) as hub`."""
    return lambda state_dir, **how: serve_hub(state_dir, secret, **how)


@pytest.fixture
def hub(tmp_path: Path, secret: str) -> Iterator[RunningHub]:
    with serve_hub(tmp_path / "state", secret) as running:
        yield running


@pytest.fixture
def rank_zero(hub: RunningHub) -> Iterator[scope_rank_zero.RankZero]:
    """A hub whose model answers."""
    token = derive_token(hub.secret, TokenRole.SERVE)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank:
        hub.hub.scope.probe_client.client = Rank0Client(rank.url, token)
        yield rank


@pytest.fixture
def fake_job() -> Callable[..., FakeJob]:
    """Return a function that builds a FakeJob."""
    return FakeJob


@pytest.fixture
def until() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Wait until an awaited condition holds; fails after a deadline."""

    async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(0.02)

    return wait


@dataclasses.dataclass
class HubWorker:
    """Files of one worker and the process of its agent."""

    job: Any
    index: int
    shm_dir: Path
    environment: dict[str, str]
    writers: dict[int, RingWriter] = dataclasses.field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return self.environment[Env.SHM_PREFIX]

    def open_rings(self, capacity: int = 4096) -> None:
        for rank in self.job.ranks_of(self.index):
            metadata = json.dumps(self.job.ring_header(rank)["metadata"]).encode()
            path = self.shm_dir / f"{self.prefix}.rank{rank}.ring"
            self.writers[rank] = RingWriter(str(path), capacity, self.job.attempt, metadata)

    def write_steps(self, steps: range) -> None:
        for step in steps:
            for rank, writer in self.writers.items():
                for fields in self.fields(rank, step):
                    writer.record(*fields)

    def fields(self, rank: int, step: int) -> Iterator[list[int]]:
        """Arguments of RingWriter.record for one step."""
        for entry in self.job.records(rank, step):
            values = {name: int(entry[name]) for name in ORDER}
            values["duration"] *= 8
            yield [values[name] for name in ORDER]

    def heartbeat(self) -> None:
        for writer in self.writers.values():
            writer.heartbeat()

    def close_rings(self, *, unlink: bool) -> None:
        for writer in self.writers.values():
            writer.close(unlink)

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "megatronapp_analyzer.agent", env=os.environ | self.environment
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


ORDER = (
    "start_ns",
    "duration",
    "step",
    "ordinal",
    "aux",
    "comm",
    "microbatch",
    "kind",
    "chunk",
    "layer",
    "flags",
)


@pytest.fixture
def worker(tmp_path: Path, secret: str, fake_job: Any) -> Callable[..., HubWorker]:
    secret_file = tmp_path / "secret"
    secret_file.write_text(secret + "\n")

    def build(hub_url: str, *, index: int = 0, job: Any = None) -> HubWorker:
        job = job or fake_job(data=1)
        environment = {
            Env.JOB: "demo",
            Env.JOB_UID: "uid-1",
            Env.ATTEMPT: str(job.attempt),
            Env.WORKER_INDEX: str(index),
            Env.NODE_NAME: f"node-{index}",
            Env.ADDRESS: "127.0.0.2",
            Env.SHM_DIR: str(tmp_path),
            Env.SHM_PREFIX: f"demo-{job.attempt}-{index}",
            Env.SECRET_FILE: str(secret_file),
            Env.HUB_URL: hub_url,
        }
        return HubWorker(job, index, tmp_path, {str(name.value): value for name, value in environment.items()})

    return build
