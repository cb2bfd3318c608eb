"""A real hub on loopback, fed by fake agents over real WebSockets."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.hub.ingest.assembly import PATIENCE_STEPS
from megatronapp_analyzer.model import Cause, JobMoment, SubjectType, Verdict, VerdictState, VerdictSubject
from megatronapp_common.frames import FrameType
from megatronapp_common.trace import RECORD, Counter, RecordKind

pytestmark = pytest.mark.asyncio
VERDICT = Verdict(
    id="v1",
    subject=VerdictSubject(type=SubjectType.RANK, ranks=(2,)),
    cause=Cause.COMPUTE,
    state=VerdictState.CONFIRMED,
    seconds_per_step=0.004,
    seconds_lost=2.0,
    slowdown=2.0,
    confidence=0.9,
    evidence_steps=(3, 4),
    evidence_text=(),
    since=JobMoment(attempt=0, step=3, time=1.0),
)


async def feed(hub: Any, job: Any, steps: range) -> None:
    for worker in range(job.workers):
        async with hub.agent(job, worker) as agent:
            welcome = await agent.hello()
            assert welcome.type == FrameType.WELCOME
            await agent.rings()
            await agent.steps(steps)
            await agent.status(progress={"iteration": steps[-1], "state": "training", "loss": 4.2})
            await agent.send(FrameType.BYE, {"reason": "test"})


async def test_steps_of_two_workers_are_put_together(hub: Any, fake_job: Any, until: Any) -> None:
    job = fake_job()
    await feed(hub, job, range(12))

    async def has_all() -> bool:
        progress = (await hub.get("/api/v1/summary"))["progress"]
        return len(await hub.get("/api/v1/steps")) == 12 and progress is not None

    await until(has_all)
    steps = await hub.get("/api/v1/steps")
    assert [step["step"] for step in steps] == list(range(12))
    assert all(step["complete"] and step["durationNs"] == 10_000_000 for step in steps)
    assert steps[1]["startNs"] - steps[0]["startNs"] == 10_000_000
    summary = await hub.get("/api/v1/summary")
    assert summary["ranks"] == 4
    assert summary["progress"]["loss"] == 4.2
    assert summary["tracer"] | {"lagSeconds": 0, "agents": 0} == {
        "state": "ok",
        "lost": 0,
        "rings": 4,
        "agents": 0,
        "missingRanks": [],
        "lagSeconds": 0,
    }


async def test_a_worker_without_an_agent_is_named_and_the_others_are_judged(
    hub: Any, fake_job: Any, until: Any
) -> None:
    job = fake_job()
    async with hub.agent(job, 0) as agent:
        await agent.hello()
        await agent.rings()
        await agent.steps(range(PATIENCE_STEPS + 6))

        async def judged() -> bool:
            return len(hub.script.seen) == PATIENCE_STEPS + 6

        await until(judged)
        (layout,) = hub.script.layouts
        assert layout.nodes == ("node-0", "node-0", "", "")
        assert [at.pp for at in layout.coordinates] == [0, 0, 1, 1]
        assert (await hub.get("/api/v1/summary"))["tracer"]["missingRanks"] == [2, 3]
        assert (await hub.get("/api/v1/job"))["tracer"]["missingRanks"] == [2, 3]
        async with hub.client() as client:
            assert 'megascan_missing_ranks{job_id="demo"} 2.0' in (await client.get("/metrics")).text
        async with hub.agent(job, 1) as other:
            await other.hello()
            await other.rings()
            await other.steps(range(PATIENCE_STEPS + 7))

            async def found() -> bool:
                return not (await hub.get("/api/v1/summary"))["tracer"]["missingRanks"]

            await until(found)
            await agent.steps([PATIENCE_STEPS + 6])

            async def judged_again() -> bool:
                return len(hub.script.layouts) == 2

            await until(judged_again)
    assert hub.script.layouts[-1].nodes == ("node-0", "node-0", "node-1", "node-1")


async def test_timeline_has_flows_between_matched_ends(hub: Any, fake_job: Any, until: Any) -> None:
    await feed(hub, fake_job(), range(4))

    async def has_all() -> bool:
        return len(await hub.get("/api/v1/steps")) == 4

    await until(has_all)
    timeline = await hub.get("/api/v1/timeline?step=2")
    assert timeline["ranks"] == [0, 1, 2, 3]
    assert len(timeline["flows"]) == 4
    for send, receive in timeline["flows"]:
        assert timeline["kindNames"][str(timeline["kind"][send])] == "send_post"
        assert timeline["kindNames"][str(timeline["kind"][receive])] == "recv_wait"
        assert timeline["peer"][send] == timeline["rank"][receive]
        assert timeline["peer"][receive] == timeline["rank"][send]
        assert timeline["bytes"][send] == 1024
    lengths = {len(column) for name, column in timeline.items() if name in ("rank", "kind", "startNs", "bytes", "peer")}
    assert len(lengths) == 1
    assert min(timeline["startNs"]) == 0
    series = await hub.get("/api/v1/metrics/series?name=loss")
    assert series["steps"] == [0, 1, 2, 3]
    assert series["values"] == pytest.approx([5.0, 4.99, 4.98, 4.97])


async def test_a_verdict_has_the_reason_that_counters_of_its_worker_show(hub: Any, fake_job: Any, until: Any) -> None:
    job = fake_job()
    for worker, throttled in enumerate((0.0, 0.4)):
        sample = np.zeros(1, RECORD)
        sample["kind"], sample["comm"] = RecordKind.COUNTER, Counter.CPU_THROTTLED
        sample["start_ns"], sample["aux"] = job.records(0, 4)["start_ns"].min(), np.float32(throttled).view("<u4")
        async with hub.agent(job, worker) as agent:
            await agent.hello()
            header = {"rank": None, "worker": worker, "first": 0, "lost": 0}
            await agent.send(FrameType.RECORDS, header, sample.tobytes())
    hub.script.by_step[5] = [dataclasses.replace(VERDICT, cause=Cause.HOST)]
    await feed(hub, job, range(6))

    async def is_named() -> bool:
        return len(await hub.get("/api/v1/verdicts")) == 1

    await until(is_named)
    (verdict,) = await hub.get("/api/v1/verdicts")
    assert (verdict["cause"], verdict["reason"]) == ("host", "cpu-throttled")
    assert verdict["evidence"]["text"][-1].endswith("for 0.40 s per second, 0.00 s on the other worker")
    (slow,) = (await hub.get("/api/v1/summary"))["slowRanks"]
    assert slow["reason"] == "cpu-throttled"


async def test_a_hub_that_is_started_again_counts_no_waste_twice(
    tmp_path: Path, serve: Any, fake_job: Any, until: Any
) -> None:
    """Its sums continue those of the hub before."""
    lost = 'megascan_wasted_gpu_seconds_total{cause="compute",job_id="demo"} 8.0'
    with serve(tmp_path) as hub:
        hub.script.by_step[3] = [VERDICT]
        await feed(hub, fake_job(), range(6))

        async def judged() -> bool:
            return (0, 5) in hub.script.seen

        await until(judged)
        assert lost in await metrics_of(hub)
    with serve(tmp_path, script=hub.script) as again:
        assert again.script.seen[6:] == [(0, step) for step in range(6)], "the detector learns from them"
        assert lost in await metrics_of(again)


async def metrics_of(hub: Any) -> str:
    async with hub.client() as client:
        return str((await client.get("/metrics")).text)
