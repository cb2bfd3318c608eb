"""Fields of the pod of a worker."""

import json
from typing import Any

import pytest
import rendered

from megatronapp_common.errors import JobError
from megatronapp_common.job import megatron_arguments
from megatronapp_common.job.shipment_memory import shipment_bytes
from megatronapp_common.names import ANNOTATION_TEMPLATE_HASH, Env
from megatronapp_operator.backends.kubernetes import render

OURS = {str(name) for name in Env}
OLD = {
    "plain": "53865e7c7d86fe41",
    "gpus": "805bbbcbd2985adf",
    "analyzed": "e616f509c6b76367",
    "claims": "2b655d85fd58438f",
    "kueue": "09949060f1bff700",
    "template": "e854369d4ef49d56",
}
"""Digests of templates as the release before the first rotation of keys took them; those with an agent ("analyzed",
"template") as of its mount of RUN_DIR."""


def spec_of(patch: rendered.Object, index: int = 0, **given: Any) -> rendered.Object:
    made: rendered.Object = rendered.make_worker(rendered.make_job(patch), index, **given)["spec"]
    return made


def test_the_launcher_gets_the_flags_of_its_ranks() -> None:
    job = rendered.make_job()
    trainer = rendered.container(rendered.make_worker(job))
    launcher = ["python3", "-m", "megatronapp_trainer.launch", "--gather-timeout-s", "3720", "--"]
    assert trainer["command"] == [*launcher, *megatron_arguments(job)]
    assert "args" not in trainer


def test_dollar_signs_reach_the_ranks_as_they_are_written() -> None:
    """Check the escapes: the kubelet expands $(NAME) in commands and variables; without a cluster nothing does."""
    pod = rendered.make_worker(
        rendered.make_job({"args": ["--save", "/c/$(JOB)"], "env": [{"name": "A", "value": "$$(B) $C"}]})
    )
    assert rendered.container(pod)["command"][-1] == "/c/$$(JOB)"
    assert rendered.environment(pod)["A"] == "$$$$(B) $$C"


def test_a_worker_gets_its_place_in_the_environment() -> None:
    job = rendered.make_job(rendered.ANALYZED, namespace="team")
    environment = rendered.environment(rendered.make_worker(job, 1, attempt=7, cluster_domain="example.org"))
    assert {name: value for name, value in environment.items() if name in OURS} == {
        "MEGATRONAPP_JOB": "gpt",
        "MEGATRONAPP_JOB_UID": rendered.UID,
        "MEGATRONAPP_ATTEMPT": "7",
        "MEGATRONAPP_WORKER_INDEX": "1",
        "MEGATRONAPP_NUM_WORKERS": "2",
        "MEGATRONAPP_PROC_PER_NODE": "2x2",
        "MEGATRONAPP_COORDINATOR": "gpt-worker-0.gpt-workers.team.svc.example.org:19400",
        "MEGATRONAPP_ADDRESS": "status.podIP",
        "MEGATRONAPP_NODE_NAME": "spec.nodeName",
        "MEGATRONAPP_RANK_ORDER": "index",
        "MEGATRONAPP_LOG_TO_STDOUT": "1",
        "MEGATRONAPP_SECRET_FILE": "/run/megatronapp/secret/secret",
        "MEGATRONAPP_SHM_DIR": "/dev/shm",
        "MEGATRONAPP_SHM_PREFIX": f"megatronapp-{rendered.UID}-a7-w1",
        "MEGATRONAPP_RUN_DIR": "/run/megatronapp/run",
        "MEGATRONAPP_TERMINATION_LOG": "/dev/termination-log",
        "MEGATRONAPP_HUB_URL": "http://gpt-hub.team.svc.example.org:8080",
    }


def test_only_the_first_worker_serves_the_status() -> None:
    job = rendered.make_job()
    ports = [rendered.environment(rendered.make_worker(job, index)).get(Env.STATUS_PORT) for index in (0, 1)]
    assert ports == ["19401", None]


def test_without_an_analyzer_there_is_neither_agent_nor_hub() -> None:
    pod = rendered.make_worker(rendered.make_job())
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer"]
    assert Env.HUB_URL not in rendered.environment(pod)


def test_the_agent_is_an_ordinary_container_after_the_trainer() -> None:
    """Check the order: an agent that starts before the trainer could keep it from starting (docs/adr/0010)."""
    spec = spec_of(rendered.ANALYZED)
    assert [container["name"] for container in spec["containers"]] == ["trainer", "agent"]
    assert "initContainers" not in spec
    agent = spec["containers"][1]
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "restartPolicy", "lifecycle"} & set(agent)
    assert agent["resources"]["limits"] == {"cpu": "500m", "memory": "512Mi"}


def test_trainer_and_agent_see_the_same_shared_memory_and_settings() -> None:
    pod = rendered.make_worker(rendered.make_job({**rendered.RDMA, **rendered.ANALYZED}), 1, attempt=2)
    trainer, agent = rendered.environment(pod), rendered.environment(pod, "agent")
    assert {name: trainer[name] for name in agent} == agent
    mounts = [
        {mount["mountPath"]: mount["name"] for mount in rendered.container(pod, name)["volumeMounts"]}
        for name in ("trainer", "agent")
    ]
    assert mounts[0]["/dev/shm"] == mounts[1]["/dev/shm"] == "shm"
    assert pod["spec"]["securityContext"]["fsGroup"] == 65532
    assert rendered.container(pod)["securityContext"]["runAsUser"] == 0
    assert "runAsUser" not in rendered.container(pod, "agent")["securityContext"]


@pytest.mark.parametrize(
    ("trainer", "requests"),
    [
        ({}, {"cpu": "50m", "memory": "128Mi"}),
        ({"limits": {"cpu": "4", "memory": "8Gi"}}, {"cpu": "500m", "memory": "512Mi"}),
        ({"requests": {"cpu": "4"}, "limits": {"cpu": "4", "memory": "8Gi"}}, {"cpu": "500m", "memory": "512Mi"}),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "8Gi"}}, {"cpu": "50m", "memory": "128Mi"}),
        ({"limits": {"memory": "8Gi"}}, {"cpu": "50m", "memory": "128Mi"}),
    ],
)
def test_the_agent_does_not_cost_a_pod_its_guarantee(trainer: rendered.Object, requests: rendered.Object) -> None:
    pod = rendered.make_worker(rendered.make_job({**rendered.ANALYZED, "resources": trainer}))
    assert rendered.container(pod, "agent")["resources"]["requests"] == requests


def test_own_resources_of_agent_and_hub() -> None:
    job = rendered.make_job({"analyzer": {"enabled": True, "resources": {"limits": {"cpu": "3"}}}})
    hub = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=1)
    for pod, name in ((rendered.make_worker(job), "agent"), (hub, "hub")):
        assert rendered.container(pod, name)["resources"] == {"requests": {}, "limits": {"cpu": "3"}}


def test_a_hub_that_starts_slowly_is_not_killed_for_it() -> None:
    job = rendered.make_job(rendered.ANALYZED)
    hub = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=1)
    probe = rendered.container(hub, "hub")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300


@pytest.mark.parametrize(
    ("shm", "memory", "size"),
    [
        (None, None, "16Gi"),
        (None, "64Gi", "16Gi"),
        (None, "32Gi", "16Gi"),
        (None, "10Gi", str(5 << 30)),
        (None, "3", "1"),
        ("2Gi", "3Gi", "2Gi"),
    ],
)
def test_shared_memory_fits_the_memory_limit(shm: str | None, memory: str | None, size: str) -> None:
    patch: rendered.Object = {"shm": {"sizeLimit": shm} if shm else {}}
    patch |= {"resources": {"limits": {"memory": memory}}} if memory else {}
    volumes = {volume["name"]: volume for volume in spec_of(patch)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


@pytest.mark.parametrize(("memory", "size"), [(None, "16Gi"), ("64Gi", str(32 << 30)), ("10Gi", str(5 << 30))])
def test_checkpoints_in_memory_have_half_of_the_memory_limit(memory: str | None, size: str) -> None:
    volume = {"claim": "runs", "mountPath": "/runs"}
    patch: rendered.Object = {
        "checkpoint": {"save": "/runs/a", "saveInterval": 100, "memorySaveInterval": 5, "volume": volume},
        "runPolicy": {"restart": "InPlace"},
    }
    patch |= {"resources": {"limits": {"memory": memory}}} if memory else {}
    volumes = {volume["name"]: volume for volume in spec_of(patch)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def dpp_of(seq_length: int, **more: Any) -> rendered.Object:
    """Patch for a pipeline of four ranks on one node whose messages have 4 KiB for each token."""
    model = {"type": "gpt", "numLayers": 4, "hiddenSize": 1024, "numAttentionHeads": 8, "vocabSize": 64}
    return {
        "nodes": 1,
        "procPerNode": 4,
        "parallelism": {"pipeline": 4, "tensor": 1},
        "dpp": {"enabled": True, "schedule": "static"},
        "model": {**model, "seqLength": seq_length},
        "training": {"microBatchSize": 1, "globalBatchSize": 8, "trainIters": 1, "lr": 1e-3},
        **more,
    }


def test_shared_memory_has_space_for_the_messages_of_megadpp() -> None:
    """Six inboxes of six slots each, and 1Gi for rings and data."""

    def size_of(patch: rendered.Object) -> str:
        volumes = {volume["name"]: volume for volume in spec_of(patch)["volumes"]}
        size: str = volumes["shm"]["emptyDir"]["sizeLimit"]
        return size

    memory = {"resources": {"limits": {"memory": "12Gi"}}}
    messages = 36 * ((262144 << 12) + 640) + 10 * 65536
    assert size_of(dpp_of(262144)) == str(messages + (1 << 30))
    assert size_of(dpp_of(2048)) == "16Gi"
    assert size_of(dpp_of(2048, **memory)) == str(6 << 30)
    assert size_of(dpp_of(65536, **memory)) == str(9 * (1 << 30) + 36 * 640 + 10 * 65536 + (1 << 30))
    tight = 36 * ((81920 << 12) + 640) + 10 * 65536
    assert size_of(dpp_of(81920, **memory)) == str((tight + (12 << 30)) // 2), "1Gi more would be above the limit"
    assert size_of(dpp_of(262144, **memory)) == str(6 << 30), "the ranks name what is missing"
    template = {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "12Gi"}}}]}
    worker = rendered.make_worker(rendered.with_template(rendered.make_job(dpp_of(262144)), template))
    volumes = {volume["name"]: volume for volume in worker["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == str(6 << 30), "the ranks name what is missing"
    assert size_of(dpp_of(262144, shm={"sizeLimit": "37Gi"})) == "37Gi"


def test_shared_memory_has_space_for_the_messages_of_megafbd() -> None:
    model = {"type": "gpt", "numLayers": 32, "hiddenSize": 4096, "numAttentionHeads": 32, "vocabSize": 64}
    patch: rendered.Object = {
        "nodes": 1,
        "procPerNode": 3,
        "fbd": {"enabled": True, "backwardPerForward": 2},
        "model": {**model, "seqLength": 512},
        "training": {"microBatchSize": 1, "globalBatchSize": 8, "trainIters": 1, "lr": 1e-3},
    }

    def sizes(more: rendered.Object) -> list[str]:
        job = rendered.make_job(rendered.joined(patch, more))
        pods = [rendered.make_worker(job, index)["spec"] for index in range(job.world.nodes)]
        volumes = [volume for pod in pods for volume in pod["volumes"] if volume["name"] == "shm"]
        return [volume["emptyDir"]["sizeLimit"] for volume in volumes]

    job = rendered.make_job(patch)
    layer = 512 * (4 * (8 * 4096 + 2 * 4096) + 4 * (8 * 4096 + 5 * 4 * 4096) + 16 * 32) + (64 << 10)
    places = 2 * 2 * 3 * 34 * layer
    messages = shipment_bytes(job, job.world.worker_groups[0])
    assert places < messages < places + (1 << 30), "three passes of 32 layers for two partners, counted on both ends"
    assert sizes({}) == [str(messages + (1 << 30))]
    assert sizes({"gpusPerNode": 3}) == ["16Gi"], "slots are in memory of the devices"
    apart = {"procPerNode": 2, "fbd": {"forward": {"resources": {"limits": {"memory": "10Gi"}}}}}
    assert sizes(apart) == ["16Gi", str(5 << 30)], "messages of other workers are in memory of the receiver"


@pytest.mark.parametrize(
    ("template", "size"),
    [
        ({"containers": [{"name": "trainer", "resources": {"limits": {"memory": "8Gi"}}}]}, str(4 << 30)),
        ({"containers": [{"name": "trainer", "resources": {"limits": {"memory": None}}}]}, "16Gi"),
        ({"containers": [{"name": "logs", "resources": {"limits": {"memory": "1Gi"}}}]}, str(5 << 30)),
        ({"resources": {"limits": {"memory": "6Gi"}}}, str(3 << 30)),
    ],
)
def test_shared_memory_fits_the_memory_limit_of_the_template(template: rendered.Object, size: str) -> None:
    job = rendered.with_template(rendered.make_job({"resources": {"limits": {"memory": "10Gi"}}}), template)
    volumes = {volume["name"]: volume for volume in rendered.make_worker(job)["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == size


def test_gpus_are_requested_and_their_taint_is_tolerated() -> None:
    spec = spec_of({**rendered.GPUS, "gpuResourceName": "example.com/gpu", "resources": {"limits": {"cpu": "9"}}})
    trainer = spec["containers"][0]
    assert trainer["resources"] == {
        "requests": {"example.com/gpu": "8"},
        "limits": {"cpu": "9", "example.com/gpu": "8"},
    }
    assert spec["tolerations"] == [{"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "CUDA_VISIBLE_DEVICES" not in {variable["name"] for variable in trainer["env"]}


def test_a_worker_without_gpus_sees_none() -> None:
    pod = rendered.make_worker(rendered.make_job({"env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]}))
    environment = rendered.environment(pod)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
    assert "tolerations" not in pod["spec"]
    assert rendered.container(pod)["resources"] == {}


def test_forward_workers_go_where_they_are_sent() -> None:
    job = rendered.make_job({**rendered.VARIETY["forward-apart"], "nodeSelector": {"pool": "gpu"}})
    backward, forward = rendered.make_worker(job, 1), rendered.make_worker(job, 2)
    assert [pod["spec"]["nodeSelector"] for pod in (backward, forward)] == [{"pool": "gpu"}, {"pool": "cpu"}]
    assert rendered.container(backward)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert rendered.container(forward)["resources"] == {}
    assert rendered.environment(forward)["CUDA_VISIBLE_DEVICES"] == ""
    assert rendered.environment(forward)[Env.PROC_PER_NODE] == "8x2,4x4"
    with pytest.raises(Exception, match="worker 6 does not exist"):
        rendered.make_worker(job, 6)


def test_images_and_how_they_are_pulled() -> None:
    default = spec_of(rendered.ANALYZED, image_pull_policy="Never")
    chosen = spec_of({**rendered.VARIETY["own-image"], "analyzer": {"enabled": True, "image": "mine/hub"}})
    pairs = [
        [(container["image"], container["imagePullPolicy"]) for container in spec["containers"]]
        for spec in (default, chosen)
    ]
    assert pairs == [
        [("registry.example/trainer:1", "Never"), ("registry.example/analyzer:1", "Never")],
        [("registry.example/mine:2", "Always"), ("mine/hub", "Always")],
    ]
    assert chosen["imagePullSecrets"] == [{"name": "pull"}]


def test_a_pod_has_no_credentials_and_ends_as_its_manifest_specifies() -> None:
    spec = spec_of({"runPolicy": {"terminationGracePeriodSeconds": 77}})
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 77
    assert (spec["hostname"], spec["subdomain"]) == ("gpt-worker-0", "gpt-workers")


def test_claims_are_mounted_once_for_each_place() -> None:
    spec = spec_of(rendered.CLAIMS)
    claims = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"claimName": "corpus"}]
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/data"] == {"name": "claim-0", "mountPath": "/data", "readOnly": True}
    assert mounts["/ckpt"] == {"name": "claim-0", "mountPath": "/ckpt", "subPath": "saved"}


def test_initializers_write_where_the_ranks_read() -> None:
    job = rendered.make_job(rendered.VARIETY["initializers"])
    pod = rendered.make_worker(job)
    cache = rendered.container(pod, "init-cache")
    assert [container["name"] for container in pod["spec"]["initContainers"]] == ["init-cache"]
    places = {mount["mountPath"]: mount for mount in cache["volumeMounts"]}
    assert places["/cache"] in rendered.container(pod)["volumeMounts"]
    assert "readOnly" not in places["/data"]
    assert rendered.environment(pod, "init-cache")["TARGET"] == "/cache"


@pytest.mark.parametrize(
    ("before", "prepares"),
    [([{"name": "mesh", "image": "m", "restartPolicy": "Always"}], False), ([{"name": "fetch", "image": "f"}], True)],
)
def test_launchers_wait_for_others_that_still_prepare_longer_than_the_operator_judges(
    before: list[rendered.Object], prepares: bool
) -> None:
    def gather_s(patch: rendered.Object) -> int:
        trainer = spec_of(patch)["containers"][0]
        return int(trainer["command"][trainer["command"].index("--gather-timeout-s") + 1])

    plain_s = gather_s({})
    assert gather_s({"podTemplate": {"spec": {"initContainers": before}}}) == plain_s + (86400 if prepares else 0)
    assert gather_s(rendered.VARIETY["initializers"]) >= 86400 > plain_s > 3 * 900


def test_initializers_of_the_job_run_in_sequence_in_a_separate_pod() -> None:
    job = rendered.make_job(rendered.VARIETY["initializers"])
    pod = render.init_pod(job, rendered.owner_of(job))
    assert pod is not None
    spec = pod["spec"]
    assert [container["name"] for container in (*spec["initContainers"], *spec["containers"])] == [
        "init-corpus",
        "init-tokenizer",
    ]
    assert spec["restartPolicy"] == "Never"
    corpus = spec["initContainers"][0]
    assert corpus["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert {variable["name"]: variable["value"] for variable in corpus["env"]}["STORAGE_URI"] == "s3://bucket/corpus"
    assert spec["containers"][0]["args"] == ["$(STORAGE_URI)"]
    assert render.init_pod(rendered.make_job(), rendered.owner_of(job)) is None


def test_initializers_and_hub_have_the_priority_of_their_job_and_initializers_its_nodes() -> None:
    initializers = [
        {"name": "corpus", "image": "fetch:1", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}}
    ]
    affinity: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    place = {"nodeSelector": {"pool": "a"}, "affinity": affinity, "schedulerName": "own"}
    apart: dict[str, Any] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    given = {**place, "affinity": affinity | apart, "priorityClassName": "high", "gpusPerNode": 2}
    job = rendered.make_job({**given, "initializers": initializers})
    init = render.init_pod(job, rendered.owner_of(job))
    assert init is not None
    spec = init["spec"]
    assert {name: spec[name] for name in place} == place and spec["priorityClassName"] == "high"
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    hub = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=1)["spec"]
    assert hub["priorityClassName"] == "high" and "nodeSelector" not in hub


def test_preflight_gets_the_resources_of_the_pod() -> None:
    rdma = {"enabled": True, "resourceName": "rdma/ib", "hca": "mlx5_0"}
    network = {"mode": "SharedDevice", "rdma": rdma, "preflight": {"enabled": True, "timeoutSeconds": 30}}
    environment = rendered.environment(rendered.make_worker(rendered.make_job({**rendered.GPUS, "network": network})))
    assert json.loads(environment[Env.PREFLIGHT]) == {
        "enabled": True,
        "timeoutSeconds": 30,
        "gpus": 8,
        "shmBytes": 16 << 30,
        "rdma": True,
        "hca": "mlx5_0",
    }
    assert Env.PREFLIGHT not in rendered.environment(rendered.make_worker(rendered.make_job()))


def test_the_template_hash_is_of_the_job_and_not_of_an_attempt() -> None:
    job = rendered.make_job(rendered.ANALYZED)
    digest = render.template_hash(job, rendered.SETTINGS)
    pods = [rendered.make_worker(job, 0), rendered.make_worker(job, 1, attempt=3, excluded=("n",))]
    assert {pod["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] for pod in pods} == {digest}
    assert render.template_hash(rendered.make_job(rendered.ANALYZED), rendered.SETTINGS) == digest
    assert render.template_hash(rendered.make_job(), rendered.SETTINGS) != digest
    assert render.template_hash(job, rendered.with_settings(analyzer_image="other")) != digest


def test_the_template_hash_sees_the_forward_workers() -> None:
    patch = rendered.VARIETY["forward-apart"]
    other = rendered.joined(patch, {"fbd": {"forward": {"nodeSelector": {"pool": "other"}}}})
    hashes = {render.template_hash(rendered.make_job(nodes), rendered.SETTINGS) for nodes in (patch, other)}
    assert len(hashes) == 2


def test_a_job_whose_numbers_do_not_agree_is_refused() -> None:
    job = rendered.make_job()
    broken = job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": 3, "proc_per_node": 1})})
    object.__setattr__(broken.spec, "parallelism", job.spec.parallelism.model_copy(update={"tensor": 2}))
    with pytest.raises(JobError, match="do not fit"):
        rendered.make_worker(broken)


def test_workers_of_an_earlier_release_keep_the_digest_of_their_template() -> None:
    """Compare with the digests that are written down here: another digest recreates all gangs that do not run yet. A
    digest that must change is updated here."""
    digests = {name: render.template_hash(rendered.make_job(rendered.VARIETY[name]), rendered.SETTINGS) for name in OLD}
    assert digests == OLD
