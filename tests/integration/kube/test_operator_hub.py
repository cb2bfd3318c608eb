"""The hub of a job that is edited, or whose operator becomes another release."""

import base64
import dataclasses
from typing import Any

import kube
import pytest
from operator_simulation import KEY, SETTINGS, OperatorSimulation, manifest, simulated_operator

from megatronapp_common.web.tokens import job_secret
from megatronapp_operator.backends.kubernetes.client.resources import CONFIG_MAPS, JOBS, PODS, SECRETS, Object
from megatronapp_operator.keys import KeyRing

pytestmark = pytest.mark.asyncio
HUB: dict[str, Any] = {"analyzer": {"enabled": True}, "trace": {"enabled": True}}
NEXT = dataclasses.replace(SETTINGS, analyzer_image="megatronapp/analyzer:next")


async def train(stage: OperatorSimulation) -> dict[str, Object]:
    """The pods, once the ranks train and nothing happens any more."""
    await stage.rest()
    stage.report_progress("job")
    await stage.rest()
    return await stage.nodes.pods()


async def fail(stage: OperatorSimulation) -> dict[str, Object]:
    """The pods of the gang that follows the failure of a worker."""
    await stage.nodes.end("job-worker-1", 42, message="boom")
    await stage.rest()
    await stage.pass_time(60)
    return await train(stage)


async def edit(stage: OperatorSimulation, **spec: Any) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    path = JOBS.path(stage.namespace, "job")
    answer = await stage.nodes.client.patch(path, json={"spec": spec}, headers=headers)
    assert answer.is_success, answer.text


async def manifest_of_hub(stage: OperatorSimulation) -> str:
    found = await stage.nodes.api.get(CONFIG_MAPS, stage.namespace, "job-job")
    assert found is not None
    return str(found["data"]["job.yaml"])


def uid(pods: dict[str, Object]) -> str:
    return str(pods["job-hub"]["metadata"]["uid"])


def images(pods: dict[str, Object]) -> set[str]:
    """Return the images of hub and agents."""
    found = {container["image"] for pod in pods.values() for container in pod["spec"]["containers"]}
    return {image for image in found if "analyzer" in image}


def secrets(pods: dict[str, Object]) -> set[str]:
    """Names of the Secrets that they mount."""
    return {
        volume["secret"]["secretName"]
        for pod in pods.values()
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }


async def test_a_key_that_rotates_leaves_a_running_attempt_alone_and_is_taken_by_the_next(
    plane: kube.ControlPlane, namespace: str
) -> None:
    new = "cd" * 32
    async with simulated_operator(plane, namespace) as stage:
        await stage.nodes.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        first = await train(stage)
        old_name = secrets(first)
        stage.keys = KeyRing([new, KEY])
        await stage.begin()
        pods = await train(stage)
        assert {pod["metadata"]["uid"] for pod in pods.values()} == {pod["metadata"]["uid"] for pod in first.values()}
        await stage.nodes.api.delete(PODS, pods["job-hub"], grace_s=0)
        within = await train(stage)
        assert uid(within) != uid(first) and secrets(within) == old_name
        after = await fail(stage)
        job = await stage.job()
        found = {}
        for name in old_name | secrets(after):
            found[name] = await stage.nodes.api.get(SECRETS, namespace, name)
    assert len(old_name) == len(secrets(after)) == 1 and old_name != secrets(after)
    assert secrets(after) == {f"job-tokens-{job['metadata']['uid'][:8]}-{job['status']['pinned']['keyId']}"}
    values = {name: base64.b64decode(secret["data"]["secret"]).decode() for name, secret in found.items() if secret}
    of = {KEY: old_name, new: secrets(after)}
    assert values == {name: job_secret(key, job["metadata"]["uid"]) for key, names in of.items() for name in names}


async def test_a_key_that_is_lost_leaves_a_running_attempt_alone(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await stage.nodes.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        first = await train(stage)
        stage.keys = KeyRing(["cd" * 32])
        await stage.begin()
        await stage.nodes.api.delete(PODS, first["job-hub"], grace_s=0)
        pods = await train(stage)
        after = await fail(stage)
    assert uid(pods) != uid(first) and secrets(pods) == secrets(first) != secrets(after)


async def test_a_hub_of_an_older_release_is_replaced_only_between_attempts(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await stage.nodes.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        first = await train(stage)
        second = await fail(stage)
        assert uid(second) == uid(first) and images(second) == {SETTINGS.analyzer_image}
        stage.settings = NEXT
        await stage.begin()
        assert uid(await train(stage)) == uid(first)
        await stage.nodes.api.delete(PODS, second["job-hub"], grace_s=0)
        within = await train(stage)
        assert uid(within) != uid(first) and images(within) == {SETTINGS.analyzer_image}
        third = await fail(stage)
        fourth = await fail(stage)
    assert uid(third) != uid(within) and images(third) == {NEXT.analyzer_image}
    assert uid(fourth) == uid(third)


async def test_the_next_attempt_of_an_edited_job_has_a_hub_that_reads_the_edit(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await stage.nodes.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        first = await train(stage)
        await edit(stage, training={"lr": 0.02})
        second = await fail(stage)
        assert uid(second) == uid(first), "the hub reads no learning rate"
        await edit(stage, scope={"training": {"startPaused": True}})
        assert uid(await train(stage)) == uid(first), "the gang has no control, either"
        assert "startPaused" not in await manifest_of_hub(stage)
        third = await fail(stage)
        assert uid(third) != uid(first) and "startPaused: true" in await manifest_of_hub(stage)
        assert uid(await fail(stage)) == uid(third)
        await edit(stage, suspend=True)
        await stage.rest()
        await edit(stage, suspend=False, analyzer={"gpuHourPrice": 2.5})
        resumed = await train(stage)
    assert uid(resumed) != uid(third)
