"""Jobs that were stored before a rule existed: an API server judges their updates by what changed."""

import copy
from collections.abc import Iterator
from typing import Any

import gateway
import httpx
import kube
import pytest
import yaml
from rule_example import changed

from megatronapp_common.job.crd import custom_resource_definition

GROUP = "later.example.com"
JOBS = f"/apis/{GROUP}/v1alpha1/namespaces/default/megatronjobs"
RESERVED = {"spec.env": [{"name": "NNODES", "value": "2"}]}
BOTH_CODES = [{"match": {"exitCodes": {"in": [1], "notIn": [2]}}, "action": "Ignore"}]
IN_CODES = [{"match": {"exitCodes": {"in": [1]}}, "action": "Ignore"}]
BLEND = ["0.3", "a", "0.7"]
PATCH = {"Content-Type": "application/merge-patch+json"}


def definition(*, rules: bool) -> dict[str, Any]:
    """The definition under another group, with its rules or as a release without any."""
    made = copy.deepcopy(custom_resource_definition())
    made["metadata"]["name"] = f"megatronjobs.{GROUP}"
    made["spec"]["group"] = GROUP
    made["spec"]["names"] |= {"shortNames": [], "categories": []}
    schema = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    if not rules:
        del schema["properties"]["spec"]["x-kubernetes-validations"]
    del schema["x-kubernetes-validations"]
    return made


def job(changes: dict[str, Any]) -> dict[str, Any]:
    return changed(changes) | {"apiVersion": f"{GROUP}/v1alpha1"}


@pytest.fixture
def client(plane: kube.ControlPlane, tmp_path: Any) -> Iterator[httpx.Client]:
    """Yield a client of a server that has stored jobs which break rules that took effect afterwards."""
    with plane.client() as client:
        apply(plane, tmp_path, definition(rules=False))
        gateway.wait_for(lambda: client.post(JOBS, json=job(RESERVED)).status_code in {201, 409})
        blocks = job({"spec.runPolicy": {"rules": BOTH_CODES}, "spec.data": {"path": BLEND}})
        assert client.post(JOBS, json=blocks | {"metadata": {"name": "blocks"}}).is_success
        apply(plane, tmp_path, definition(rules=True))
        new = job(RESERVED) | {"metadata": {"name": "new"}}
        gateway.wait_for(lambda: client.post(JOBS, params={"dryRun": "All"}, json=new).status_code == 422)
        yield client
    assert plane.kubectl("delete", "crd", f"megatronjobs.{GROUP}").returncode == 0


def apply(plane: kube.ControlPlane, folder: Any, document: dict[str, Any]) -> None:
    path = folder / "crd.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    done = plane.kubectl("apply", "--server-side", "-f", str(path))
    assert done.returncode == 0, done.stderr


def test_an_update_is_refused_only_for_what_it_breaks(client: httpx.Client) -> None:
    def patch(**spec: Any) -> httpx.Response:
        return client.patch(f"{JOBS}/small", json={"spec": spec}, headers=PATCH)

    assert client.patch(f"{JOBS}/small", json={"metadata": {"labels": {"a": "b"}}}, headers=PATCH).is_success
    suspended = patch(suspend=True)
    assert suspended.is_success, suspended.text
    status = client.patch(f"{JOBS}/small/status", json={"status": {"phase": "Suspended"}}, headers=PATCH)
    assert status.is_success, status.text
    other = patch(parallelism={"tensor": 3})
    assert other.status_code == 422 and "NNODES" not in other.text, "another rule"
    assert patch(env=[]).is_success
    again = patch(env=[{"name": "NNODES", "value": "2"}])
    assert again.status_code == 422 and "NNODES" in again.text


@pytest.mark.full("a variant of the update beside it")
def test_an_update_is_judged_by_a_rule_that_compares_its_block(client: httpx.Client) -> None:
    def patch(**spec: Any) -> httpx.Response:
        return client.patch(f"{JOBS}/blocks", json={"spec": spec}, headers=PATCH)

    suspended = patch(suspend=True)
    assert suspended.is_success, suspended.text
    for broken, unchanged, message in (
        ({"runPolicy": {"rules": BOTH_CODES}}, {"runPolicy": {"rules": IN_CODES}}, "either in or notIn"),
        ({"data": {"path": BLEND}}, {"data": {"path": ["0.3", "a", "0.7", "b"]}}, "a weight before every prefix"),
    ):
        mended = patch(**unchanged)
        assert mended.is_success, mended.text
        again = patch(**broken)
        assert again.status_code == 422 and message in again.text, again.text
