"""Real agents with real rings against a real hub."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from scope_pages import bearer

from megatronapp_analyzer.hub.state.progress import Progress
from megatronapp_analyzer.hub.state.windows import MAX_WINDOWS, STEPS_AHEAD
from megatronapp_common.attempt_order import AttemptOrder, lock_path, prefix_at, take_lock
from megatronapp_common.names import Env
from megatronapp_common.shared_documents import DocumentReader, DocumentWriter
from megatronapp_common.web.tokens import TokenRole
from megatronapp_native import RingWriter

pytestmark = pytest.mark.asyncio
DEADLINE_S = 300.0


async def test_agent_brings_rings_and_ends_with_them(hub: Any, worker: Any, until: Any) -> None:
    mine = worker(hub.url)
    progress = DocumentWriter(mine.shm_dir / f"{mine.prefix}.progress")
    progress.write({"attempt": 0, "iteration": 4, "loss": 3.5, "state": "training"})
    async with mine.agent() as process:
        mine.open_rings()
        mine.write_steps(range(5))

        async def arrived() -> bool:
            return len(await hub.get("/api/v1/steps")) == 5

        await until(arrived)

        async def training() -> bool:
            mine.heartbeat()
            return [rank["state"] for rank in (await hub.get("/api/v1/job"))["ranks"]] == ["training"] * 2

        await until(training)
        job = await hub.get("/api/v1/job")
        assert job["progress"]["loss"] == 3.5
        assert job["phase"] == "Running"
        mine.write_steps(range(5, 8))
        mine.close_rings(unlink=True)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0

    async def ended() -> bool:
        ranks = (await hub.get("/api/v1/job"))["ranks"]
        return [(rank["state"], rank["step"]) for rank in ranks] == [("ended", 7)] * 2

    await until(ended)
    progress.close()


async def test_an_agent_follows_its_worker_to_the_next_attempt(
    hub: Any, worker: Any, until: Any, fake_job: Any
) -> None:
    """The worker restarts in place; the agent ends once the launcher has released its lock."""
    first = worker(hub.url)
    orders = first.shm_dir / "order"
    first.environment[Env.ATTEMPT_FILE] = str(orders)
    lock = take_lock(lock_path(first.shm_dir, "uid-1", 0))
    second = worker(hub.url, job=fake_job(data=1, attempt=1))
    second.environment[Env.SHM_PREFIX] = prefix_at(first.prefix, 1, before=0, worker=0)

    def attempt_has_steps(attempt: int, steps: int) -> Callable[[], Awaitable[bool]]:
        async def reached() -> bool:
            found = [step for step in await hub.get("/api/v1/steps") if step["attempt"] == attempt]
            return len(found) == steps

        return reached

    async with first.agent() as process:
        first.open_rings()
        first.write_steps(range(4))
        await until(attempt_has_steps(0, 4))
        first.close_rings(unlink=True)
        orders.write_text(AttemptOrder(attempt=1, grace_s=5).text)
        second.open_rings()
        second.write_steps(range(2, 5))
        await until(attempt_has_steps(1, 3))
        assert (await hub.get("/api/v1/job"))["attempt"] == 1
        second.close_rings(unlink=True)
        os.close(lock)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


async def test_the_agent_of_a_spare_connects_once_it_has_a_place(
    hub: Any, worker: Any, until: Any, fake_job: Any
) -> None:
    spare = worker(hub.url)
    orders = spare.shm_dir / "order"
    spare.environment |= {Env.ATTEMPT_FILE: str(orders), Env.SPARE: "1", Env.WORKER_INDEX: "2"}
    lock = take_lock(lock_path(spare.shm_dir, "uid-1", 2))
    placed = worker(hub.url, job=fake_job(data=1, attempt=1))
    placed.environment[Env.SHM_PREFIX] = f"{spare.prefix}-a1-w0"

    async def reached() -> bool:
        return len([step for step in await hub.get("/api/v1/steps") if step["attempt"] == 1]) == 3

    async with spare.agent() as process:
        orders.write_text(AttemptOrder(attempt=1, grace_s=0, worker=0, coordinator="h:1").text)
        placed.open_rings()
        placed.write_steps(range(3))
        await until(reached)
        placed.close_rings(unlink=True)
        os.close(lock)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


async def cancel_window(hub: Any, client: httpx.AsyncClient) -> None:
    """Cancel the only window of a hub, which a viewer may not."""
    (window,) = await hub.get("/api/v1/trace/windows")
    path = f"/api/v1/trace/windows/{window['id']}"
    answer = await client.delete(path, headers=bearer(hub, TokenRole.VIEWER))
    assert (answer.status_code, answer.json()["code"]) == (403, "needs-controller")
    assert (await client.delete(path)).status_code == 204
    answer = await client.delete(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "no-such-window")
    assert await hub.get("/api/v1/trace/windows") == []


async def order_near_window(client: httpx.AsyncClient, first: int) -> None:
    """Order a window that would begin too soon, and cancel it; `first`: the first step of which all ranks can know."""
    assert first > 1
    answer = await client.post("/api/v1/trace/windows", json={"steps": 9, "fromStep": 0})
    assert (answer.status_code, answer.json()["fromStep"]) == (201, first), answer.text
    assert (await client.delete(f"/api/v1/trace/windows/{answer.json()['id']}")).status_code == 204


async def order_too_late_windows(hub: Any, client: httpx.AsyncClient, first: int) -> None:
    """Order windows after the job's end, and ones of which not all ranks can know before; `first`: that step."""
    for total, window in ((40, {"fromStep": 40}), (first, {}), (first, {"fromStep": first - 1})):
        hub.hub.ranks.progress = Progress(total_iterations=total)
        answer = await client.post("/api/v1/trace/windows", json={"steps": 9} | window)
        assert (answer.status_code, answer.json()["code"]) == (409, "step-never-reached"), answer.text


async def test_agent_puts_faults_and_windows_in_the_control_document(hub: Any, worker: Any, until: Any) -> None:
    mine = worker(hub.url)
    mine.open_rings()
    mine.write_steps(range(2))
    page = DocumentReader(mine.shm_dir / f"{mine.prefix}.control")
    async with mine.agent():

        async def alive() -> bool:
            mine.heartbeat()
            states = (await hub.get("/api/v1/job"))["ranks"]
            return len(states) == 2 and all(rank["state"] == "training" for rank in states)

        await until(alive)
        async with hub.client() as client:
            fault = {"rank": 1, "kind": "compute", "factor": 3.0, "fromStep": 10, "steps": 5}
            window = {"steps": 3, "ranks": [1], "granularity": "base"}
            for path, order in (("/api/v1/faults", fault), ("/api/v1/trace/windows", window)):
                for answer in (await client.post(path, json=order), await client.delete(f"{path}/one")):
                    assert (answer.status_code, answer.json()["code"]) == (403, "needs-controller")
            client.headers.update(bearer(hub, TokenRole.CONTROLLER))
            answer = await client.post("/api/v1/faults", json=fault)
            assert answer.status_code == 201
            given = answer.json()
            answer = await client.post("/api/v1/trace/windows", json=window)
            assert answer.status_code == 201, answer.text
            first = answer.json()["fromStep"]
            assert await hub.get("/api/v1/trace/windows") == [answer.json()]
            answer = await client.post("/api/v1/trace/windows", json={"steps": 1, "ranks": [7]})
            assert (answer.status_code, answer.json()["code"]) == (409, "rank-gone")
            answer = await client.post("/api/v1/trace/windows", json={"steps": 1, "fromStep": 0})
            assert (answer.status_code, answer.json()["code"]) == (409, "steps-over")
            await order_near_window(client, first)
            far = {"steps": 1, "fromStep": 200_000}
            answers = [await client.post("/api/v1/trace/windows", json=far) for _ in range(MAX_WINDOWS)]
            assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(409, "step-too-far")}
            answer = await client.post("/api/v1/trace/windows", json={"steps": 1, "fromStep": 2**31})
            assert answer.status_code == 422
            await order_too_late_windows(hub, client, first)

            async def on_page() -> bool:
                found = page.read() or {}
                return bool(found.get("faults")) and bool(found.get("windows"))

            await until(on_page)
            assert (page.read() or {})["faults"] == [given]
            assert (page.read() or {})["windows"] == [window | {"fromStep": first}]
            assert given | {"id": None} == fault | {"id": None, "peer": None}
            assert (await client.delete(f"/api/v1/faults/{given['id']}")).status_code == 204

            await cancel_window(hub, client)

            async def disconnected() -> bool:
                found = page.read() or {}
                return not found.get("faults") and not found.get("windows")

            await until(disconnected)
    page.close()
    mine.close_rings(unlink=True)


async def test_sigterm_drains_once_more(hub: Any, worker: Any, until: Any) -> None:
    mine = worker(hub.url)
    mine.open_rings()
    mine.write_steps(range(2))
    async with mine.agent() as process:

        async def arrived() -> bool:
            return len(await hub.get("/api/v1/steps")) == 2

        await until(arrived)
        mine.write_steps(range(2, 40))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0

    async def has_all() -> bool:
        return len(await hub.get("/api/v1/steps")) == 40

    await until(has_all)
    mine.close_rings(unlink=True)


@pytest.mark.full("ways in which a launcher ends", but=("closed",))
@pytest.mark.parametrize("how", ["closed", "killed", "asked twice"])
async def test_records_written_after_sigterm_are_sent_until_the_launcher_ends(
    hub: Any, worker: Any, until: Any, how: str
) -> None:
    mine = worker(hub.url)
    mine.open_rings()
    launcher = RingWriter(str(mine.shm_dir / f"{mine.prefix}.worker.ring"), 64, 0, b"{}")
    mine.write_steps(range(2))
    async with mine.agent() as process:

        async def has(count: int) -> None:
            async def arrived() -> bool:
                launcher.heartbeat()
                return len(await hub.get("/api/v1/steps")) == count

            await until(arrived)

        await has(2)
        process.terminate()
        for step in range(2, 6):
            mine.write_steps([step])
            await has(step + 1)
        assert process.returncode is None
        if how == "closed":
            launcher.close(False)
        elif how == "asked twice":
            process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    mine.close_rings(unlink=True)


async def test_an_agent_without_environment_lists_what_is_missing(worker: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "megatronapp_analyzer.agent", stderr=asyncio.subprocess.PIPE, env={"PATH": os.defpath}
    )
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 64
    assert b"MEGATRONAPP_" in stderr


async def test_a_killed_agent_is_replaced_without_loss(hub: Any, worker: Any, until: Any) -> None:
    mine = worker(hub.url)
    mine.open_rings()

    async def has(count: int) -> None:
        async def arrived() -> bool:
            return len(await hub.get("/api/v1/steps")) == count

        await until(arrived)

    async with mine.agent() as first:
        mine.write_steps(range(10))
        await has(10)
        first.kill()
        await first.wait()
    mine.write_steps(range(10, 30))
    async with mine.agent():
        await has(30)
    job = await hub.get("/api/v1/job")
    assert job["tracer"]["lost"] == 0
    assert [step["complete"] for step in await hub.get("/api/v1/steps")] == [True] * 30
    mine.close_rings(unlink=True)


RANK_PROCESS = """
import json, sys, time
from megatronapp_common.web.tokens import TokenRole
from megatronapp_native import RingWriter
directory, prefix, jobs = sys.argv[1], sys.argv[2], json.load(sys.stdin)
writers = []
for job in jobs:
    path = f"{directory}/{prefix}.rank{job['rank']}.ring"
    writers.append(RingWriter(path, 4096, 0, json.dumps(job["metadata"]).encode()))
    for record in job["records"]:
        writers[-1].record(*record)
print("written", flush=True)
time.sleep(600)
"""


async def test_records_of_a_killed_rank_are_sent_and_the_agent_ends(hub: Any, worker: Any, until: Any) -> None:
    mine = worker(hub.url)
    given = [
        {
            "rank": rank,
            "metadata": mine.job.ring_header(rank)["metadata"],
            "records": [fields for step in range(6) for fields in mine.fields(rank, step)],
        }
        for rank in (0, 1)
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", RANK_PROCESS, str(mine.shm_dir), mine.prefix),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S) == b"written\n"
    async with mine.agent() as agent:

        async def arrived() -> bool:
            return len(await hub.get("/api/v1/steps")) == 6

        await until(arrived)
        process.kill()
        await process.wait()
        assert await asyncio.wait_for(agent.wait(), DEADLINE_S) == 0

    async def ended() -> bool:
        return [rank["state"] for rank in (await hub.get("/api/v1/job"))["ranks"]] == ["ended"] * 2

    await until(ended)


async def test_a_window_before_the_first_step_of_a_resumed_job_begins_after_its_checkpoint(hub: Any) -> None:
    hub.hub.ranks.progress = Progress(iteration=1000)
    async with hub.client() as client:
        client.headers.update(bearer(hub, TokenRole.CONTROLLER))
        answer = await client.post("/api/v1/trace/windows", json={"steps": 3})
    assert (answer.status_code, answer.json()["fromStep"]) == (201, 999 + STEPS_AHEAD), answer.text
