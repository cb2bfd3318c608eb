"""The policy about podTemplates, judged by the API server itself on the same examples as locally."""

from collections.abc import Iterator
from typing import Any

import httpx
import kube
import pytest
from rule_examples import ADMISSION_EXAMPLES, Example, changed, manifest

from megatronapp_common.job.admission import POLICY
from megatronapp_operator.backends.kubernetes.client.resources import JOBS

DRY = {"fieldValidation": "Strict", "dryRun": "All"}
FILE = kube.ROOT / "charts" / "megatronapp" / "files" / "admission-policy.yaml"


@pytest.fixture(scope="module")
def older(plane: kube.ControlPlane) -> str:
    """Return the address of a job that was accepted before the policy took effect, which would refuse it."""
    document = changed({"spec.podTemplate.spec": {"hostname": "a"}}) | {"metadata": {"name": "older"}}
    with plane.client() as client:
        assert client.post(JOBS.path("default"), json=document).is_success
    return JOBS.path("default", "older")


@pytest.fixture(scope="module")
def client(plane: kube.ControlPlane, older: str) -> Iterator[httpx.Client]:
    """Yield a client of an API server with the policy in force, and remove the policy afterwards."""
    refused = changed({"spec.podTemplate.spec": {"hostname": "a"}})
    with plane.client() as client, plane.in_force(FILE, POLICY, lambda: post(client, refused)):
        yield client


def post(client: httpx.Client, document: dict[str, Any]) -> httpx.Response:
    return client.post(JOBS.path("default"), params=DRY, json=document)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=f"{example.rule_id}-{'good' if example.good else 'bad'}")
        for example in ADMISSION_EXAMPLES
    ],
)
def test_a_pod_template_is_judged_as_locally(client: httpx.Client, example: Example) -> None:
    answer = post(client, manifest(example))
    if example.good:
        assert answer.is_success, answer.text
        return
    assert answer.status_code == 422, answer.text
    message = answer.json()["message"]
    assert POLICY in message
    assert (example.server_message or f"{example.field}: ") in message
    assert (example.server_message or example.message) in message


def test_a_job_from_before_the_policy_may_be_edited_unless_the_edit_breaks_another_rule(
    client: httpx.Client, older: str
) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    label = client.patch(
        older, json={"metadata": {"labels": {"team": "a"}, "finalizers": ["example.com/a"]}}, headers=headers
    )
    assert label.is_success, label.text
    assert client.patch(older, json={"metadata": {"finalizers": []}}, headers=headers).is_success
    assert client.patch(older, json={"spec": {"suspend": True}}, headers=headers).is_success
    other = client.patch(older, json={"spec": {"podTemplate": {"spec": {"subdomain": "b"}}}}, headers=headers)
    assert other.status_code == 422 and "subdomain" in other.text and "hostname" not in other.text
    mended = client.patch(older, json={"spec": {"podTemplate": {"spec": {"hostname": None}}}}, headers=headers)
    assert mended.is_success, mended.text
    again = client.patch(older, json={"spec": {"podTemplate": {"spec": {"hostname": "a"}}}}, headers=headers)
    assert again.status_code == 422 and "hostname" in again.text
