"""The hub of a job whose operator becomes another release."""

import dataclasses
from typing import Any

import kube
import pytest
from operator_play import SETTINGS, Play, manifest, play

from megatronapp_operator.backends.kubernetes.api import JOBS, PODS, Object

pytestmark = pytest.mark.asyncio
HUB: dict[str, Any] = {"analyzer": {"enabled": True}, "trace": {"enabled": True}}
NEXT = dataclasses.replace(SETTINGS, analyzer_image="megatronapp/analyzer:next")


async def train(stage: Play) -> dict[str, Object]:
    """The pods, once the ranks train and nothing happens any more."""
    await stage.rest()
    stage.tell("job")
    await stage.rest()
    return await stage.machines.pods()


async def fail(stage: Play) -> dict[str, Object]:
    """The pods of the gang that follows the failure of a worker."""
    await stage.machines.end("job-worker-1", 42, message="boom")
    await stage.rest()
    await stage.pass_time(60)
    return await train(stage)


def uid(pods: dict[str, Object]) -> str:
    return str(pods["job-hub"]["metadata"]["uid"])


def images(pods: dict[str, Object]) -> set[str]:
    """Of hub and agents."""
    found = {one["image"] for pod in pods.values() for one in pod["spec"]["containers"]}
    return {image for image in found if "analyzer" in image}


async def test_a_hub_of_an_older_release_is_replaced_between_attempts_and_never_within_one(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await stage.machines.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        first = await train(stage)
        second = await fail(stage)
        assert uid(second) == uid(first) and images(second) == {SETTINGS.analyzer_image}
        stage.settings = NEXT
        await stage.begin()
        assert uid(await train(stage)) == uid(first)
        await stage.machines.api.delete(PODS, second["job-hub"], grace_s=0)
        within = await train(stage)
        assert uid(within) != uid(first) and images(within) == {SETTINGS.analyzer_image}
        third = await fail(stage)
        fourth = await fail(stage)
    assert uid(third) != uid(within) and images(third) == {NEXT.analyzer_image}
    assert uid(fourth) == uid(third)
