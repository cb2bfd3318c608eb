"""Objects around a gang: restored where they were deleted, removed where they are not wanted, never in the way."""

from typing import Any

import kube
import pytest
from operator_play import CutApi, Play, manifest, play

from megatronapp_operator.backends.kubernetes.client.api import ObjectList
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.maintenance import RETRY_S, TEND_S
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.backends.kubernetes.reconciler import RECONCILE_RETRY_S
from megatronapp_operator.backends.kubernetes.status_facts import TABLE_ENTRIES
from megatronapp_operator.backends.kubernetes.store import Key
from megatronapp_operator.backends.kubernetes.surroundings import LISTED

pytestmark = pytest.mark.asyncio
HUB: dict[str, Any] = {"analyzer": {"enabled": True}, "trace": {"enabled": True}}
QUOTAS = Resource("v1", "resourcequotas")


async def train(stage: Play, **spec: Any) -> dict[str, str]:
    """Uids of the pods of a job whose ranks train."""
    await stage.machines.api.create(JOBS, manifest(stage.namespace, **spec))
    await stage.begin()
    return await go_on(stage)


async def go_on(stage: Play) -> dict[str, str]:
    await stage.rest()
    stage.tell("job")
    await stage.rest()
    return {name: pod["metadata"]["uid"] for name, pod in (await stage.machines.pods()).items()}


async def edit(stage: Play, **spec: Any) -> None:
    job = await stage.job()
    await stage.machines.api.replace(JOBS, job | {"spec": job["spec"] | spec})
    await stage.rest()


async def names(stage: Play, resource: Resource) -> set[str]:
    found = await stage.machines.api.list_objects(resource, stage.namespace)
    return {one["metadata"]["name"] for one in found.items} - {"kube-root-ca.crt"}


async def reasons(stage: Play) -> list[str]:
    return [one["reason"] for one in (await stage.machines.api.list_objects(EVENTS, stage.namespace)).items]


async def delete(stage: Play, resource: Resource, name: str) -> None:
    found = await stage.machines.api.get(resource, stage.namespace, name)
    assert found is not None
    await stage.machines.api.delete(resource, found)


async def test_what_was_deleted_of_a_running_attempt_comes_back(plane: kube.ControlPlane, namespace: str) -> None:
    async with play(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        whole = [await names(stage, one) for one in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)]
        assert whole[:2] == [{"job-workers", "job-hub"}] * 2
        for resource in (NETWORK_POLICIES, SERVICES):
            await delete(stage, resource, "job-workers")
        await delete(stage, SERVICES, "job-hub")
        await delete(stage, CONFIG_MAPS, "job-job")
        assert await see(stage) == [(namespace, "job")]
        assert [await names(stage, one) for one in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)] == whole
        await delete(stage, CONFIG_MAPS, "job-job")
        await delete(stage, SERVICES, "job-hub")
        await stage.begin()  # by the next process, which may not list, too
        for _ in range(2):
            await stage.pass_time(TEND_S)
        assert [await names(stage, one) for one in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)] == whole
        requests = stage.api.count
        await stage.rest()
        assert (stage.api.count, await go_on(stage)) == (requests, pods)
        assert stage.due[namespace, "job"] <= stage.now() + TEND_S


@pytest.mark.parametrize("spec", [HUB, {"network": {"policy": "None"}}], ids=["hub", "open"])
async def test_a_job_of_which_nothing_was_deleted_costs_next_to_nothing(
    plane: kube.ControlPlane, namespace: str, spec: dict[str, Any]
) -> None:
    async with play(plane, namespace) as stage:
        await train(stage, **spec)
        assert await see(stage) == []
        for _ in range(2):  # the objects may be of another process: once, all of them
            await stage.pass_time(TEND_S)
        before = stage.api.count
        for _ in range(12):
            assert await see(stage) == []
            await stage.pass_time(TEND_S / 12)
        lists = 2 * 12
        assert stage.api.count - before - lists <= 3, "the ConfigMap is looked at and applied, the Secret created"


async def test_what_was_changed_is_made_as_it_was_and_what_was_added_stays(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await train(stage)
        policy = await stage.machines.api.get(NETWORK_POLICIES, namespace, "job-workers")
        service = await stage.machines.api.get(SERVICES, namespace, "job-workers")
        assert policy is not None and service is not None
        policy["spec"]["ingress"] = [{}]
        service["metadata"]["annotations"] = {"example.com/mesh": "on"}
        await stage.machines.api.replace(SERVICES, service)
        assert await see(stage) == []
        await stage.machines.api.replace(NETWORK_POLICIES, policy)
        assert await see(stage) == [(namespace, "job")]
        restored = await stage.machines.api.get(NETWORK_POLICIES, namespace, "job-workers")
        kept = await stage.machines.api.get(SERVICES, namespace, "job-workers")
        assert restored is not None and kept is not None and {} not in restored["spec"]["ingress"]
        assert kept["metadata"]["annotations"]["example.com/mesh"] == "on"
        assert await see(stage) == []


async def test_without_the_right_to_list_all_is_applied_every_hour(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Run as after an upgrade without the chart's new rights."""
    real = CutApi.list_objects

    async def refusing(api: CutApi, resource: Resource, *words: Any, **options: Any) -> ObjectList:
        if resource in LISTED:
            raise ForbiddenError(f"{resource.plural} is forbidden", status=403)
        return await real(api, resource, *words, **options)

    monkeypatch.setattr(CutApi, "list_objects", refusing)
    async with play(plane, namespace) as stage:
        await train(stage)
        assert await see(stage) == await see(stage) == []
        assert len([one for one in caplog.messages if "only within an hour" in one]) == 1
        for _ in range(2):
            await stage.pass_time(TEND_S)
        await delete(stage, SERVICES, "job-workers")
        await stage.pass_time(TEND_S)
        assert await names(stage, SERVICES) == {"job-workers"}


async def see(stage: Play) -> list[Key]:
    """Do what the operator does every few minutes, and return the result."""
    differing = await stage.reconciler.compare_owned_objects([stage.namespace])
    await stage.rest()
    return differing


async def test_nothing_is_restored_while_the_job_is_being_deleted(plane: kube.ControlPlane, namespace: str) -> None:
    """Delete in the foreground, which keeps the job until the garbage collector has removed what it owns."""
    async with play(plane, namespace) as stage:
        await train(stage)
        job = await stage.job()
        job["metadata"]["finalizers"] = ["example.com/hold"]
        await stage.machines.api.delete(JOBS, await stage.machines.api.replace(JOBS, job))
        for resource in (NETWORK_POLICIES, SERVICES):
            await delete(stage, resource, "job-workers")
        await stage.rest()
        await stage.pass_time(2 * TEND_S)
        assert (await stage.job())["metadata"]["generation"] > job["metadata"]["generation"]
        assert [await names(stage, one) for one in (NETWORK_POLICIES, SERVICES)] == [set(), set()]


async def test_an_edited_policy_holds_at_once_and_pods_stay(plane: kube.ControlPlane, namespace: str) -> None:
    async with play(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        await edit(stage, network={"policy": "None"})
        assert await names(stage, NETWORK_POLICIES) == set()
        await edit(stage, network={"policy": "JobOnly"})
        assert await names(stage, NETWORK_POLICIES) == {"job-workers", "job-hub"}
        assert await go_on(stage) == pods


async def test_a_hub_that_is_not_wanted_any_more_ends_with_the_attempt(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        await edit(stage, analyzer={"enabled": False}, trace={"enabled": False})
        assert await go_on(stage) == pods and await names(stage, SERVICES) == {"job-workers", "job-hub"}
        await stage.machines.end("job-worker-1", 42, message="boom")
        await stage.rest()
        await stage.pass_time(60)
        after = await go_on(stage)
        assert set(after) == {"job-worker-0", "job-worker-1"} and not set(after.values()) & set(pods.values())
        assert await names(stage, SERVICES) == await names(stage, NETWORK_POLICIES) == {"job-workers"}


async def test_objects_of_others_are_left_alone_when_something_is_not_wanted_any_more(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await train(stage, **HUB)
        await delete(stage, NETWORK_POLICIES, "job-hub")
        other: Object = {"podSelector": {"matchLabels": {"app": "other"}}}
        meta = {"name": "job-hub", "namespace": namespace}
        body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": other}
        await stage.machines.api.create(NETWORK_POLICIES, body)
        await edit(stage, network={"policy": "None"})
        assert await names(stage, NETWORK_POLICIES) == {"job-hub"}


async def test_a_table_that_cannot_be_written_keeps_no_failure_from_being_judged(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        taken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job-ranks", "namespace": namespace}}
        await stage.machines.api.create(CONFIG_MAPS, taken)
        await train(stage)
        memory = stage.reconciler.memory((namespace, "job"))
        assert memory is not None
        entries = [{"index": 0, "address": "10.0.0.1"}] * (TABLE_ENTRIES + 1)
        memory.poll_result = PollResult(
            rank_table={"attempt": 0, "digest": "d", "workers": entries}, progress=memory.poll_result.progress
        )
        await stage.rest()
        await stage.pass_time(RETRY_S)
        assert (await reasons(stage)).count("NameTaken") == 1
        assert stage.due[namespace, "job"] <= stage.now() + RETRY_S, "it is tried again"
        await stage.machines.end("job-worker-1", 42, message="boom")
        await stage.rest()
        assert (await stage.job())["status"]["attempt"] == 1


async def test_a_hub_that_is_refused_is_looked_at_again_after_its_pause(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        hard = {"count/services": "1"}
        quota = {"metadata": {"name": "one-service", "namespace": namespace}, "spec": {"hard": hard}}
        await stage.machines.api.create(QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota"} | quota)
        kept = await stage.machines.api.get(QUOTAS, namespace, "one-service")
        assert kept is not None
        status = {"hard": hard, "used": {"count/services": "0"}}
        await stage.machines.api.replace(QUOTAS, kept | {"status": status}, subresource="status")
        pods = await train(stage, **HUB)
        assert set(pods) == {"job-worker-0", "job-worker-1"} and "HubRefused" in await reasons(stage)
        assert stage.due[namespace, "job"] > stage.now() + 2 * RECONCILE_RETRY_S
