"""The CRD on a real API server: what it takes, what it refuses, what it fills in, and what kubectl shows of it."""

import contextlib
import json
import pathlib
import uuid
from typing import Any

import kube
import pytest
import yaml

from megatronapp_common.errors import JobError
from megatronapp_common.job import load_job
from megatronapp_operator.backends.kubernetes.client.resources import JOBS

EXAMPLES = sorted((kube.ROOT / "examples").glob("*.yaml"))


def example() -> dict[str, Any]:
    return dict(yaml.safe_load((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8")))


def create(plane: kube.ControlPlane, namespace: str, job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    with plane.client() as client:
        answer = client.post(JOBS.path(namespace), params={"fieldValidation": "Strict"}, json=job)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_taken(plane: kube.ControlPlane, namespace: str, path: pathlib.Path) -> None:
    done = plane.kubectl("apply", "-n", namespace, "--validate=strict", "-f", str(path))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_api_server_fills_in_the_same_defaults(plane: kube.ControlPlane, namespace: str) -> None:
    status, stored = create(plane, namespace, example())
    assert status == 201, stored
    local = load_job(example()).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored["spec"] == local["spec"]


CLUSTER: dict[str, Any] = {
    "image": "registry.example/trainer:1",
    "imagePullSecrets": [{"name": "pull"}],
    "resources": {"limits": {"cpu": "7500m", "memory": "64Gi", "example.com/fpga": "1"}, "requests": {"cpu": "4"}},
    "nodeSelector": {"pool": "a"},
    "affinity": {"nodeAffinity": {"anything": [{"kept": True, "as": 1.5, "it": None}]}},
    "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
    "priorityClassName": "high",
    "schedulerName": "mine",
    "runtimeClassName": "kata",
    "serviceAccountName": "trainer",
    "podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [{"name": "proxy", "image": "p"}]}},
    "shm": {"sizeLimit": "8Gi"},
    "network": {
        "mode": "Sriov",
        "rdma": {"enabled": True, "resourceName": "rdma/hca", "gidIndex": 3, "hca": "mlx5_0", "interface": "net1"},
        "attachments": ["fabric/ib-0"],
        "nccl": {"NCCL_DEBUG": "INFO"},
        "rankOrder": "Topology",
        "topologyKey": "topology.kubernetes.io/zone",
        "preflight": {"enabled": True},
    },
    "data": {
        "path": ["/data/corpus"],
        "tokenizer": "/data/tokenizer.json",
        "volume": {"claim": "corpus", "mountPath": "/data", "subPath": "a"},
    },
    "checkpoint": {"save": "/runs/a", "volume": {"claim": "runs", "mountPath": "/runs"}},
    "initializers": [
        {"name": "fetch", "image": "f", "storageUri": "s3://b/c", "target": "/data", "secretRef": {"name": "s3"}}
    ],
    "scheduling": {
        "gang": "Kueue",
        "queue": "team-a",
        "minAvailable": 4,
        "topology": {"level": "cloud.provider.com/rack", "required": True},
    },
    "managedBy": "example.com/other",
    "analyzer": {
        "enabled": True,
        "image": "a:1",
        "resources": {"limits": {"memory": "1Gi"}},
        "slowNode": {"action": "ExcludeAndRestart"},
        "volume": {"claim": "verdicts"},
    },
    "fbd": {"enabled": True, "forward": {"nodes": 2, "nodeSelector": {}, "resources": {"limits": {"cpu": "8"}}}},
    "runPolicy": {
        "ttlSecondsAfterFinished": 0,
        "rules": [
            {"match": {"exitCodes": {"in": [201, 202]}, "workers": [0]}, "action": "ExcludeNodeAndRestart"},
            {"match": {"exitCodes": {"notIn": [1]}, "conditionTypes": ["DisruptionTarget"]}, "action": "Ignore"},
        ],
    },
    "successPolicy": "Rank0",
}


def test_every_block_of_a_cluster_is_stored_with_the_same_defaults(plane: kube.ControlPlane, namespace: str) -> None:
    job = example()
    job["spec"] |= CLUSTER
    status, stored = create(plane, namespace, job)
    assert status == 201, stored
    assert stored["spec"] == load_job(job).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    listed = plane.kubectl("get", "mgj", "-n", namespace, "-o", "wide").stdout.splitlines()[0].split()
    assert listed[-4:] == ["AGE", "ATTEMPT", "WORLD", "QUEUE"]
    explain = ("explain", "mgj.spec.network.rdma.resourceName")
    kube.wait_until(  # its document of the definition is some seconds younger than the definition
        lambda: "Resource that the device plugin offers" in plane.kubectl(*explain).stdout, " ".join(explain)
    )


def test_a_quantity_is_a_number_or_a_text(plane: kube.ControlPlane, namespace: str) -> None:
    for value, taken in (
        (8, True),
        ("8", True),
        ("8Gi", True),
        (-8, False),
        ("-8", False),
        ("8GB", False),
        (0.5, False),
    ):
        job = example()
        job["spec"]["resources"] = {"limits": {"memory": value}}
        status, answer = create(plane, namespace, job | {"metadata": {"name": f"a{uuid.uuid4().hex[:8]}"}})
        assert (status == 201) == taken, answer
        with contextlib.nullcontext() if taken else pytest.raises(JobError):
            load_job(job)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("modle",), {}, 'unknown field "spec.modle"'),
        (("model", "hiddenSise"), 64, 'unknown field "spec.model.hiddenSise"'),
        (("model", "hiddenSize"), "64", "must be of type integer"),
        (("model", "hiddenSize"), 0, "should be greater than or equal to 1"),
        (("model", "type"), "llama", "supported values"),
        (("training", "lr"), None, "Required value"),
        (("nodes",), 5000, "should be less than or equal to 4096"),
    ],
)
def test_a_bad_field_is_refused_with_its_place(
    plane: kube.ControlPlane, namespace: str, place: tuple[str, ...], value: object, message: str
) -> None:
    job = example()
    block = job["spec"]
    for name in place[:-1]:
        block = block[name]
    block[place[-1]] = value
    if value is None:
        del block[place[-1]]
    status, answer = create(plane, namespace, job)
    assert status in {400, 422}
    assert message in answer["message"], answer["message"]


def test_a_status_is_written_through_its_own_subresource_only(plane: kube.ControlPlane, namespace: str) -> None:
    job = example() | {"status": {"phase": "Running"}}
    status, stored = create(plane, namespace, job)
    assert (status, "status" in stored) == (201, False)
    url = f"{JOBS.path(namespace)}/demo/status"
    content = {"Content-Type": "application/merge-patch+json"}
    with plane.client() as client:
        reported = {"phase": "Running", "restarts": 2, "replicaStatuses": {"desired": 2, "ready": 1}}
        answer = client.patch(url, content=json.dumps({"status": reported, "spec": {"nodes": 7}}), headers=content)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"]["phase"] == "Running"
    assert answer.json()["spec"]["nodes"] == 2


def test_kubectl_shows_the_columns_and_explains_every_field(plane: kube.ControlPlane, namespace: str) -> None:
    create(plane, namespace, example())
    header, row = plane.kubectl("get", "mgj", "-n", namespace).stdout.splitlines()
    assert header.split() == ["NAME", "PHASE", "NODES", "READY", "RESTARTS", "ITERATION", "SLOW", "PAUSED", "AGE"]
    assert row.startswith("demo ")
    explain = ("explain", "megatronjob.spec", "--recursive")
    kube.wait_until(lambda: "virtualPipeline\t<integer>" in plane.kubectl(*explain).stdout, " ".join(explain))
    assert "Model chunks of each rank" in plane.kubectl("explain", "mgj.spec.parallelism.virtualPipeline").stdout
