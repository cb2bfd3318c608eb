"""Answers of the interface, the live socket, and Prometheus."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto_rule import dropped, read_perfetto
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.app import build_api
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.settings import load_job_file
from megatronapp_analyzer.hub.state import faults
from megatronapp_analyzer.model import Cause, JobMoment, SubjectType, Verdict, VerdictState, VerdictSubject
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.tokens import TokenRole

pytestmark = pytest.mark.asyncio
DEADLINE_S = 120.0


def slow_rank(state: VerdictState = VerdictState.CONFIRMED, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "id": "v1",
        "subject": VerdictSubject(type=SubjectType.RANK, ranks=(2,), worker=1, node="node-1"),
        "cause": Cause.COMPUTE,
        "state": state,
        "seconds_per_step": 0.004,
        "seconds_lost": 0.012,
        "slowdown": 2.0,
        "confidence": 0.97,
        "evidence_steps": (3, 4),
        "evidence_text": ("compute twice as long",),
        "since": JobMoment(attempt=0, step=3, time=1.0),
        "sentence": "Rank 2 computes slowly.",
    }
    return Verdict(**(fields | changes))


@pytest.fixture
def feed(hub: Any, until: Any) -> Callable[..., Any]:
    """Bring steps of all workers and wait until the hub has them."""

    async def bring(job: Any, steps: range, **how: Any) -> None:
        for worker in range(job.workers):
            async with hub.agent(job, worker) as agent:
                await agent.hello()
                await agent.rings()
                await agent.steps(steps, **how)
                await agent.status()

        async def has_all() -> bool:
            got = {(step["attempt"], step["step"]) for step in await hub.get("/api/v1/steps")}
            return {(job.attempt, step) for step in steps} <= got

        await until(has_all)

    return bring


async def families(hub: Any) -> dict[str, Any]:
    async with hub.client() as client:
        text = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def next_frame(page: Any, kind: int, accept: Callable[[Frame], bool] = lambda frame: True) -> Frame:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            frame = frames.decode(await page.recv())
            if frame.type == kind and accept(frame):
                return frame


async def test_the_openapi_document_is_the_committed_document(hub: Any) -> None:
    served = await hub.get("/api/v1/openapi.json")
    committed = Path(__file__).parents[3] / "frontend" / "src" / "api" / "hub.json"
    assert json.loads(committed.read_text()) == json.loads(json.dumps(build_api().openapi()))
    assert served == json.loads(committed.read_text())


async def test_empty_hub_answers(hub: Any) -> None:
    job = await hub.get("/api/v1/job")
    assert (job["phase"], job["ranks"], job["progress"]) == ("Pending", [], None)
    assert job["tracer"]["state"] == "off"
    assert (await hub.get("/api/v1/heatmap"))["values"] == []
    assert await hub.get("/api/v1/verdicts") == []
    async with hub.client() as client:
        for path in ("/api/v1/timeline", "/api/v1/timeline?step=4", "/api/v1/trace"):
            answer = await client.get(path)
            assert answer.status_code == 404
            assert answer.json()["code"] == "step-not-held"
        answer = await client.get("/api/v1/heatmap?metric=colour")
        assert answer.status_code == 422
        assert "colour" in answer.text or "metric" in answer.json()["message"]
        assert set(answer.json()) == {"code", "message", "hint"}


async def test_a_repeated_scalar_parameter_is_refused(hub: Any) -> None:
    async with hub.client() as client:
        for query, status, message in (
            ("steps?from=1&to=3&from=2", 422, "from: must be given once, and is given 2 times"),
            ("heatmap?to=1&to=1&metric=&metric=&to=1", 422, "metric: must be given once, and is given 2 times; to: "),
            ("timeline?step=1&step=2", 422, "step: "),
            ("timeline?step=1&pixels=9&rank=0&rank=1", 404, "step 1"),
        ):
            answer = await client.get(f"/api/v1/{query}")
            assert (answer.status_code, answer.json()["message"].startswith(message)) == (status, True), answer.text
        assert (await client.get("/api/v1/steps?other=1&other=2")).json() == [], "no parameter of the operation"


async def test_a_part_of_a_timeline_and_bounds_that_make_none(hub: Any, fake_job: Any, feed: Any) -> None:
    await feed(fake_job(), range(3))
    whole = await hub.get("/api/v1/timeline?step=1")
    assert whole["window"] is None
    part = await hub.get("/api/v1/timeline?step=1&pixels=10&firstTrack=1&tracks=2&fromNs=2500000&toNs=7500000&span=0")
    window = part["window"]
    assert (window["spans"], window["firstTrack"], window["tracks"], window["pixels"]) == (20, 1, 2, 10)
    assert (window["rankRuns"], window["stepFromNs"], window["stepToNs"]) == ([[0, 4]], 0, 10_000_000)
    assert part["kind"] == [whole["kind"][place] for place in window["place"]]
    assert set(part["rank"]) == {0, 1, 2}, "rank 0 by its span"
    assert (await hub.get("/api/v1/timeline?step=1&pixels=10&rank=3&wholeUpTo=5"))["ranks"] == [3]
    assert (await hub.get("/api/v1/timeline?step=1&pixels=10&wholeUpTo=50")) == whole
    async with hub.client() as client:
        for query, code, text in (
            ("firstTrack=3", "pixels-missing", "firstTrack"),
            ("pixels=9&rank=1&tracks=2", "ranks-or-tracks", "rank"),
            ("pixels=9&fromNs=5&toNs=5", "empty-window", "toNs"),
            ("pixels=9000", "invalid", "pixels"),
            ("pixels=9&tracks=513", "invalid", "tracks"),
            ("pixel=9", "invalid", "pixel"),
        ):
            answer = await client.get(f"/api/v1/timeline?{query}")
            assert answer.status_code == 422, query
            assert code in answer.json()["code"]
            assert text in answer.json()["message"] + answer.json()["hint"]


async def test_slowdowns_blame_and_the_tracer_of_whole_steps(hub: Any, fake_job: Any, feed: Any) -> None:
    assert (await hub.get("/api/v1/slowdowns"))["steps"] == []
    assert (await hub.get("/api/v1/tracer"))["workers"] == []
    await feed(fake_job(), range(10))
    found = await hub.get("/api/v1/slowdowns?from=3&to=8")
    assert (found["steps"], found["peers"], found["slowdown"]) == ([3, 4, 5, 6, 7, 8], "work", 1.0)
    assert [(cell["stage"], cell["replica"], cell["ranks"]) for cell in found["cells"]] == [
        (0, 0, [0]),
        (0, 1, [1]),
        (1, 0, [2]),
        (1, 1, [3]),
    ]
    assert (await hub.get("/api/v1/slowdowns?peers=pooled"))["peers"] == "pooled"
    blame = await hub.get("/api/v1/blame")
    assert (blame["step"], blame["blamed"], blame["victims"]) == (9, [], [])
    tracer = await hub.get("/api/v1/tracer")
    assert [(worker["worker"], worker["ranks"], worker["lost"]) for worker in tracer["workers"]] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    assert tracer["overhead"] == pytest.approx(5 * 1000 / 10e6, rel=0.3)
    async with hub.client() as client:
        missing = await client.get("/api/v1/blame?step=77")
        assert (missing.status_code, missing.json()["code"]) == (404, "step-not-held")
        assert (await client.get("/api/v1/slowdowns?peers=some")).status_code == 422


async def test_the_blame_of_the_newest_step_is_a_metric(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    assert not (await families(hub))["megascan_step_lost_seconds"].samples
    await feed(fake_job(), range(4))

    async def computed() -> bool:
        return bool((await families(hub))["megascan_step_blamed_seconds"].samples)

    await until(computed)


async def test_ranges_are_inclusive(hub: Any, fake_job: Any, feed: Any) -> None:
    await feed(fake_job(), range(10))
    assert [step["step"] for step in await hub.get("/api/v1/steps?from=3&to=5")] == [3, 4, 5]
    assert (await hub.get("/api/v1/heatmap?metric=step&from=8"))["steps"] == [8, 9]
    assert (await hub.get("/api/v1/metrics/series?name=loss&to=1"))["steps"] == [0, 1]
    heat = await hub.get("/api/v1/heatmap?metric=compute&from=2&to=2")
    assert heat["values"] == [[pytest.approx(0.006)]] * 4
    slow = await hub.get("/api/v1/heatmap?metric=slowdown&from=2&to=2")
    assert slow["values"] == [[pytest.approx(1.0)]] * 4


async def test_a_resumed_attempt_repeats_steps(hub: Any, fake_job: Any, feed: Any) -> None:
    await feed(fake_job(), range(6))
    await feed(fake_job(attempt=1), range(3, 8))
    steps = [(step["attempt"], step["step"]) for step in await hub.get("/api/v1/steps")]
    assert steps == [(0, step) for step in range(6)] + [(1, step) for step in range(3, 8)]
    assert (await hub.get("/api/v1/job"))["attempt"] == 1
    assert (await hub.get("/api/v1/timeline?step=4"))["attempt"] == 1
    assert (await hub.get("/api/v1/timeline?step=4&attempt=0"))["attempt"] == 0


async def test_memory_is_bounded_and_sums_stay(tmp_path: Path, serve: Any, fake_job: Any, until: Any) -> None:
    job = fake_job(data=1)
    with serve(tmp_path / "state", limits=StoreLimits(full_steps=5)) as hub:
        async with hub.agent(job, 0) as agent:
            await agent.hello()
            await agent.rings()
            await agent.steps(range(12))

            async def has_all() -> bool:
                return len(await hub.get("/api/v1/steps")) == 12

            await until(has_all)
        async with hub.client() as client:
            assert [step.view.step for step in hub.hub.ingest.store.newest(12)] == list(range(7, 12))
            assert (await client.get("/api/v1/timeline?step=6")).status_code == 200, "it is on the disk"
            assert (await client.get("/api/v1/timeline?step=12")).status_code == 404
        assert len((await hub.get("/api/v1/heatmap"))["steps"]) == 12


async def test_trace_opens_with_arrows(hub: Any, fake_job: Any, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await feed(fake_job(), range(3))
    trace = await hub.get("/api/v1/trace?from=1&to=2")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {1, 2}
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    starts = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    assert len(starts) == 8
    assert starts.keys() == ends.keys()
    assert all(ends[key]["ts"] > starts[key]["ts"] and ends[key]["tid"] != starts[key]["tid"] for key in starts)
    losses = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["name"] == "loss"]
    assert [event["args"]["value"] for event in losses] == pytest.approx([4.99, 4.98])
    for limit in ("NESTED_ROWS", "MOST_ROWS"):
        monkeypatch.setattr(f"megatronapp_analyzer.hub.export.nesting.{limit}", 0)
    async with hub.client() as client:
        refused = await client.get("/api/v1/trace")
    assert (refused.status_code, refused.json()["code"]) == (422, "too-many-spans")


async def test_trace_around_a_verdict_is_a_file_for_perfetto(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    hub.script.by_step[3] = [slow_rank()]
    await feed(fake_job(), range(5))

    async def is_known() -> bool:
        return bool(await hub.get("/api/v1/verdicts"))

    await until(is_known)
    verdict = (await hub.get("/api/v1/verdicts"))[0]["id"]
    async with hub.client() as client:
        answer = await client.get("/api/v1/trace", params={"verdict": verdict, "format": "perfetto"})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == 'attachment; filename="demo-verdict.pftrace"'
        viewed = read_perfetto(answer.content)
        assert {values["step"] for values in viewed.arguments} == set(range(5))
        assert dropped(viewed.spans) == []
        refused = await client.get("/api/v1/trace", params={"verdict": verdict, "from": 1})
        assert (refused.status_code, refused.json()["code"]) == (422, "verdict-or-steps")
        unknown = await client.get("/api/v1/trace", params={"verdict": "v0"})
        assert (unknown.status_code, unknown.json()["code"]) == (404, "no-verdict")


async def test_a_page_receives_state_steps_metrics_and_verdicts(hub: Any, fake_job: Any, feed: Any) -> None:
    hub.script.by_step[3] = [slow_rank()]
    async with hub.page() as page:
        first = frames.decode(await page.recv())
        assert (first.type, first.header["phase"]) == (FrameType.SNAPSHOT, "Pending")
        assert first.header["serverTime"] > 0
        assert frames.decode(await page.recv()).header == {"verdicts": []}
        feeding = asyncio.create_task(feed(fake_job(), range(5)))
        steps = await next_frame(page, FrameType.STEPS)
        header = steps.header
        table = np.frombuffer(steps.body, "<f4").reshape(len(header["metrics"]), len(header["ranks"]), -1)
        assert table.shape[2] == len(header["steps"]) == len(header["startsNs"])
        assert table[header["metrics"].index("step")] == pytest.approx(0.01)
        metrics = await next_frame(page, FrameType.METRICS)
        assert metrics.header["series"]["loss"]["values"][0] == pytest.approx(5.0)
        verdicts = await next_frame(page, FrameType.VERDICTS)
        assert verdicts.header["verdicts"][0]["sentence"] == "Rank 2 computes slowly."
        assert verdicts.header["verdicts"][0]["effect"]["gpuHours"] == pytest.approx(0.012 * 4 / 3600, rel=0.01)
        await next_frame(page, FrameType.SNAPSHOT, lambda frame: frame.header["phase"] == "Running")
        await feeding


async def test_verdicts_reach_summary_and_disk(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    hub.script.by_step[2] = [slow_rank(VerdictState.SUSPECT)]
    hub.script.by_step[4] = [slow_rank()]
    await feed(fake_job(), range(6))

    async def named() -> bool:
        return bool((await hub.get("/api/v1/summary"))["slowRanks"])

    await until(named)
    verdict = (await hub.get("/api/v1/summary"))["slowRanks"][0]
    assert verdict["subject"] == {"type": "rank", "ranks": [2], "worker": 1, "node": "node-1"}
    effect = {"secondsPerStep": 0.004, "secondsLost": 0.012, "slowdown": 2.0}
    assert verdict["effect"] == effect | {"gpuHours": pytest.approx(0.012 * 4 / 3600, rel=0.01), "cost": None}
    assert await hub.get("/api/v1/verdicts") == [verdict]
    stored = verdict | {"effect": effect}
    assert json.loads((hub.state_dir / "verdicts.json").read_text()) == [stored]


async def test_a_price_of_a_gpu_hour_gives_verdicts_a_cost(
    tmp_path: Path, serve: Any, fake_job: Any, until: Any
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text("metadata: {name: demo, uid: u}\nspec: {analyzer: {gpuHourPrice: 2500}}\n")
    assert load_job_file(manifest, name=None, uid=None).gpu_hour_price == 2500
    with serve(tmp_path / "state", gpu_hour_price=2500.0) as hub:
        assert (await hub.get("/api/v1/job"))["gpuHourPrice"] == 2500
        hub.script.by_step[3] = [slow_rank()]
        job = fake_job(data=1)
        async with hub.agent(job, 0) as agent:
            await agent.hello()
            await agent.rings()
            await agent.steps(range(6))

            async def priced() -> bool:
                verdicts = await hub.get("/api/v1/verdicts")
                return bool(verdicts and verdicts[0]["effect"]["gpuHours"] == pytest.approx(6.67e-6, rel=0.01))

            await until(priced)
        effect = (await hub.get("/api/v1/verdicts"))[0]["effect"]
        assert effect["cost"] == pytest.approx(2500 * effect["gpuHours"], rel=0.01)


async def test_a_verdict_stays_in_the_summary_until_it_is_cleared(
    hub: Any, fake_job: Any, feed: Any, until: Any
) -> None:
    for step, state in ((1, VerdictState.CONFIRMED), (3, VerdictState.RECOVERING), (5, VerdictState.CLEARED)):
        hub.script.by_step[step] = [slow_rank(state)]
    await feed(fake_job(), range(5))

    async def recovering() -> bool:
        standing = (await hub.get("/api/v1/summary"))["slowRanks"]
        return bool([verdict["state"] for verdict in standing] == ["recovering"])

    await until(recovering)
    await feed(fake_job(), range(5, 7))

    async def over() -> bool:
        return not (await hub.get("/api/v1/summary"))["slowRanks"]

    await until(over)
    assert [verdict["state"] for verdict in await hub.get("/api/v1/verdicts")] == ["cleared"]


async def test_a_failing_detector_stops_nothing(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    hub.script.by_step[2] = RuntimeError("broken")
    hub.script.by_step[4] = [slow_rank()]
    await feed(fake_job(), range(6))

    async def named() -> bool:
        return bool(await hub.get("/api/v1/verdicts"))

    await until(named)
    assert len(hub.script.layouts) == 2
    failures = (await families(hub))["megascan_analyzer_failures"]
    assert [sample.value for sample in failures.samples if sample.name.endswith("_total")] == [1.0]


async def test_hung_and_silent_ranks(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    job = fake_job()
    await feed(job, range(4))
    hung = VerdictSubject(type=SubjectType.RANK, ranks=(1,), worker=0, node="node-0")
    hub.script.hung = [slow_rank(id="h", subject=hung, cause=Cause.HANG)]
    async with hub.agent(job, 0) as agent, hub.agent(job, 1) as other:
        await agent.hello()
        await other.hello()
        await other.status(heartbeatNs=0)

        async def judged() -> bool:
            await agent.status(openSpan={"kind": 3, "step": 4, "microbatch": 1, "startNs": 0})  # a sign of life
            states = [rank["state"] for rank in (await hub.get("/api/v1/job"))["ranks"]]
            return states == ["training", "hung", "silent", "silent"]

        await until(judged)
        assert (await hub.get("/api/v1/summary"))["hungRanks"] == [1]
        span = (await hub.get("/api/v1/job"))["ranks"][0]["openSpan"]
        assert (span["kind"], span["step"], span["microbatch"]) == ("forward", 4, 1)
        async with hub.client() as client:  # ranks are written without their models
            schemas.JobView.model_validate_json((await client.get("/api/v1/job")).content, strict=True)
        await other.status(closed=True)

        async def ended() -> bool:
            return bool((await hub.get("/api/v1/job"))["ranks"][3]["state"] == "ended")

        await until(ended)
        async with hub.client(TokenRole.CONTROLLER) as client:
            fault = {"rank": 3, "kind": "link", "factor": 2, "fromStep": 10, "steps": 5, "peer": 1}
            answer = await client.post("/api/v1/faults", json=fault)
            assert (answer.status_code, answer.json()["code"]) == (409, "rank-gone")
            answer = await client.post("/api/v1/faults", json=fault | {"rank": 0, "factor": 0.5})
            assert answer.status_code == 422
            assert (await client.delete("/api/v1/faults/none")).status_code == 404


async def test_a_fault_that_would_never_act_is_refused(hub: Any, fake_job: Any, feed: Any) -> None:
    job = fake_job()
    await feed(job, range(8))
    controller = hub.client(TokenRole.CONTROLLER)
    async with hub.agent(job, 0) as agent, hub.agent(job, 1) as other, controller as client:
        for connection in (agent, other):
            await connection.hello()
            await connection.status()
        fault = {"rank": 0, "kind": "host", "factor": 2, "fromStep": 3, "steps": 5}
        answer = await client.post("/api/v1/faults", json=fault)
        assert (answer.status_code, answer.json()["code"]) == (409, "steps-over")
        assert "step 7 is finished already" in answer.json()["message"]
        assert "step 12" in answer.json()["hint"]
        assert (await client.post("/api/v1/faults", json=fault | {"steps": 6})).status_code == 201
        object.__setattr__(hub.hub, "identity", dataclasses.replace(hub.hub.identity, traced=False))
        answer = await client.post("/api/v1/faults", json=fault | {"steps": 6})
        assert (answer.status_code, answer.json()["code"]) == (409, "tracing-off")
        assert "spec.trace.enabled" in answer.json()["hint"]


async def test_ended_faults_free_space_and_a_full_document_is_refused(
    hub: Any, fake_job: Any, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "MAX_FAULT_BYTES", 600)
    monkeypatch.setattr(faults, "MAX_ENDED", 3)
    job = fake_job()
    await feed(job, range(8))
    async with hub.agent(job, 0) as agent, hub.client(TokenRole.CONTROLLER) as client:
        await agent.hello()
        await agent.status()
        fault = {"rank": 0, "kind": "host", "factor": 2, "fromStep": 8, "steps": 1}
        codes: list[int] = []
        while not codes or codes[-1] == 201:
            codes.append((await client.post("/api/v1/faults", json=fault)).status_code)
            assert len(codes) < 20
        assert codes[-1] == 409 and len(codes) > 4
        await feed(job, range(8, 12))
        assert (await client.post("/api/v1/faults", json=fault | {"fromStep": 20})).status_code == 201
        assert [fault["fromStep"] for fault in hub.hub.faults.document()["faults"]] == [20]
        assert len(await hub.get("/api/v1/faults")) == 4


async def test_a_hub_whose_analysis_ends_is_not_ready_and_notifies_its_process(hub: Any, until: Any) -> None:
    ended = threading.Event()
    hub.hub.on_failure = ended.set

    def broken(_now_s: float) -> None:
        raise RuntimeError("broken")

    hub.live.publish_updates = broken

    async def unready() -> bool:
        async with hub.client() as client:
            return bool((await client.get("/readyz")).status_code == 503)

    await until(unready)
    assert hub.hub.failed and ended.is_set()


async def test_metrics_are_valid_bounded_and_cleared(hub: Any, fake_job: Any, feed: Any, until: Any) -> None:
    hub.script.by_step[2] = [slow_rank()]
    hub.script.by_step[5] = [slow_rank(VerdictState.CLEARED, until=JobMoment(attempt=0, step=5, time=2.0))]
    await feed(fake_job(), range(4))

    async def suspected() -> bool:
        return bool((await families(hub))["megascan_suspect_info"].samples)

    await until(suspected)
    found = await families(hub)
    suspect = found["megascan_suspect_info"].samples[0]
    assert suspect.labels == {
        "job_id": "demo",
        "rank": "2",
        "node": "node-1",
        "gpu": "",
        "cause": "compute",
        "state": "confirmed",
    }
    count = [s.value for s in found["megascan_step_duration_seconds"].samples if s.name.endswith("_count")]
    assert count == [4.0]
    (overhead,) = found["megascan_tracer_overhead_ratio"].samples
    assert overhead.value == pytest.approx(5 * 1000 / 10_000_000)
    assert "megascan_imposed_wait_seconds" in found
    phases = found["megascan_phase_duration_seconds"].samples
    forward = [s.value for s in phases if s.labels["phase"] == "forward" and s.labels["pod"] == "demo-worker-0"]
    assert sorted(forward) == pytest.approx([4 * 2 * 0.003, 8.0])
    for family in found.values():
        for sample in family.samples:
            assert not {"step", "microbatch", "timestamp", "uid"} & set(sample.labels)
    job = fake_job()
    await feed(job, range(4, 8))

    async def cleared() -> bool:
        return not (await families(hub))["megascan_suspect_info"].samples

    await until(cleared)
    assert not (await families(hub))["megascan_rank_slowdown_ratio"].samples
    wasted = {s.labels["cause"]: s.value for s in (await families(hub))["megascan_wasted_gpu_seconds"].samples}
    assert wasted["compute"] >= 0.004 * 4
