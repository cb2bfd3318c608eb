"""`megatronapp transport bench --job` on this machine, against a real hub: the transfers of the job's ranks."""

import asyncio
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from megatronapp_common import cli
from megatronapp_common.trace import BYTES_UNIT, Flag, RecordKind, TransferPath

pytestmark = pytest.mark.asyncio
MS = 1_000_000
MESSAGE_BYTES = 1 << 20
COPY_MS = 2


@pytest.fixture
def stored_job(hub: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The state folder of the hub's job, as a backend leaves it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MEGATRONAPP_CONTEXT", raising=False)
    folder = tmp_path / "xdg" / "megatronapp" / "jobs" / "demo"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump({"metadata": {"name": "demo"}, "spec": {}}), encoding="utf-8")
    (folder / "status.json").write_text('{"phase": "Running"}', encoding="utf-8")
    (folder / "hub.json").write_text(json.dumps({"url": hub.url}), encoding="utf-8")
    (folder / "secret").write_text(f"{hub.secret}\n", encoding="utf-8")
    return folder


@dataclasses.dataclass
class BenchOutput:
    """Exit code and outputs of the command."""

    code: int
    output: str
    problem: str


@pytest.fixture
def bench(stored_job: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; it blocks, and the hub answers on another thread."""

    async def run(*flags: str) -> BenchOutput:
        code = await asyncio.to_thread(cli.main, ["transport", "bench", *flags])
        return BenchOutput(code, *capsys.readouterr())

    return run


def with_copies(job: Any, slots: dict[int, int]) -> Any:
    """Return the job with one received message of 1 MiB in each step; `slots`: communicator by receiving rank."""
    plain = job.records

    def records(rank: int, step: int, **how: float) -> NDArray[np.void]:
        found: NDArray[np.void] = plain(rank, step, **how)
        if rank not in slots:
            return found
        copy = found[:1].copy()
        copy["kind"], copy["comm"], copy["layer"] = RecordKind.COPY, slots[rank], TransferPath.SHARED_MEMORY
        copy["duration"], copy["flags"], copy["aux"] = COPY_MS * MS // 8, Flag.AUX_BYTES, MESSAGE_BYTES // BYTES_UNIT
        return np.concatenate([found[:-1], copy, found[-1:]])

    job.records = records
    return job


async def feed(hub: Any, job: Any, until: Any) -> None:
    """Bring eight steps, and wait until the hub has them."""
    for worker in range(job.workers):
        async with hub.agent(job, worker) as agent:
            await agent.hello()
            await agent.rings()
            await agent.steps(range(8))
            await agent.status()

    async def has_all() -> bool:
        return len((await hub.get("/api/v1/pipeline"))["steps"]) == 8

    await until(has_all)


async def test_pairs_have_their_messages_and_rates(hub: Any, fake_job: Any, until: Any, bench: Any) -> None:
    job = with_copies(fake_job(data=1), {0: 1, 1: 0})
    await feed(hub, job, until)
    answer = await bench("--job", "demo")
    assert (answer.code, answer.problem) == (0, "")
    heading, forth, back, note = answer.output.splitlines()
    assert heading.split() == ["FROM", "TO", "PATH", "MESSAGES/STEP", "KIB/MESSAGE", "COPY", "MS", "GB/S"]
    assert forth.split() == ["0", "1", "shared-memory", "1", "1024.0", "2.000", "0.52"]
    assert back.split() == ["1", "0", "shared-memory", "1", "1024.0", "2.000", "0.52"]
    assert note.startswith("demo: the newest 8 traced steps of attempt 0;")
    printed = json.loads((await bench("--job", "demo", "--json")).output)
    assert (printed["job"], printed["attempt"], printed["steps"]) == ("demo", 0, 8)
    assert printed["pairs"][0] == {
        "from": 0,
        "to": 1,
        "path": "shared-memory",
        "messages": 8,
        "bytes": 8 * MESSAGE_BYTES,
        "meanCopySeconds": pytest.approx(COPY_MS * 1e-3),
        "bytesPerSecond": pytest.approx(MESSAGE_BYTES / (COPY_MS * 1e-3)),
    }


async def test_a_job_without_transfers_is_refused_with_the_reason(
    hub: Any, fake_job: Any, until: Any, bench: Any, stored_job: pathlib.Path
) -> None:
    answer = await bench("--job", "demo")
    assert (answer.code, answer.output) == (1, "")
    assert answer.problem.startswith("error: demo: no whole step is traced yet")
    assert "spec.trace.enabled: true" in answer.problem
    await feed(hub, fake_job(data=1), until)
    answer = await bench("--job", "demo")
    assert (answer.code, answer.output) == (1, "")
    assert "send nothing over the native transport" in answer.problem
    assert "spec.dpp.enabled: true" in answer.problem
    (stored_job / "secret").write_text("ab" * 32, encoding="utf-8")
    assert (await bench("--job", "demo")).code == 1
    (stored_job / "hub.json").unlink()
    assert "no hub is running" in (await bench("--job", "demo")).problem


async def test_options_of_the_other_bench_are_refused(bench: Any) -> None:
    answer = await bench("--job", "demo", "--ranks", "4")
    assert (answer.code, answer.problem.startswith("error: --ranks is for ranks that the bench starts")) == (1, True)
    answer = await bench("--cluster")
    assert (answer.code, "give it, or leave them out" in answer.problem) == (1, True)
    assert "none" in (await bench("--job", "none")).problem
