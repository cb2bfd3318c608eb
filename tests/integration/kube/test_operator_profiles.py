"""Jobs that are merged over profiles, on a real API server: begin, restarts, edits, locks, and a killed operator."""

import json
from typing import Any

import kube
import pytest
from operator_simulation import OperatorKilled, OperatorSimulation, manifest, simulated_operator

from megatronapp_common.job.profiles.effective import field_origins, pinned_layers
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object

pytestmark = pytest.mark.asyncio


def profile(kind: str, name: str, template: dict[str, Any], locked: list[str] | None = None) -> Object:
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"template": template, "locked": locked or []},
    }


def apply(plane: kube.ControlPlane, obj: Object, namespace: str = "default") -> None:
    done = plane.kubectl("apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-", stdin=obj)
    assert done.returncode == 0, done.stderr


def cluster_profile(plane: kube.ControlPlane, namespace: str, template: dict[str, Any], *locked: str) -> str:
    """Apply a profile of the cluster that is this test's alone; return its name."""
    name = f"of-{namespace}"
    apply(plane, profile("ClusterMegatronProfile", name, template, list(locked)))
    return name


async def submitted(stage: OperatorSimulation, **spec: Any) -> None:
    await stage.api.create(JOBS, manifest(stage.namespace, **spec))
    await stage.begin()
    await stage.rest()


async def images(stage: OperatorSimulation) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in (await stage.nodes.pods()).values()}


async def condition(stage: OperatorSimulation) -> tuple[str, str, str]:
    found = next(item for item in (await stage.job())["status"]["conditions"] if item["type"] == "ProfileApplied")
    return found["status"], found["reason"], found["message"]


async def events(stage: OperatorSimulation) -> set[str]:
    answer = await stage.nodes.client.get(f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events")
    return {event["reason"] for event in answer.json()["items"]}


async def restart(stage: OperatorSimulation) -> None:
    """Let a worker fail, and follow the job into its next attempt."""
    await stage.nodes.end("job-worker-0", 3)
    await stage.rest()
    await stage.pass_time(60)


async def test_a_job_runs_with_what_its_profiles_give(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1", "network": {"nccl": {"NCCL_DEBUG": "INFO"}}})
    team = {"env": [{"name": "TEAM", "value": "a"}], "nodeSelector": {"team": "a"}, "image": "team/trainer:1"}
    apply(plane, profile("MegatronProfile", "default", team), namespace)
    apply(plane, profile("MegatronProfile", "other", {"image": "no/effect:1"}), namespace)
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name, env=[{"name": "MINE", "value": "b"}])
        pods = list((await stage.nodes.pods()).values())
        assert len(pods) == 2
        for pod in pods:
            worker = pod["spec"]["containers"][0]
            values = {item["name"]: item.get("value") for item in worker["env"]}
            assert worker["image"] == "team/trainer:1"
            assert pod["spec"]["nodeSelector"] == {"team": "a"}
            assert (values["TEAM"], values["MINE"], values["NCCL_DEBUG"]) == ("a", "b", "INFO")
        job = await stage.job()
        assert [(item["kind"], item["name"], item["generation"]) for item in job["status"]["pinned"]["profiles"]] == [
            ("ClusterMegatronProfile", name, 1),
            ("MegatronProfile", "default", 1),
        ]
        status, reason, message = await condition(stage)
        assert (status, reason) == ("True", "ProfileApplied")
        assert message == f"ClusterMegatronProfile/{name} (generation 1), MegatronProfile/default (generation 1)"
        origins = {field.field: (field.value, field.origin) for field in field_origins(pinned_layers(job))}
        assert origins["image"] == ("team/trainer:1", "MegatronProfile/default")
        assert origins["network.nccl[NCCL_DEBUG]"] == ("INFO", f"ClusterMegatronProfile/{name}")
        assert (origins["env[MINE].value"], origins["network.mode"]) == (("b", "job"), ("Default", "default"))


async def test_a_missing_profile_is_awaited(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=f"of-{namespace}")
        assert not await stage.nodes.pods()
        status, reason, message = await condition(stage)
        assert (status, reason) == ("False", "ProfileNotFound")
        assert f"no ClusterMegatronProfile is named of-{namespace}" in message
        assert "ProfileNotFound" in await events(stage)
        await stage.begin()
        await stage.rest()
        assert not await stage.nodes.pods(), "another operator waits, too"
        cluster_profile(plane, namespace, {"image": "admin/trainer:1"})
        await stage.rest()
        assert await images(stage) == {"admin/trainer:1"}
        assert (await condition(stage))[0] == "True"


async def test_a_locked_field_is_refused_by_name_until_it_is_corrected(
    plane: kube.ControlPlane, namespace: str
) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1"}, "image")
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name, image="mine:1")
        assert not await stage.nodes.pods()
        status, reason, message = await condition(stage)
        assert (status, reason) == ("False", "ProfileRefused")
        assert message.startswith(f"spec.image: is locked by ClusterMegatronProfile/{name}, which has admin/trainer:1")
        patch = json.dumps({"spec": {"image": None}})
        assert plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", patch).returncode == 0
        await stage.rest()
        assert await images(stage) == {"admin/trainer:1"}


async def test_rules_are_judged_on_the_merged_spec(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"network": {"rdma": {"enabled": True}}})
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name)
        status, reason, message = await condition(stage)
        assert (status, reason) == ("False", "ProfileRefused")
        assert "spec.network.rdma.resourceName" in message
        rdma = {"enabled": True, "resourceName": "rdma/shared", "count": 1}
        cluster_profile(plane, namespace, {"network": {"mode": "SharedDevice", "rdma": rdma}})
        await stage.rest()
        workers = [pod["spec"]["containers"][0] for pod in (await stage.nodes.pods()).values()]
        assert [worker["resources"]["limits"]["rdma/shared"] for worker in workers] == ["1", "1"]


async def test_what_only_the_profile_completes_is_stored_and_runs(plane: kube.ControlPlane, namespace: str) -> None:
    """The API server refuses the same job without a profile."""
    training = {"microBatchSize": 1, "trainIters": 4, "lr": 0.01}
    whole = manifest(namespace)
    del whole["spec"]["training"]
    refused = plane.kubectl("create", "-f", "-", stdin=whole)
    assert "spec.training: Invalid value: is missing" in refused.stderr.replace('"object": ', "") or refused.returncode
    name = cluster_profile(plane, namespace, {"training": training})
    whole["spec"]["profile"] = name
    assert plane.kubectl("create", "-f", "-", stdin=whole).returncode == 0
    async with simulated_operator(plane, namespace) as stage:
        await stage.begin()
        await stage.rest()
        assert len(await stage.nodes.pods()) == 2


async def test_a_changed_profile_reaches_the_next_attempt_only(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1", "env": [{"name": "TEAM", "value": "a"}]})
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name)
        before = {pod["metadata"]["uid"] for pod in (await stage.nodes.pods()).values()}
        cluster_profile(plane, namespace, {"image": "admin/trainer:2"})
        await stage.rest()
        await stage.begin()  # another operator, which reads all it knows from the status
        await stage.rest()
        assert {pod["metadata"]["uid"] for pod in (await stage.nodes.pods()).values()} == before
        assert "the next attempt begins with" in (await condition(stage))[2]
        assert (await stage.job())["status"]["pinned"]["profiles"][0]["generation"] == 1
        await restart(stage)
        job = await stage.job()
        assert await images(stage) == {"admin/trainer:2"}
        assert (job["status"]["attempt"], job["status"]["pinned"]["profiles"][0]["generation"]) == (1, 2)
        variables = [pod["spec"]["containers"][0]["env"] for pod in (await stage.nodes.pods()).values()]
        assert not any(item["name"] == "TEAM" for each in variables for item in each)


async def test_a_profile_that_is_deleted_holds_back_the_next_attempt(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1"})
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name)
        assert plane.kubectl("delete", "clustermegatronprofile", name).returncode == 0
        await stage.rest()
        assert await images(stage) == {"admin/trainer:1"}, "the attempt goes on"
        await restart(stage)
        await stage.begin()
        await stage.rest()
        assert not await stage.nodes.pods()
        assert (await condition(stage))[:2] == ("False", "ProfileNotFound")
        cluster_profile(plane, namespace, {"image": "admin/trainer:3"})
        await stage.pass_time(60)
        assert await images(stage) == {"admin/trainer:3"}


async def test_the_model_of_a_job_never_changes_by_its_profile(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"model": {"ffnHiddenSize": 64}})
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name)
        cluster_profile(plane, namespace, {"model": {"ffnHiddenSize": 128}})
        await restart(stage)
        assert not await stage.nodes.pods()
        status, reason, message = await condition(stage)
        assert (status, reason) == ("False", "ProfileRefused")
        assert message.startswith("spec.model: cannot change")


async def test_an_edit_that_breaks_a_lock_leaves_a_running_attempt_as_it_is(
    plane: kube.ControlPlane, namespace: str
) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1"}, "image")
    async with simulated_operator(plane, namespace) as stage:
        await submitted(stage, profile=name)
        patch = json.dumps({"spec": {"image": "mine:1"}})
        assert plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", patch).returncode == 0
        await stage.rest()
        assert await images(stage) == {"admin/trainer:1"}
        status, reason, message = await condition(stage)
        assert (status, reason) == ("False", "ProfileRefused")
        assert "the attempt continues" in message


async def test_a_written_default_wins_if_apply_has_recorded_it(plane: kube.ControlPlane, namespace: str) -> None:
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1", "imagePullPolicy": "Always"})
    async with simulated_operator(plane, namespace) as stage:
        for job, flags in (("side", ["apply", "--server-side"]), ("client", ["apply"]), ("made", ["create"])):
            document = manifest(namespace, job, profile=name, imagePullPolicy="IfNotPresent", nodes=1)
            assert plane.kubectl(*flags, "-f", "-", stdin=document).returncode == 0
        await stage.begin()
        await stage.rest()
        pods = await stage.nodes.pods()
        workers = {job: pods[f"{job}-worker-0"]["spec"]["containers"][0] for job in ("side", "client")}
        policies = {job: worker["imagePullPolicy"] for job, worker in workers.items()}
        assert policies == {"side": "IfNotPresent", "client": "IfNotPresent"}
        assert pods["made-worker-0"]["spec"]["containers"][0]["imagePullPolicy"] == "Always"


@pytest.mark.full("where the request is cut off", but=("lost",))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_an_operator_that_ends_anywhere_begins_an_attempt_with_a_single_profile(
    plane: kube.ControlPlane, namespace: str, when: str
) -> None:
    """Every request but one is answered; whichever it is, the attempt has a single profile, and it is recorded."""
    name = cluster_profile(plane, namespace, {"image": "admin/trainer:1"})
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(stage.namespace, profile=name))
        for number in range(1, 12):
            stage.api.count, stage.api.kill_at = 0, {number: when}.get
            try:
                await stage.begin()
                await stage.rest(with_nodes=False, rounds=2)
            except (AssertionError, OperatorKilled):
                pass
            cluster_profile(plane, namespace, {"image": f"admin/trainer:{number + 1}"})
        stage.api.kill_at = lambda _count: None
        await stage.begin()
        await stage.rest()
        job = await stage.job()
        pinned = job["status"]["pinned"]["profiles"][0]
        assert await images(stage) == {pinned["template"]["image"]}
        assert job["status"]["phase"] in {"Starting", "Running"}


async def test_the_api_server_refuses_wrong_fields_of_a_template(plane: kube.ControlPlane) -> None:
    wrong = profile("ClusterMegatronProfile", "wrong", {"nodes": 0, "profile": "x", "network": {"mode": "Wrong"}})
    done = plane.kubectl("create", "-f", "-", stdin=wrong)
    assert done.returncode == 1
    assert 'unknown field "spec.template.profile"' in done.stderr
    del wrong["spec"]["template"]["profile"]
    done = plane.kubectl("create", "-f", "-", stdin=wrong)
    for text in ("spec.template.nodes", "spec.template.network.mode"):
        assert text in done.stderr
