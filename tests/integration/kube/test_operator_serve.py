"""A job that serves, on a real API server: it runs when its model answers, restarts as a gang, and never completes."""

import kube
import pytest
from operator_play import Play, manifest, play

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, PODS, SERVICES
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.plan import ControlAction
from megatronapp_operator.plan_io.hub_summary import HubSummary

pytestmark = pytest.mark.asyncio


async def controls(stage: Play, *numbers: int) -> list[str]:
    """Return the events of control actions, after the hub has reported these, in the order of time."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    actions = tuple(ControlAction(id=number, text=f"jane cancelled run {number}") for number in numbers)
    memory.poll_result = PollResult(summary=HubSummary(controls=actions))
    await stage.rest()
    found = (await stage.machines.api.list_objects(EVENTS, stage.namespace)).items
    told = sorted((one["eventTime"], one["note"]) for one in found if one["reason"] == "ScopeControl")
    return [note for _, note in told]


async def test_a_served_model_runs_until_it_is_suspended(plane: kube.ControlPlane, namespace: str) -> None:
    async with play(plane, namespace) as stage:
        job = manifest(
            namespace,
            mode="serve",
            parallelism={"pipeline": 2},
            checkpoint={"load": "/ckpt"},
            analyzer={"enabled": True},
        )
        for name in ("model", "training", "data"):
            del job["spec"][name]
        await stage.api.create(JOBS, job)
        await stage.begin()
        await stage.rest()
        services = (await stage.machines.api.list_objects(SERVICES, namespace)).items
        assert {one["metadata"]["name"] for one in services} == {"job-hub", "job-serve", "job-workers"}
        stage.tell("job", state="starting", iteration=0)
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Starting"
        stage.tell("job", state="serving", iteration=0, tokens_per_second=0.0)
        await stage.rest()
        assert await stage.reconciler.compare_owned_objects([namespace]) == []
        status = (await stage.job())["status"]
        assert status["phase"] == "Running"
        assert status["serveUrl"] == f"http://job-serve.{namespace}.svc.cluster.local:8000"
        assert status["progress"]["state"] == "serving"
        running = next(one for one in status["conditions"] if one["type"] == "Running")
        assert (running["reason"], running["message"]) == ("Serving", "all 2 workers of attempt 0 serve")
        assert await controls(stage, 1, 2) == ["jane cancelled run 1", "jane cancelled run 2"]
        await stage.begin()  # another operator
        await stage.rest()
        assert await controls(stage, 1, 2, 3) == [f"jane cancelled run {number}" for number in (1, 2, 3)]
        stage.tell("job", state="serving", iteration=0)
        await stage.pass_time(7200)
        assert (await stage.job())["status"]["phase"] == "Running", "nobody has asked for two hours"
        await stage.machines.end("job-worker-1", 1, reason="RankKilled")
        await stage.machines.end("job-worker-0", 69, reason="PeerLost")
        await stage.rest()
        await stage.pass_time(60)
        assert (await stage.job())["status"]["attempt"] == 1
        stage.tell("job", state="serving", iteration=0)
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Running"
        plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Suspended"
        pods = (await stage.machines.api.list_objects(PODS, namespace)).items
        assert not [one for one in pods if "-worker-" in one["metadata"]["name"]]
