"""The chart's limit on how deep fields without a schema are nested, judged by the API server itself.

Without it the server stores a job that it cannot read again, and no list of jobs succeeds any more: such jobs are sent
as dry runs only.
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import kube
import pytest
from operator_simulation import manifest

from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.load import MAX_LEVELS
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PROFILES, Object, Resource

POLICY = "depth.megatronapp.io"
PROBLEM = f"is nested more than {MAX_LEVELS} levels deep; write fewer"
UNREADABLE = 9995
"""Levels of a pod template with which the server stores a job that it cannot read again."""
NESTED = "@"
HEADERS = {"Content-Type": "application/json"}
CLUSTER, NAMESPACE = ProfileKind.CLUSTER, ProfileKind.NAMESPACE


def nested(levels: int) -> str:
    """Return JSON with this number of maps and lists in each other."""
    lists, last = divmod(levels - 1, 2)
    return '{"a":[' * lists + '{"a":' * last + "{}" + "}" * last + "]}" * lists


class PolicyClient:
    """Client that sends jobs and profiles as dry runs."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.older = JOBS.path(namespace, "older")
        """A job that was stored before the policy was in force."""

    def judge(self, resource: Resource, levels: int, **fields: Any) -> httpx.Response:
        """Send an object with these fields of its spec or template, nested at the place of NESTED."""
        kinds: dict[Resource, str] = {PROFILES[kind]: kind for kind in ProfileKind}
        if resource == JOBS:
            document = manifest(self.namespace, "judged", **fields)
        else:
            head = {"apiVersion": JOBS.api_version, "kind": kinds[resource], "metadata": {"name": "judged"}}
            document = head | {"spec": {"template": fields}}
        place = None if resource == PROFILES[CLUSTER] else self.namespace
        text = json.dumps(document).replace(f'"{NESTED}"', nested(levels))
        return self.client.post(resource.path(place), content=text, params={"dryRun": "All"}, headers=HEADERS)

    def store(self, name: str, levels: int) -> None:
        """Store a job with a nested affinity."""
        text = json.dumps(manifest(self.namespace, name, affinity=NESTED)).replace(f'"{NESTED}"', nested(levels))
        assert self.client.post(JOBS.path(self.namespace), content=text, headers=HEADERS).is_success

    def patch(self, change: Object) -> httpx.Response:
        return self.client.patch(self.older, json=change, headers=kube.MERGE_PATCH)


@pytest.fixture(scope="module")
def policy(plane: kube.ControlPlane) -> Iterator[PolicyClient]:
    chart = ("megatronapp", str(kube.ROOT / "charts" / "megatronapp"), "--kube-version", "1.35.4")
    command = [str(kube.programs("helm") / "helm"), "template", *chart, "--show-only", "templates/depth-policy.yaml"]
    path = plane.folder / "depth-policy.yaml"
    path.write_bytes(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    with plane.client() as client:
        policy = PolicyClient(client, plane.new_namespace("depth"))
        policy.store("older", 1100)
        with plane.in_force(path, POLICY, lambda: policy.judge(JOBS, MAX_LEVELS + 1, affinity=NESTED)):
            yield policy


@pytest.mark.parametrize(
    ("resource", "place"),
    [(JOBS, "spec"), (PROFILES[NAMESPACE], "spec.template"), (PROFILES[CLUSTER], "spec.template")],
    ids=["job", "profile", "profile-of-the-cluster"],
)
def test_fields_are_accepted_up_to_the_limit_of_the_operator(
    policy: PolicyClient, resource: Resource, place: str
) -> None:
    pod = {"spec": {"affinity": NESTED}}
    for levels in (1, MAX_LEVELS):
        assert policy.judge(resource, levels, affinity=NESTED).is_success
    assert policy.judge(resource, MAX_LEVELS - 2, podTemplate=pod).is_success
    assert policy.judge(resource, 1, image="a:1").is_success
    for levels in (MAX_LEVELS + 1, 1100, UNREADABLE):
        answer = policy.judge(resource, levels, affinity=NESTED)
        assert answer.status_code == 422 and f"{place}.affinity: {PROBLEM}" in answer.json()["message"], answer.text
    for levels in (MAX_LEVELS - 1, UNREADABLE - 2):
        answer = policy.judge(resource, levels, podTemplate=pod)
        assert answer.status_code == 422 and f"{place}.podTemplate: {PROBLEM}" in answer.json()["message"], answer.text


def test_a_large_pod_template_is_within_the_budget_of_the_policy(policy: PolicyClient) -> None:
    env = [{"name": f"NAME_{number}", "value": "value"} for number in range(200)]
    containers = [{"name": f"sidecar-{number}", "image": "a:1", "env": env} for number in range(20)]
    answer = policy.judge(JOBS, 0, podTemplate={"spec": {"containers": containers}})
    assert answer.is_success, answer.text


def test_an_older_job_keeps_its_metadata_changeable_and_can_be_corrected(policy: PolicyClient) -> None:
    assert policy.patch({"metadata": {"labels": {"team": "a"}}}).is_success
    assert PROBLEM in policy.patch({"spec": {"suspend": True}}).text
    assert policy.patch({"spec": {"affinity": None}}).is_success
    assert policy.patch({"spec": {"suspend": True}}).is_success
    assert policy.client.delete(policy.older).is_success
