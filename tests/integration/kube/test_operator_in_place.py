"""Restart in place on a real API server: pods that stay, orders in their annotations, operators that end in between."""

from collections.abc import Iterable
from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, manifest, simulated_operator

from megatronapp_common.names import ANNOTATION_RESTART, LABEL_ATTEMPT
from megatronapp_operator.backends.kubernetes.client.resources import JOBS
from megatronapp_operator.backends.kubernetes.observe import PollResult, ReportedEnd
from megatronapp_operator.plan import Progress, WorkerOutcome

pytestmark = pytest.mark.asyncio
IN_PLACE: dict[str, Any] = {"runPolicy": {"restart": "InPlace"}}


async def begun(stage: OperatorSimulation, **spec: Any) -> dict[str, str]:
    """A job whose pods run and train; their uids by name."""
    await stage.train(manifest(stage.namespace, **(IN_PLACE | spec)))
    return await uids(stage)


async def uids(stage: OperatorSimulation) -> dict[str, str]:
    pods = await stage.nodes.pods()
    return {name: pod["metadata"]["uid"] for name, pod in pods.items() if "worker" in name}


async def orders(stage: OperatorSimulation) -> dict[str, tuple[str, str | None]]:
    """Attempt and order of each worker."""
    found = {name: pod["metadata"] for name, pod in (await stage.nodes.pods()).items() if "worker" in name}
    return {
        name: (metadata["labels"][LABEL_ATTEMPT], metadata["annotations"].get(ANNOTATION_RESTART))
        for name, metadata in found.items()
    }


def report_ends(stage: OperatorSimulation, codes: dict[int, int], *, attempt: int = 0) -> None:
    """Let the launcher of worker 0 report how ranks have ended."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    ends = {
        index: ReportedEnd(
            attempt=attempt,
            outcome=WorkerOutcome(code=code, reason="RankFailed" if code != 69 else "PeerLost", message="boom"),
            finished_at=stage.now(),
        )
        for index, code in codes.items()
    }
    page = Progress(attempt=attempt, iteration=1)
    memory.poll_result = PollResult(progress=page, launcher_attempt=attempt, ends=ends, received_at=stage.now())


async def test_sound_pods_get_the_order_and_keep_running(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        before = await begun(stage)
        report_ends(stage, {0: 69, 1: 42})
        await stage.rest()
        job = await stage.job()
        assert (job["status"]["attempt"], job["status"]["phase"]) == (1, "Restarting")
        failure = job["status"]["failures"][-1]
        assert (failure["worker"], failure["exitCode"], failure["action"]) == (1, 42, "RestartJob")
        assert await orders(stage) == {"job-worker-0": ("0", None), "job-worker-1": ("0", None)}
        await stage.pass_time(11)
        assert await orders(stage) == {"job-worker-0": ("1", "1 30"), "job-worker-1": ("1", "1 30")}
        assert await uids(stage) == before
        stage.report_progress("job")
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Running"


async def test_a_deleted_pod_is_replaced_among_those_that_stay(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        before = await begun(stage)
        await stage.nodes.end("job-worker-1", 75)
        report_ends(stage, {0: 75})
        await stage.rest()
        await stage.pass_time(11)
        after = await uids(stage)
        assert after["job-worker-0"] == before["job-worker-0"] and after["job-worker-1"] != before["job-worker-1"]
        assert await orders(stage) == {"job-worker-0": ("1", "1 600"), "job-worker-1": ("1", None)}


async def test_an_edit_or_another_key_replaces_all_pods(plane: kube.ControlPlane, namespace: str) -> None:
    """Workers of two templates, or with two secrets, do not gather."""
    async with simulated_operator(plane, namespace) as stage:
        before = await begun(stage)
        job = await stage.job()
        job["spec"]["env"] = [{"name": "NCCL_DEBUG", "value": "INFO"}]
        await stage.nodes.client.put(f"{JOBS.path(namespace)}/job", json=job)
        report_ends(stage, {0: 69, 1: 42})
        await stage.rest()
        await stage.pass_time(11)
        assert not set((await uids(stage)).values()) & set(before.values())


async def test_an_edit_that_only_the_hub_reads_replaces_the_hub_alone(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        before = await begun(stage, analyzer={"enabled": True})
        hub = (await stage.nodes.pods())["job-hub"]["metadata"]["uid"]
        job = await stage.job()
        job["spec"]["analyzer"]["gpuHourPrice"] = 2.5
        await stage.nodes.client.put(f"{JOBS.path(namespace)}/job", json=job)
        report_ends(stage, {0: 69, 1: 42})
        await stage.rest()
        assert (await stage.nodes.pods())["job-hub"]["metadata"]["uid"] == hub
        await stage.pass_time(11)
        assert await uids(stage) == before
        assert {attempt for attempt, _ in (await orders(stage)).values()} == {"1"}
        assert (await stage.nodes.pods())["job-hub"]["metadata"]["uid"] != hub


def ends_at(numbers: Iterable[int], when: str) -> Any:
    chosen = set(numbers)
    return staticmethod(lambda number: when if number in chosen else None)


@pytest.mark.full("more places of one run", but=("after-4",))
@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_operators_that_end_during_a_restart_lose_nothing(
    plane: kube.ControlPlane, namespace: str, when: str, place: int
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        before = await begun(stage)
        report_ends(stage, {0: 69, 1: 42})
        await stage.reconcile()  # the failure is on record
        api: KillableApi = stage.api
        stage.skipped_s += 11
        first = api.count
        api.kill_at = ends_at([first + place], when)
        await stage.rest()
        assert await orders(stage) == {"job-worker-0": ("1", "1 30"), "job-worker-1": ("1", "1 30")}
        assert await uids(stage) == before
        assert (await stage.job())["status"]["restarts"] == 1
