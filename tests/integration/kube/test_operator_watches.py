"""Watches that end amid their events, are replayed or are refused as too old: jobs still reach their right end."""

import asyncio
import os
import pathlib

import kube
import pytest
from operator_process import started
from operator_simulation import OperatorSimulation, manifest, simulated_operator
from watch_cutter import cutting

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(900),
    pytest.mark.full("a sweep over moments at which watches end: minutes"),
]
SEEDS = range(int(os.environ.get("MEGATRONAPP_WATCH_SEEDS", "2")))
FAILURES = 3
WORKERS = {"job-worker-0", "job-worker-1"}
DEADLINE_S = 240.0


async def until_running(stage: OperatorSimulation, attempt: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await stage.nodes.settle()
            pods = await stage.nodes.pods()
            running = [pod for name, pod in pods.items() if name in WORKERS and pod["status"]["phase"] == "Running"]
            attempts = [pod["metadata"]["labels"]["megatronapp.io/attempt"] for pod in running]
            if attempts == [str(attempt)] * len(WORKERS):
                return
            await asyncio.sleep(0.1)


async def reasons(stage: OperatorSimulation) -> list[str]:
    return [item["reason"] for item in (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items]


async def until_over(stage: OperatorSimulation) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await stage.nodes.pods() or "Completed" not in await reasons(stage):
            await stage.nodes.settle()
            await asyncio.sleep(0.1)
        while (await stage.job())["status"]["phase"] != "Succeeded":
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("seed", SEEDS)
async def test_interrupted_watches_do_not_change_the_end(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path, seed: int
) -> None:
    policy = {"maxRestarts": 1000, "backoff": {"initialSeconds": 0, "maxSeconds": 0}, "cleanPodPolicy": "All"}
    folder = tmp_path / "seen"
    folder.mkdir()
    async with simulated_operator(plane, namespace) as stage, cutting(plane, folder, seed) as (seen, cutter):
        with started(seen, tmp_path, namespace) as operator:
            await asyncio.to_thread(operator.wait, operator.leads)
            await stage.nodes.api.create(JOBS, manifest(namespace, runPolicy=policy))
            for attempt in range(FAILURES):
                await until_running(stage, attempt)
                await stage.nodes.end(f"job-worker-{attempt % 2}", 42, message="boom")
            await until_running(stage, FAILURES)
            for name in WORKERS:
                await stage.nodes.end(name, 0)
            await until_over(stage)
            text = operator.text()
        status = (await stage.job())["status"]
        events = await reasons(stage)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", FAILURES, FAILURES)
    assert events.count("GangCreated") == FAILURES + 1 and events.count("Completed") == 1
    assert "Traceback" not in text
    assert cutter.interruptions >= FAILURES and cutter.replays + cutter.expired > 0
