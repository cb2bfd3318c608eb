"""Objects around a gang: restored where they were deleted, removed where they are not wanted, never in the way."""

from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, manifest, simulated_operator

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
from megatronapp_operator.backends.kubernetes.status_writer import TABLE_ENTRIES
from megatronapp_operator.backends.kubernetes.store import Key
from megatronapp_operator.backends.kubernetes.surroundings import LISTED

pytestmark = pytest.mark.asyncio
HUB: dict[str, Any] = {"analyzer": {"enabled": True}, "trace": {"enabled": True}}


async def train(stage: OperatorSimulation, **spec: Any) -> dict[str, str]:
    """Uids of the pods of a job whose ranks train."""
    await stage.nodes.api.create(JOBS, manifest(stage.namespace, **spec))
    await stage.begin()
    return await continue_until_stable(stage)


async def continue_until_stable(stage: OperatorSimulation) -> dict[str, str]:
    await stage.rest()
    stage.report_progress("job")
    await stage.rest()
    return {name: pod["metadata"]["uid"] for name, pod in (await stage.nodes.pods()).items()}


async def edit(stage: OperatorSimulation, **spec: Any) -> None:
    job = await stage.job()
    await stage.nodes.api.replace(JOBS, job | {"spec": job["spec"] | spec})
    await stage.rest()


async def names(stage: OperatorSimulation, resource: Resource) -> set[str]:
    found = await stage.nodes.api.list_objects(resource, stage.namespace)
    return {item["metadata"]["name"] for item in found.items} - {"kube-root-ca.crt"}


async def reasons(stage: OperatorSimulation) -> list[str]:
    return [item["reason"] for item in (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items]


async def delete(stage: OperatorSimulation, resource: Resource, name: str) -> None:
    found = await stage.nodes.api.get(resource, stage.namespace, name)
    assert found is not None
    await stage.nodes.api.delete(resource, found)


async def test_deleted_objects_of_a_running_attempt_are_recreated(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        whole = [await names(stage, resource) for resource in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)]
        assert whole[:2] == [{"job-workers", "job-hub"}] * 2
        for resource in (NETWORK_POLICIES, SERVICES):
            await delete(stage, resource, "job-workers")
        await delete(stage, SERVICES, "job-hub")
        await delete(stage, CONFIG_MAPS, "job-job")
        assert await see(stage) == [(namespace, "job")]
        assert [await names(stage, resource) for resource in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)] == whole
        await delete(stage, CONFIG_MAPS, "job-job")
        await delete(stage, SERVICES, "job-hub")
        await stage.begin()  # by the next process, which may not list, too
        for _ in range(2):
            await stage.pass_time(TEND_S)
        assert [await names(stage, resource) for resource in (NETWORK_POLICIES, SERVICES, CONFIG_MAPS)] == whole
        requests = stage.api.count
        await stage.rest()
        assert (stage.api.count, await continue_until_stable(stage)) == (requests, pods)
        assert stage.due[namespace, "job"] <= stage.now() + TEND_S


@pytest.mark.parametrize("spec", [HUB, {"network": {"policy": "None"}}], ids=["hub", "open"])
async def test_a_job_of_which_nothing_was_deleted_costs_next_to_nothing(
    plane: kube.ControlPlane, namespace: str, spec: dict[str, Any]
) -> None:
    async with simulated_operator(plane, namespace) as stage:
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


async def test_a_quota_that_is_used_up_does_not_keep_what_exists_from_being_applied(
    plane: kube.ControlPlane, namespace: str
) -> None:
    """A new process tries to create: the quota refuses that before the server finds that the object exists."""
    async with simulated_operator(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        plane.set_quota(namespace, {"count/services": "0", "count/configmaps": "0"})
        service = await stage.nodes.api.get(SERVICES, namespace, "job-hub")
        assert service is not None
        service["spec"]["ports"][0]["targetPort"] = 1
        await stage.nodes.api.replace(SERVICES, service)
        await stage.begin()
        for _ in range(2):
            await stage.pass_time(TEND_S)
        restored = await stage.nodes.api.get(SERVICES, namespace, "job-hub")
        assert restored is not None and restored["spec"]["ports"][0]["targetPort"] != 1
        assert await continue_until_stable(stage) == pods


async def test_what_was_changed_is_made_as_it_was_and_what_was_added_stays(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await train(stage)
        policy = await stage.nodes.api.get(NETWORK_POLICIES, namespace, "job-workers")
        service = await stage.nodes.api.get(SERVICES, namespace, "job-workers")
        assert policy is not None and service is not None
        policy["spec"]["ingress"] = [{}]
        service["metadata"]["annotations"] = {"example.com/mesh": "on"}
        await stage.nodes.api.replace(SERVICES, service)
        assert await see(stage) == []
        await stage.nodes.api.replace(NETWORK_POLICIES, policy)
        assert await see(stage) == [(namespace, "job")]
        restored = await stage.nodes.api.get(NETWORK_POLICIES, namespace, "job-workers")
        stored = await stage.nodes.api.get(SERVICES, namespace, "job-workers")
        assert restored is not None and stored is not None and {} not in restored["spec"]["ingress"]
        assert stored["metadata"]["annotations"]["example.com/mesh"] == "on"
        assert await see(stage) == []


async def test_without_the_right_to_list_all_is_applied_every_hour(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Run as after an upgrade without the chart's new rights."""
    real = KillableApi.list_objects

    async def refusing(api: KillableApi, resource: Resource, *arguments: Any, **options: Any) -> ObjectList:
        if resource in LISTED:
            raise ForbiddenError(f"{resource.plural} is forbidden", status=403)
        return await real(api, resource, *arguments, **options)

    monkeypatch.setattr(KillableApi, "list_objects", refusing)
    async with simulated_operator(plane, namespace) as stage:
        await train(stage)
        assert await see(stage) == await see(stage) == []
        assert len([message for message in caplog.messages if "only within an hour" in message]) == 1
        for _ in range(2):
            await stage.pass_time(TEND_S)
        await delete(stage, SERVICES, "job-workers")
        await stage.pass_time(TEND_S)
        assert await names(stage, SERVICES) == {"job-workers"}


async def see(stage: OperatorSimulation) -> list[Key]:
    """Do what the operator does every few minutes, and return the result."""
    differing = await stage.reconciler.compare_owned_objects([stage.namespace])
    await stage.rest()
    return differing


async def test_nothing_is_restored_while_the_job_is_being_deleted(plane: kube.ControlPlane, namespace: str) -> None:
    """Delete in the foreground, which keeps the job until the garbage collector has removed what it owns."""
    async with simulated_operator(plane, namespace) as stage:
        await train(stage)
        job = await stage.job()
        job["metadata"]["finalizers"] = ["example.com/hold"]
        await stage.nodes.api.delete(JOBS, await stage.nodes.api.replace(JOBS, job))
        for resource in (NETWORK_POLICIES, SERVICES):
            await delete(stage, resource, "job-workers")
        await stage.rest()
        await stage.pass_time(2 * TEND_S)
        assert (await stage.job())["metadata"]["generation"] > job["metadata"]["generation"]
        assert [await names(stage, resource) for resource in (NETWORK_POLICIES, SERVICES)] == [set(), set()]


async def test_an_edited_policy_holds_at_once_and_pods_stay(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        await edit(stage, network={"policy": "None"})
        assert await names(stage, NETWORK_POLICIES) == set()
        await edit(stage, network={"policy": "JobOnly"})
        assert await names(stage, NETWORK_POLICIES) == {"job-workers", "job-hub"}
        assert await continue_until_stable(stage) == pods


async def test_a_hub_removed_from_the_spec_ends_with_the_attempt(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        pods = await train(stage, **HUB)
        await edit(stage, analyzer={"enabled": False}, trace={"enabled": False})
        assert await continue_until_stable(stage) == pods and await names(stage, SERVICES) == {"job-workers", "job-hub"}
        await stage.nodes.end("job-worker-1", 42, message="boom")
        await stage.rest()
        await stage.pass_time(60)
        after = await continue_until_stable(stage)
        assert set(after) == {"job-worker-0", "job-worker-1"} and not set(after.values()) & set(pods.values())
        assert await names(stage, SERVICES) == await names(stage, NETWORK_POLICIES) == {"job-workers"}


async def test_objects_of_others_are_left_alone_when_a_spec_no_longer_has_them(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await train(stage, **HUB)
        await delete(stage, NETWORK_POLICIES, "job-hub")
        other: Object = {"podSelector": {"matchLabels": {"app": "other"}}}
        meta = {"name": "job-hub", "namespace": namespace}
        body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": other}
        await stage.nodes.api.create(NETWORK_POLICIES, body)
        await edit(stage, network={"policy": "None"})
        assert await names(stage, NETWORK_POLICIES) == {"job-hub"}


async def test_a_table_that_cannot_be_written_keeps_no_failure_from_being_judged(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        taken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job-ranks", "namespace": namespace}}
        await stage.nodes.api.create(CONFIG_MAPS, taken)
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
        await stage.nodes.end("job-worker-1", 42, message="boom")
        await stage.rest()
        assert (await stage.job())["status"]["attempt"] == 1


async def test_a_refused_hub_is_retried_after_its_pause(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        plane.set_quota(namespace, {"count/services": "1"})
        pods = await train(stage, **HUB)
        assert set(pods) == {"job-worker-0", "job-worker-1"} and "HubRefused" in await reasons(stage)
        assert stage.due[namespace, "job"] > stage.now() + 2 * RECONCILE_RETRY_S
