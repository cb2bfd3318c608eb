"""`megatronapp.client` on a cluster: a real API server, gateway and hub."""

import pathlib
import urllib.parse

import gateway
import kube
import pytest
import yaml

from megatronapp.client import Client, HubError, JobConflictError, JobNotFoundError, ManifestError, OperatorError
from megatronapp_common.job import ConditionType, MegatronJob, load_job


def manifest() -> MegatronJob:
    document = yaml.safe_load((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    return load_job(document | {"metadata": {"name": "demo"}})


def test_a_job_is_submitted_awaited_and_deleted(plane: kube.ControlPlane, namespace: str, config: pathlib.Path) -> None:
    with Client.cluster(kubeconfig=str(config)) as client:
        assert client.jobs() == []
        job = client.submit(manifest())
        assert (job.name, job.phase, job.ended) == ("demo", "Pending", False)
        assert job.document["metadata"]["namespace"] == namespace
        assert job.manifest.spec == manifest().spec
        document = job.document
        stored = gateway.GatewayJob(
            namespace=namespace, name="demo", uid=document["metadata"]["uid"], document=document, address=""
        )
        running = {"type": "Running", "status": "True", "reason": "Trains", "message": "Trains."}
        running["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        gateway.set_status(
            plane, stored, phase="Running", conditions=[running], progress={"iteration": 5, "attempt": 0}
        )
        status = job.wait("running", timeout_s=0)
        assert status.is_true(ConditionType.RUNNING)
        assert status.progress is not None and status.progress.iteration == 5
        with pytest.raises(OperatorError, match="timed out waiting for the condition on megatronjobs/demo"):
            job.wait(timeout_s=0)
        with pytest.raises(OperatorError, match="wait: 'Runing' is not known; did you mean Running"):
            job.wait("Runing")
        with pytest.raises(OperatorError, match="timeout_s=-1: write 0 or more seconds"):
            job.wait(timeout_s=-1)
        with pytest.raises(OperatorError, match="demo-worker-1 does not exist"):
            list(job.logs(worker=1))
        with pytest.raises(OperatorError, match="rank and worker select different logs"):
            job.logs(rank=0, worker=1)
        gateway.set_status(plane, stored, phase="Failed")
        with pytest.raises(JobConflictError, match="has ended"):
            client.submit(manifest())
        job.delete(force=True)
        job.wait_deleted(timeout_s=60)
        with pytest.raises(JobNotFoundError):
            client.job("demo")


def test_a_manifest_with_problems_is_refused_before_anything_is_sent(config: pathlib.Path) -> None:
    document = manifest().model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["parallelism"] = {"pipeline": 3}
    with Client.cluster(kubeconfig=str(config)) as client:
        with pytest.raises(ManifestError, match=r"spec\."):
            client.submit(document)
        with pytest.raises(ManifestError, match="cannot read the manifest"):
            client.submit(config / "none.yaml")
        with pytest.raises(ManifestError, match="3 is no manifest"):
            client.submit(3)  # type: ignore[arg-type]
        with pytest.raises(ManifestError, match="standard input"):
            client.submit("-")
        elsewhere = manifest().model_dump(mode="json", by_alias=True, exclude_unset=True)
        elsewhere["metadata"]["namespace"] = "team-b"
        with pytest.raises(ManifestError, match=r"'team-b' is not the namespace of this client.*namespace='team-b'"):
            client.submit(elsewhere)
        assert client.jobs() == []
    with pytest.raises(OperatorError, match="no cluster: "):
        Client.cluster(kubeconfig=str(config), context="none")


def test_a_hub_is_read_through_the_gateway(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    made = gateway.make_job(plane, namespace, "demo")
    with Client.cluster(kubeconfig=str(config), gateway=reviewing.url) as client:
        job = client.job("demo")
        with gateway.hub(made, tmp_path / "hub", port=reviewing.hub_port, key=reviewing.key), job.hub() as hub:
            steps = hub.steps()
            number = int(steps.step.iloc[-1])
            spans = hub.timeline(number)
            assert len(spans) == len(hub.get("timeline", step=number)["rank"]) > 0
            assert set(spans.step) == {number}
            assert spans.start_ns.min() == steps.start_ns.iloc[-1]
            assert hub.steps(number, number).step.tolist() == [number]
            assert hub.series("loss").columns.tolist() == ["attempt", "step", "value"]
            causes = {verdict["cause"] for verdict in hub.verdicts()}
            assert causes <= {"hang"}, "the ranks write nothing more, which is called a hang after some seconds"
            with pytest.raises(HubError, match="step 900000 is neither in memory nor stored"):
                hub.timeline(900_000)
        with job.page() as page:
            parts = urllib.parse.urlsplit(page.address)
        assert urllib.parse.parse_qs(parts.query) == {"job": [f"{namespace}/demo"]}
        assert set(urllib.parse.parse_qs(parts.fragment)) == {"code"}
