"""A job that serves, on a real API server: it runs when its model answers, restarts as a gang, and never completes."""

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, PODS, SERVICES
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.plan import ControlAction
from megatronapp_operator.plan_io.hub_summary import HubSummary

pytestmark = pytest.mark.asyncio


async def controls(stage: OperatorSimulation, *numbers: int) -> list[str]:
    """Return the events of control actions, after the hub has reported these, in the order of time."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    actions = tuple(ControlAction(id=number, text=f"jane cancelled run {number}") for number in numbers)
    memory.poll_result = PollResult(summary=HubSummary(controls=actions))
    await stage.rest()
    found = (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items
    notes = sorted((event["eventTime"], event["note"]) for event in found if event["reason"] == "ScopeControl")
    return [note for _, note in notes]


async def test_a_served_model_runs_until_it_is_suspended(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
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
        services = (await stage.nodes.api.list_objects(SERVICES, namespace)).items
        assert {service["metadata"]["name"] for service in services} == {"job-hub", "job-serve", "job-workers"}
        stage.report_progress("job", state="starting", iteration=0)
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Starting"
        stage.report_progress("job", state="serving", iteration=0, tokens_per_second=0.0)
        await stage.rest()
        assert await stage.reconciler.compare_owned_objects([namespace]) == []
        status = (await stage.job())["status"]
        assert status["phase"] == "Running"
        assert status["serveUrl"] == f"http://job-serve.{namespace}.svc.cluster.local:8000"
        assert status["progress"]["state"] == "serving"
        running = next(condition for condition in status["conditions"] if condition["type"] == "Running")
        assert (running["reason"], running["message"]) == ("Serving", "all 2 workers of attempt 0 serve")
        assert await controls(stage, 1, 2) == ["jane cancelled run 1", "jane cancelled run 2"]
        await stage.begin()  # another operator
        await stage.rest()
        assert await controls(stage, 1, 2, 3) == [f"jane cancelled run {number}" for number in (1, 2, 3)]
        stage.report_progress("job", state="serving", iteration=0)
        await stage.pass_time(7200)
        assert (await stage.job())["status"]["phase"] == "Running", "nobody has asked for two hours"
        await stage.nodes.end("job-worker-1", 1, reason="RankKilled")
        await stage.nodes.end("job-worker-0", 69, reason="PeerLost")
        await stage.rest()
        await stage.pass_time(60)
        assert (await stage.job())["status"]["attempt"] == 1
        stage.report_progress("job", state="serving", iteration=0)
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Running"
        plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Suspended"
        pods = (await stage.nodes.api.list_objects(PODS, namespace)).items
        assert not [pod for pod in pods if "-worker-" in pod["metadata"]["name"]]
