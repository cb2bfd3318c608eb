"""Hub that is killed: it restarts with what it had, and agents bring what it missed."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ports import reserved_ports
from shared_tls import SHARED_TLS

from megatronapp_common.names import Env
from megatronapp_common.web.tokens import TokenRole, derive_token

pytestmark = pytest.mark.asyncio
DEADLINE_S = 300.0
VERDICT: dict[str, Any] = {
    "id": "v1",
    "subject": {"type": "rank", "ranks": [1], "worker": 0, "node": "n"},
    "cause": "compute",
    "state": "confirmed",
    "effect": {"secondsPerStep": 0.1, "secondsLost": 36.0, "slowdown": 2.0},
    "confidence": 0.9,
    "evidence": {"steps": [3], "text": []},
    "since": {"attempt": 0, "step": 3, "time": 1.0},
    "until": None,
    "sentence": "Rank 1 is slow.",
    "stale": False,
}


class HubProcess:
    """`python -m megatronapp_analyzer.hub`, started again as often as a test wants."""

    def __init__(self, folder: Path, secret: str, port: int) -> None:
        self.folder = folder
        self.port = port
        self.secret_file = folder / "secret"
        self.secret_file.write_text(secret)
        self.headers = {"Authorization": f"Bearer {derive_token(secret, TokenRole.CONTROLLER)}"}
        job = {"apiVersion": "megatronapp.io/v1alpha1", "kind": "MegatronJob", "metadata": {"name": "demo"}}
        job |= {"spec": {"trace": {"enabled": True}}}
        (folder / "job.yaml").write_text(json.dumps(job))
        self.url = f"http://127.0.0.1:{self.port}"
        self.more: tuple[str, ...] = ()
        """Flags."""

    def arguments(self) -> list[str]:
        command = ["--port", str(self.port), "--job-file", str(self.folder / "job.yaml")]
        return ["-m", "megatronapp_analyzer.hub", *command, "--state-dir", str(self.folder / "hub"), *self.more]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        environment = os.environ | {Env.JOB.value: "demo", Env.JOB_UID.value: "uid-1"}
        environment[Env.SECRET_FILE.value] = str(self.secret_file)
        process = await asyncio.create_subprocess_exec(sys.executable, *self.arguments(), env=environment)
        try:
            await self.wait_until_ready()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(base_url=self.url, verify=SHARED_TLS) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, verify=SHARED_TLS, timeout=DEADLINE_S)

    async def get(self, path: str) -> Any:
        async with self.client() as client:
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            return answer.json()


@pytest.fixture
def hub(tmp_path: Path, secret: str) -> Iterator[HubProcess]:
    with reserved_ports(1) as (port,):
        yield HubProcess(tmp_path, secret, port)


async def test_killed_hub_loses_nothing(hub: HubProcess, worker: Any, fake_job: Any, until: Any) -> None:
    job = fake_job(data=2)
    workers = [worker(hub.url, index=index, job=job) for index in range(job.workers)]
    for mine in workers:
        mine.open_rings()

    def write(steps: range) -> None:
        for mine in workers:
            mine.write_steps(steps)

    async def has(count: int) -> None:
        async def arrived() -> bool:
            return len(await hub.get("/api/v1/steps")) == count

        await until(arrived)

    async with contextlib.AsyncExitStack() as agents:
        for mine in workers:
            await agents.enter_async_context(mine.agent())
        write(range(20))
        async with hub.running() as process:
            await has(20)
            async with hub.client() as client:
                fault = {"rank": 1, "kind": "host", "factor": 2, "fromStep": 1000, "steps": 1}
                assert (await client.post("/api/v1/faults", json=fault)).status_code == 201
            write(range(20, 60))
            process.send_signal(signal.SIGKILL)
            await process.wait()
        write(range(60, 80))
        async with hub.running():
            await has(80)
            steps = await hub.get("/api/v1/steps")
            assert [step["step"] for step in steps] == list(range(80))
            assert all(step["complete"] for step in steps)
            series = await hub.get("/api/v1/metrics/series?name=loss")
            assert series["steps"] == list(range(80))
            job_view = await hub.get("/api/v1/job")
            assert job_view["tracer"]["lost"] == 0
            assert [fault["kind"] for fault in job_view["faults"]] == ["host"]
    for mine in workers:
        mine.close_rings(unlink=True)


def detectors_of(hub: asyncio.subprocess.Process) -> list[int]:
    """Return the ids of the hub's child processes, its detector."""
    return [int(pid) for pid in Path(f"/proc/{hub.pid}/task/{hub.pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it is reaped after the file is opened
        return True


async def test_the_detector_is_started_again_and_ends_with_the_hub(
    hub: HubProcess, worker: Any, fake_job: Any, until: Any
) -> None:
    job = fake_job(data=1)
    mine = worker(hub.url, index=0, job=job)
    mine.open_rings()

    async def is_judged() -> bool:
        return (await hub.get("/api/v1/tracer"))["lagSeconds"] is not None

    async def has_restarted() -> bool:
        async with hub.client() as client:
            text = (await client.get("/metrics")).text
        return "megascan_analyzer_restarts_total{" in text and 'restarts_total{job_id="demo"} 1.0' in text

    async def has_all() -> bool:
        return len(await hub.get("/api/v1/steps")) == 40

    async with hub.running() as process, mine.agent():
        mine.write_steps(range(20))
        await until(is_judged)
        (first,) = detectors_of(process)
        os.kill(first, signal.SIGKILL)
        mine.write_steps(range(20, 40))
        await until(has_restarted)
        await until(is_judged)
        await until(has_all)

        async def has_another() -> bool:
            return len(detectors_of(process)) == 1 and first not in detectors_of(process)

        await until(has_another)
        (second,) = detectors_of(process)
        process.send_signal(signal.SIGTERM)
        await process.wait()

        async def have_ended() -> bool:
            return has_ended(first) and has_ended(second)

        await until(have_ended)
    async with hub.running() as process:

        async def has_detector() -> bool:
            return len(detectors_of(process)) == 1

        await until(has_detector)
        (third,) = detectors_of(process)
        process.send_signal(signal.SIGKILL)
        await process.wait()

        async def has_died() -> bool:
            return has_ended(third)

        await until(has_died)
    mine.close_rings(unlink=True)


@pytest.mark.full("test_process_commands opens them by the command")
async def test_the_pages_of_a_job_that_has_ended_open_again(
    hub: HubProcess, worker: Any, fake_job: Any, until: Any
) -> None:
    """Check curves, step map, timeline and verdicts of its end, and that nothing on disk is changed."""
    folder, job = hub.folder, fake_job(data=1)
    workers = [worker(hub.url, index=index, job=job) for index in range(job.workers)]
    async with contextlib.AsyncExitStack() as agents:
        for mine in workers:
            mine.open_rings()
            await agents.enter_async_context(mine.agent())
            mine.write_steps(range(20))
        async with hub.running() as process:

            async def arrived() -> bool:
                return len(await hub.get("/api/v1/steps")) == 20

            await until(arrived)
            before = {path: await hub.get(path) for path in ("/api/v1/heatmap", "/api/v1/timeline?step=19")}
            process.send_signal(signal.SIGTERM)  # it ends once all frames are on disk
            await process.wait()
    for mine in workers:
        mine.close_rings(unlink=True)
    (folder / "hub" / "verdicts.json").write_text(json.dumps([VERDICT]))
    (folder / "status.json").write_text(
        json.dumps({"phase": "Succeeded", "progress": {"iteration": 20, "totalIterations": 20, "state": "done"}})
    )
    jobs = folder / "jobs"
    for name, uid in (("demo", "uid-1"), ("other", "uid-2")):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "job.yaml").write_text(f"metadata: {{name: {name}, uid: {uid}}}")
    status = {"phase": "Running", "restarts": 2, "progress": {"iteration": 7}}
    (jobs / "other" / "status.json").write_text(json.dumps(status))
    (jobs / "rubbish").mkdir()
    stored = contents(folder / "hub")
    hub.more = ("--status-file", str(folder / "status.json"), "--jobs-dir", str(jobs))
    async with hub.running():
        view = await hub.get("/api/v1/job")
        assert (view["phase"], view["progress"]["iteration"]) == ("Succeeded", 20)
        assert {rank["state"] for rank in view["ranks"]} == {"ended"}
        assert {path: await hub.get(path) for path in before} == before
        assert (await hub.get("/api/v1/metrics/series?name=loss"))["steps"] == list(range(20))
        effect = VERDICT["effect"] | {"gpuHours": 2 * 36 / 3600, "cost": None}
        listed = VERDICT | {"effect": effect, "reason": None}  # an older release has stored it without a reason
        assert await hub.get("/api/v1/verdicts") == [listed], "what both ranks have lost"
        own, other = await hub.get("/api/v1/jobs")
        assert (own["name"], own["phase"], own["here"]) == ("demo", "Succeeded", True)
        shown = [other[key] for key in ("name", "phase", "here", "iteration", "restarts")]
        assert shown == ["other", "Failed", False, 7, 2], "no backend holds its lock, as `megatronapp get` says"
        async with hub.client() as client:
            fault = {"rank": 1, "kind": "host", "factor": 2, "fromStep": 1000, "steps": 1}
            assert (await client.post("/api/v1/faults", json=fault)).status_code == 409
    assert contents(folder / "hub") == stored


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full("cases that differ in the flag", but=("no-job-file",))
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--host", "0.0.0.0"], "--allow-remote"),
        (["--job-file", "/does/not/exist"], "/does/not/exist"),
        (["--status-file", "/dev/null"], "--status-file /dev/null: not the status of a job"),
        (["--state-dir", "/dev/null/hub"], "--state-dir /dev/null/hub: Not a directory"),
    ],
    ids=["remote-bind", "no-job-file", "no-status", "state-dir-in-a-file"],
)
async def test_wrong_flags_are_refused(hub: HubProcess, extra: list[str], message: str) -> None:
    environment = os.environ | {Env.SECRET_FILE.value: str(hub.secret_file)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *hub.arguments(), *extra, stderr=asyncio.subprocess.PIPE, env=environment
    )
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 64
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_a_port_in_use_is_reported(hub: HubProcess) -> None:
    environment = os.environ | {Env.SECRET_FILE.value: str(hub.secret_file)}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", hub.port))
        sock.listen()
        process = await asyncio.create_subprocess_exec(
            sys.executable, *hub.arguments(), stderr=asyncio.subprocess.PIPE, env=environment
        )
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 64
    assert str(hub.port) in stderr.decode()


async def test_a_hub_that_is_process_1_ends_while_it_starts(hub: HubProcess) -> None:
    """The first process of a container does not get a signal that it has no handler for."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("process namespaces are not allowed here")
    hub.secret_file.unlink()
    os.mkfifo(hub.secret_file)
    environment = os.environ | {Env.SECRET_FILE.value: str(hub.secret_file)}
    command = [*namespace, sys.executable, *hub.arguments(), "--no-die-with-parent"]
    outer = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        # Both ends are open once the hub reads its secret: it has begun, and does not serve yet.
        with await asyncio.to_thread(hub.secret_file.open, "w"):
            [inner] = psutil.Process(outer.pid).children()
            inner.terminate()
            async with asyncio.timeout(DEADLINE_S):
                assert await outer.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            outer.kill()
        await outer.wait()
