"""The CRD on a real API server: what it takes, what it refuses, what it fills in, and what kubectl shows of it."""

import json
import pathlib
from typing import Any

import kube
import pytest
import yaml

from megatronapp_common.job import load_job
from megatronapp_operator.backends.kubernetes.api import JOBS

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


@pytest.mark.parametrize(
    ("place", "value", "words"),
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
    plane: kube.ControlPlane, namespace: str, place: tuple[str, ...], value: object, words: str
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
    assert words in answer["message"], answer["message"]


def test_a_status_is_written_through_its_own_subresource_only(plane: kube.ControlPlane, namespace: str) -> None:
    job = example() | {"status": {"phase": "Running"}}
    status, stored = create(plane, namespace, job)
    assert (status, "status" in stored) == (201, False)
    url = f"{JOBS.path(namespace)}/demo/status"
    content = {"Content-Type": "application/merge-patch+json"}
    with plane.client() as client:
        told = {"phase": "Running", "restarts": 2, "replicaStatuses": {"desired": 2, "ready": 1}}
        answer = client.patch(url, content=json.dumps({"status": told, "spec": {"nodes": 7}}), headers=content)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"]["phase"] == "Running"
    assert answer.json()["spec"]["nodes"] == 2


def test_kubectl_shows_the_columns_and_explains_every_field(plane: kube.ControlPlane, namespace: str) -> None:
    create(plane, namespace, example())
    header, row = plane.kubectl("get", "mgj", "-n", namespace).stdout.splitlines()
    assert header.split() == ["NAME", "PHASE", "NODES", "READY", "RESTARTS", "ITERATION", "SLOW", "AGE"]
    assert row.startswith("demo ")
    told = plane.kubectl("explain", "megatronjob.spec", "--recursive").stdout
    assert "virtualPipeline\t<integer>" in told
    assert "Model chunks of each rank" in plane.kubectl("explain", "mgj.spec.parallelism.virtualPipeline").stdout
