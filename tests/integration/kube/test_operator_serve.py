"""A job that serves, on a real API server: it runs when its model answers, restarts as a gang, and never completes."""

import kube
import pytest
from operator_play import manifest, play

from megatronapp_operator.backends.kubernetes.api import JOBS, PODS, SERVICES

pytestmark = pytest.mark.asyncio


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
        status = (await stage.job())["status"]
        assert status["phase"] == "Running"
        assert status["serveUrl"] == f"http://job-serve.{namespace}.svc.cluster.local:8000"
        assert status["progress"]["state"] == "serving"
        running = next(one for one in status["conditions"] if one["type"] == "Running")
        assert (running["reason"], running["message"]) == ("Serving", "all 2 workers of attempt 0 serve")
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
