"""R1 with a real kill -9: an operator that is killed again and again, anywhere, brings a job to its right end."""

import asyncio
import os
import pathlib
import random

import kube
import pytest
from operator_process import started
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("MEGATRONAPP_KILLS", "2"))
FAILS_EVERY = 3
WORKERS = ("job-worker-0", "job-worker-1")


async def run_nodes(stage: OperatorSimulation) -> None:
    while True:
        await stage.nodes.settle()
        await asyncio.sleep(0.1)


async def running(stage: OperatorSimulation, attempt: int) -> bool:
    pods = await stage.nodes.pods()
    return len(pods) == len(WORKERS) and all(
        pod["status"]["phase"] == "Running" and pod["metadata"]["labels"]["megatronapp.io/attempt"] == str(attempt)
        for pod in pods.values()
    )


async def ended(stage: OperatorSimulation, attempt: int) -> bool:
    """Let the last gang end well, and return whether all is over."""
    if await running(stage, attempt):
        for name in WORKERS:
            await stage.nodes.end(name, 0)
    return (await stage.job())["status"]["phase"] == "Succeeded" and not await stage.nodes.pods()


async def until_running(stage: OperatorSimulation, attempt: int) -> None:
    while not await running(stage, attempt):
        await asyncio.sleep(0.1)


def end_lease(plane: kube.ControlPlane, namespace: str) -> None:
    """Delete the lease of a killed operator, so that the next one need not wait until it runs out."""
    done = plane.kubectl("delete", "lease", "operator", "-n", namespace, "--ignore-not-found")
    assert done.returncode == 0, done.stderr


@pytest.mark.full("kills of the operator's process; test_operator_interruptions ends it at requests")
async def test_kills_anywhere_leave_neither_doubles_nor_orphans(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    chance, failures = random.Random(1), 0
    policy = {"maxRestarts": 1000, "backoff": {"initialSeconds": 0, "maxSeconds": 0}, "cleanPodPolicy": "All"}
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace, runPolicy=policy))
        nodes = asyncio.create_task(run_nodes(stage))
        for number in range(KILLS):
            with started(plane, tmp_path, namespace, f"life-{number}") as operator:
                await asyncio.to_thread(operator.wait, operator.leads)
                if number % FAILS_EVERY == 0:
                    await until_running(stage, failures)
                    await stage.nodes.end(chance.choice(WORKERS), 42, message="boom")
                    failures += 1
                await asyncio.sleep(chance.uniform(0, 0.6))  # when it is killed is left to chance
            end_lease(plane, namespace)
        number = KILLS
        while not await ended(stage, failures):
            number += 1  # on a busy machine one may lose its lease, and ends
            with started(plane, tmp_path, namespace, f"life-{number}") as operator:
                while operator.process.poll() is None and not await ended(stage, failures):
                    await asyncio.sleep(0.1)
            end_lease(plane, namespace)
        nodes.cancel()
        status = (await stage.job())["status"]
        events = [item["reason"] for item in (await stage.nodes.api.list_objects(EVENTS, namespace)).items]
    assert (status["attempt"], status["restarts"]) == (failures, failures)
    assert events.count("GangCreated") <= failures + 1 and events.count("Completed") <= 1
