"""Devices that workers claim (dynamic resource allocation), on a real API server: GPUs and a channel of NVLink."""

from typing import Any

import kube
import pytest
from operator_simulation import manifest, simulated_operator

from megatronapp_common.errors import JobError
from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, Object
from megatronapp_operator.controller.capabilities import find_pod_groups, has_resource_claims

pytestmark = pytest.mark.asyncio
CLAIMED: dict[str, Any] = {
    "gpusPerNode": 4,
    "procPerNode": 4,
    "gpuResourceName": "resource.k8s.io/claims",
    "podTemplate": {
        "spec": {
            "resourceClaims": [
                {"name": "gpus", "resourceClaimTemplateName": "four-gpus"},
                {"name": "channel", "resourceClaimTemplateName": "nvlink-channel"},
            ],
            "containers": [
                {"name": "trainer", "resources": {"claims": [{"name": "gpus", "request": "gpu"}, {"name": "channel"}]}}
            ],
        }
    },
}


def container(pod: Object, name: str) -> Object:
    found: Object = next(each for each in pod["spec"]["containers"] if each["name"] == name)
    return found


async def test_workers_claim_devices_and_request_none_of_a_plugin(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace, resource_claims=True) as stage:
        assert await has_resource_claims(stage.nodes.api)
        resources = {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
        await stage.train(manifest(namespace, resources=resources, **CLAIMED))
        pods = await stage.nodes.pods()
        status = (await stage.job())["status"]
    assert (sorted(pods), status["phase"]) == (["job-worker-0", "job-worker-1"], "Running")
    for pod in pods.values():
        assert pod["spec"]["resourceClaims"] == CLAIMED["podTemplate"]["spec"]["resourceClaims"]
        assert container(pod, "trainer")["resources"] == {
            "claims": [{"name": "gpus", "request": "gpu"}, {"name": "channel"}],
            **resources,
        }
        assert not [toleration for toleration in pod["spec"]["tolerations"] if "resource.k8s.io" in toleration["key"]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CLAIMED, "podTemplate.spec.resourceClaims needs an API server that serves resource.k8s.io"),
        (
            {"scheduling": {"gang": "Kubernetes"}},
            "scheduling.gang: Kubernetes needs an API server that serves PodGroup",
        ),
    ],
    ids=["claims", "gang"],
)
async def test_a_job_waits_where_the_cluster_lacks_what_it_needs(
    plane: kube.ControlPlane, namespace: str, spec: dict[str, Any], message: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        assert await find_pod_groups(stage.nodes.api) is None  # alpha up to 1.36
        await stage.api.create(JOBS, manifest(namespace, **spec))
        await stage.begin()
        with pytest.raises(JobError, match=message) as raised:
            await stage.rest()
        await stage.reconciler.report_trouble((namespace, "job"), raised.value)
        events = [item["note"] for item in (await stage.nodes.api.list_objects(EVENTS, namespace)).items]
        assert await stage.nodes.pods() == {}
    assert any(message in note for note in events)
