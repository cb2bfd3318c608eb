"""Steps that have left the memory of the hub, over HTTP: read from the spool and the archive."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.hub.archive.history import ReadLimits, StepHistory
from megatronapp_analyzer.hub.archive.rows import ROW, Rows
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.archive.values import RowFilter
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common.cli import main

pytestmark = pytest.mark.asyncio
IN_MEMORY = 5
STEPS = range(60)


@pytest.fixture
def hub(tmp_path: Path, serve: Any) -> Iterator[Any]:
    """A hub with few steps in memory, and small files."""
    limits, spool = StoreLimits(full_steps=IN_MEMORY), SpoolLimits(segment_bytes=8000)
    with serve(tmp_path / "hub", limits=limits, spool=spool) as running:
        yield running


async def feed(hub: Any, job: Any, until: Any) -> None:
    for worker in range(job.workers):
        async with hub.agent(job, worker) as agent:
            await agent.hello()
            await agent.rings()
            await agent.steps(STEPS)

    async def has_all() -> bool:
        return len(await hub.get("/api/v1/steps")) == len(STEPS)

    await until(has_all)
    hub.hub.spooled._writer.wait_until_written()
    hub.hub.spooled.archiver.wait_until_idle()


def spans_sent(job: Any, step: int) -> list[tuple[int, int, int, int]]:
    """Return rank, kind, start and length of the spans of a step, in the order of a timeline."""
    found = []
    for rank in range(job.world):
        rows = job.records(rank, step)
        rows = sorted(rows[rows["kind"] < 32].tolist(), key=lambda row: row[0])
        found += [(rank, row[7], row[0] + job.real_offset_ns, 8 * row[1]) for row in rows]
    return found


async def test_old_steps_are_read_from_the_disk(hub: Any, fake_job: Any, until: Any) -> None:
    job = fake_job(data=2)
    await feed(hub, job, until)
    history = await hub.get("/api/v1/history")
    assert history["memory"] == {"steps": IN_MEMORY, "firstStep": 55, "lastStep": 59}
    assert history["hours"][0]["firstStep"] == 0
    assert 0 < history["hours"][-1]["lastStep"] <= 59
    assert 0 < history["bytes"] == sum(hour["bytes"] for hour in history["hours"]) < history["limitBytes"]
    assert (history["dropped"]["records"], history["damagedFiles"], history["waitingSegments"]) == (0, 0, 0)
    for step in (0, 3, 30, 54, 59):  # in files, across files, in the open segment, in memory
        timeline = await hub.get(f"/api/v1/timeline?step={step}")
        starts = [start + timeline["originNs"] for start in timeline["startNs"]]
        found = list(zip(timeline["rank"], timeline["kind"], starts, timeline["durationNs"], strict=True))
        assert found == spans_sent(job, step)
        assert (timeline["complete"], timeline["omitted"], timeline["attempt"]) == (True, None, 0)
        assert len(timeline["flows"]) == job.world
    assert (await hub.get("/api/v1/timeline?step=3&pixels=500&tracks=1"))["window"]["spans"] == 4 * 5
    assert (await hub.get("/api/v1/blame?step=3"))["step"] == 3
    trace = await hub.get("/api/v1/trace?from=2&to=4")
    assert {event["args"]["step"] for event in trace["traceEvents"] if event.get("ph") == "X"} == {2, 3, 4}
    async with hub.client() as client:
        assert "Megatronapp-Omitted" not in (await client.get("/api/v1/trace?from=2&to=4")).headers
    async with hub.client() as client:
        for query in (
            "timeline?step=60",
            "timeline?step=3&attempt=1",
            "trace?from=100&to=200",
            f"timeline?step={2**40}",
        ):
            answer = await client.get(f"/api/v1/{query}")
            assert (answer.status_code, answer.json()["code"]) == (404, "step-not-held")
            assert "/api/v1/history" in answer.json()["hint"]


async def test_a_trace_has_a_note_if_it_lacks_steps_of_earlier_attempts(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), until)
    resumed, again = fake_job(attempt=1), range(40, 60)
    for worker in range(resumed.workers):
        async with hub.agent(resumed, worker) as agent:
            await agent.hello()
            await agent.rings()
            await agent.steps(again)

    async def has_all() -> bool:
        return len(await hub.get("/api/v1/steps")) == len(STEPS) + len(again)

    await until(has_all)
    hub.hub.spooled._writer.wait_until_written()
    hub.hub.spooled.archiver.wait_until_idle()
    left_out = "steps of attempts before 1 are not included"
    async with hub.client() as client:
        for first, last, expected in ((30, 45, range(40, 46)), (41, 59, range(41, 60)), (57, 59, range(57, 60))):
            answer = await client.get(f"/api/v1/trace?from={first}&to={last}")
            events = answer.json()["traceEvents"]
            assert {event["args"]["step"] for event in events if event.get("ph") == "X"} == set(expected)
            assert answer.headers["Megatronapp-Omitted"] == left_out
        answer = await client.get("/api/v1/trace?from=60&to=70")
        assert (answer.status_code, left_out in answer.text) == (404, False)
        answer = await client.get("/api/v1/trace?from=3&to=9")
        assert (answer.status_code, answer.json()["code"], left_out in answer.text) == (404, "step-not-held", True)
        assert "Megatronapp-Omitted" not in (await client.get("/api/v1/trace")).headers


async def test_a_second_hub_has_the_history_of_the_first(
    tmp_path: Path, serve: Any, hub: Any, fake_job: Any, until: Any
) -> None:
    await feed(hub, fake_job(), until)
    before = [await hub.get(f"/api/v1/timeline?step={step}") for step in (1, 40)]
    with serve(tmp_path / "hub", limits=StoreLimits(full_steps=IN_MEMORY)) as second:
        assert [await second.get(f"/api/v1/timeline?step={step}") for step in (1, 40)] == before
        assert (await second.get("/api/v1/history"))["hours"]


async def test_an_answer_that_is_too_large_is_shortened(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), until)
    whole = await hub.get("/api/v1/timeline?step=1")
    hub.hub.history = StepHistory(hub.hub.ingest, hub.hub.spooled, ReadLimits(bytes=400))
    part = await hub.get("/api/v1/timeline?step=1")
    assert 0 < len(part["rank"]) < len(whole["rank"])
    assert "of what is stored" in part["omitted"]
    hub.hub.history.close()
    hub.hub.history = StepHistory(hub.hub.ingest, hub.hub.spooled, ReadLimits(seconds=-1))
    part = await hub.get("/api/v1/timeline?step=1")
    assert "stopped after" in part["omitted"]
    hub.hub.history._limits = ReadLimits()
    assert (await hub.get("/api/v1/timeline?step=1"))["omitted"] is None, "a disk that was slow once is read again"


async def test_a_disk_that_is_too_slow_is_no_missing_step(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), until)
    hub.hub.history = StepHistory(hub.hub.ingest, hub.hub.spooled, ReadLimits(seconds=-1))
    rows = StoredTraces.rows

    def slow(stored: StoredTraces, attempt: int, chosen: RowFilter) -> Iterator[Rows]:
        yield np.zeros(0, ROW)  # of a file in which the step might have been
        yield from rows(stored, attempt, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTraces, "rows", slow)
        async with hub.client() as client:
            answer = await client.get("/api/v1/timeline?step=1")
    assert (answer.status_code, answer.json()["code"]) == (503, "busy")


async def test_a_step_whose_file_was_deleted_is_not_found(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), until)
    for file in hub.hub.spooled.catalog.files():
        file.path.unlink()
    async with hub.client() as client:
        for path in ("timeline?step=1", "blame?step=1", "trace?from=1&to=2"):
            answer = await client.get(f"/api/v1/{path}")
            assert (answer.status_code, answer.json()["code"]) == (404, "step-not-held"), path


async def test_requests_beyond_the_limit_are_refused(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), until)
    hub.hub.history._waiting = 100
    async with hub.client() as client:
        answer = await client.get("/api/v1/timeline?step=1")
    assert (answer.status_code, answer.json()["code"]) == (503, "busy")
    assert int(answer.headers["Retry-After"]) > 0
    hub.hub.history._waiting = 0


async def test_what_a_hub_stored_is_analysed_from_its_store(
    tmp_path: Path, serve: Any, fake_job: Any, until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = fake_job()
    with serve(tmp_path / "hub", spool=SpoolLimits(segment_bytes=8000)) as running:
        await feed(running, job, until)
    [folder] = (tmp_path / "hub" / "store" / "demo").glob("2*")
    file = min(folder.glob("records-*.parquet"))
    found = {}
    for path in (tmp_path / "hub", tmp_path / "hub" / "store", folder, file):
        assert main(["scan", "analyze", str(path), "--json"]) == 0
        found[path] = json.loads(capsys.readouterr().out)
    assert [found[path]["steps"] for path in found][:3] == [60, 60, 60]
    assert 0 < found[file]["steps"] < 60
    assert all(document["ranks"] == job.world for document in found.values())
    (folder / "rings-a0000.parquet").unlink()
    assert main(["scan", "analyze", str(file)]) != 0
    assert "rings-a0000.parquet is missing" in capsys.readouterr().err
