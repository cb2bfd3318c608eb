"""Operator that is older than the definition, and what a cluster can do besides its version."""

import httpx
import kube
import pytest
from operator_simulation import manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS
from megatronapp_operator.controller.capabilities import CONTAINER_RESTARTS, has_container_restarts

pytestmark = pytest.mark.asyncio
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "megatronjobs.megatronapp.io"


def until_served(client: httpx.Client, namespace: str, *, newer: bool) -> None:
    """Wait until the API server creates jobs by the changed definition, and lists them: at first it answers 429."""

    def served() -> bool:
        made = client.post(JOBS.path(namespace), json=manifest(namespace, "probe"), params={"dryRun": "All"})
        listed = client.get(JOBS.path(namespace))
        return made.is_success and listed.is_success and ("newerField" in made.text) is newer

    kube.wait_until(served, "the changed definition")


async def test_fields_of_a_newer_definition_are_ignored_and_named(plane: kube.ControlPlane, namespace: str) -> None:
    """The definition of a newer release has a default for a field that this release does not know."""
    with plane.client() as client:
        definition = client.get(f"{CRDS}/{NAME}").raise_for_status().json()
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        policy = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/runPolicy"
        newer = {"type": "integer", "default": 3}
        assert "newerField" not in schema["properties"]["runPolicy"]["properties"]
        patch = [{"op": "add", "path": f"{policy}/properties/newerField", "value": newer}]
        headers = {"Content-Type": "application/json-patch+json"}
        client.patch(f"{CRDS}/{NAME}", json=patch, headers=headers).raise_for_status()
        try:
            until_served(client, namespace, newer=True)
            async with simulated_operator(plane, namespace) as stage:
                await stage.nodes.api.create(JOBS, manifest(namespace))
                await stage.begin()
                await stage.rest()
                assert set(await stage.nodes.pods()) == {"job-worker-0", "job-worker-1"}
                events = (await stage.nodes.api.list_objects(EVENTS, namespace)).items
                assert [event["note"] for event in events if event["reason"] == "UnknownFields"] == [
                    "the definition is newer than this operator, which ignores spec.runPolicy.newerField; upgrade it"
                ]
        finally:
            undo = [{"op": "remove", "path": f"{policy}/properties/newerField"}]
            client.patch(f"{CRDS}/{NAME}", json=undo, headers=headers).raise_for_status()
            until_served(client, namespace, newer=False)  # to the tests that follow


async def test_the_server_reports_whether_containers_may_restart(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        found = await has_container_restarts(stage.nodes.api, namespace)
        assert found == (await stage.nodes.api.minor_version() >= CONTAINER_RESTARTS)
        assert await stage.nodes.pods() == {}


async def test_of_two_installations_the_first_to_see_a_job_has_it(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as first, simulated_operator(plane, namespace) as second:
        second.installation = "other/megatronapp-operator"
        await first.nodes.api.create(JOBS, manifest(namespace))
        await first.begin()
        await second.begin()
        await second.reconcile()
        made = {name: pod["metadata"]["uid"] for name, pod in (await second.nodes.pods()).items()}
        await first.reconcile()  # it saw the job before the other wrote: its write is refused, and it looks again
        await first.rest(with_nodes=False)
        assert (await first.job())["status"]["manager"] == "other/megatronapp-operator"
        await second.rest()
        assert {name: pod["metadata"]["uid"] for name, pod in (await second.nodes.pods()).items()} == made
        assert set(made) == {"job-worker-0", "job-worker-1"}
        events = (await first.nodes.api.list_objects(EVENTS, namespace)).items
        (note,) = [event["note"] for event in events if event["reason"] == "OtherManager"]
        assert note.startswith("the installation other/megatronapp-operator (status.manager) manages this job")
        assert f"kubectl -n {namespace} patch mgj job --subresource=status" in note
        await first.nodes.end("job-worker-1", 42, message="boom")
        before = first.api.count
        await first.rest(with_nodes=False)
        assert first.api.count == before and (await first.job())["status"]["attempt"] == 0
        released = await first.job()
        del released["status"]["manager"]
        await first.nodes.api.replace(JOBS, released, subresource="status")
        await first.rest()
        taken = (await first.job())["status"]
        assert (taken["manager"], taken["attempt"]) == ("megatronapp/megatronapp-operator", 1)
