"""Authors of a MegatronJob in each namespace: the chart's second policy, on the real API server with real Roles."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import kube
import pytest
from rule_example import BASE

from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.names import GROUP, VERSION
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PROFILES

Object = dict[str, Any]
HOME, TEAM = "authors-home", "authors-team"
POLICY = "authors.megatronapp.io"
WRITER, AUTHOR, GUARDIAN = "writer", "author", "guardian"
"""All may write MegatronJobs; author and guardian may create pods, too, and the guardian PodDisruptionBudgets."""
PROTECT: Object = {"runPolicy": {"disruption": "Protect"}}
MERGE = {"Content-Type": "application/merge-patch+json"}


def rendered(*settings: str) -> "subprocess.CompletedProcess[str]":
    place = ("megatronapp", str(kube.ROOT / "charts" / "megatronapp"), "-n", HOME, "--kube-version", "1.35.4")
    shown = ("--show-only", "templates/authors-policy.yaml")
    command = [str(kube.programs("helm") / "helm"), "template", *place, *shown]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=120)


def rights(user: str, namespace: str) -> list[Object]:
    written = ["megatronjobs", "megatronjobs/status", "megatronprofiles"]
    jobs = {"apiGroups": ["megatronapp.io"], "resources": written, "verbs": ["*"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    budgets = {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["create"]}
    api, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    metadata = {"name": user, "namespace": namespace}
    role = {
        "apiVersion": api,
        "kind": "Role",
        "metadata": metadata,
        "rules": {WRITER: [jobs], AUTHOR: [jobs, pods], GUARDIAN: [jobs, pods, budgets]}[user],
    }
    binding = {
        "apiVersion": api,
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
    return [role, binding]


def rights_everywhere(name: str, user: str, rule: Object) -> list[Object]:
    api, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    role = {"apiVersion": api, "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]}
    binding = {
        "apiVersion": api,
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
    return [role, binding]


def job(name: str, changes: Object) -> Object:
    metadata, spec = {"name": name}, BASE["spec"] | changes
    return {"apiVersion": "megatronapp.io/v1alpha1", "kind": "MegatronJob", "metadata": metadata, "spec": spec}


class JobAuthors:
    """Client of the API server that impersonates a user in each request."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def create(
        self, user: str, namespace: str, name: str, changes: Object | None = None, **parameters: str
    ) -> httpx.Response:
        headers, document = {"Impersonate-User": user}, job(name, changes or {})
        return self._client.post(JOBS.path(namespace), json=document, headers=headers, params=parameters)

    def create_profile(self, kind: ProfileKind, user: str, **template: Any) -> httpx.Response:
        """Send a profile that the API server judges and does not store."""
        place = None if kind is ProfileKind.CLUSTER else TEAM
        document = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": "team"}}
        spec = {"template": {"image": "registry.example/trainer:1"} | template}
        headers, path = {"Impersonate-User": user}, PROFILES[kind].path(place)
        return self._client.post(path, json=document | {"spec": spec}, headers=headers, params={"dryRun": "All"})

    def patch(self, user: str, name: str, change: Object, part: str = "") -> httpx.Response:
        headers = MERGE | {"Impersonate-User": user}
        return self._client.patch(f"{JOBS.path(TEAM)}/{name}{part}", json=change, headers=headers)


@pytest.fixture(scope="module")
def authors(plane: kube.ControlPlane) -> Iterator[JobAuthors]:
    """Put the policy in force, and remove it afterwards."""
    for namespace in (HOME, TEAM):
        assert plane.kubectl("create", "namespace", namespace).returncode == 0
    users = (WRITER, AUTHOR, GUARDIAN)
    given = [right for namespace in (HOME, TEAM) for user in users for right in rights(user, namespace)]
    policy = plane.folder / "authors-policy.yaml"
    policy.write_text(rendered().stdout, encoding="utf-8")
    with plane.client() as client, plane.given(given):
        authors = JobAuthors(client)
        assert authors.create(WRITER, TEAM, "early").is_success
        with plane.in_force(policy, POLICY, lambda: authors.create(WRITER, TEAM, "probe", dryRun="All")):
            yield authors
    assert plane.kubectl("delete", "mgj", "--all", "-n", TEAM).returncode == 0


def test_who_may_not_create_pods_makes_no_job(authors: JobAuthors) -> None:
    answer = authors.create(WRITER, TEAM, "gpt")
    assert answer.status_code == 403, answer.text
    message = answer.json()["message"]
    assert f"{WRITER} may not create pods in namespace {TEAM}" in message
    assert "ask for a Role with the verb create on pods" in message


def test_who_may_create_pods_makes_and_changes_jobs(authors: JobAuthors) -> None:
    answer = authors.create(AUTHOR, TEAM, "gpt")
    assert answer.is_success, answer.text
    answer = authors.patch(AUTHOR, "gpt", {"spec": {"suspend": True}})
    assert answer.is_success, answer.text


def test_who_may_not_create_pods_changes_no_spec(authors: JobAuthors) -> None:
    answer = authors.patch(WRITER, "early", {"spec": {"suspend": True}})
    assert answer.status_code == 403, answer.text
    assert "may not create pods" in answer.json()["message"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"metadata": {"labels": {"team": "a"}}}, ""),
        ({"metadata": {"finalizers": ["example.io/keep"]}}, ""),
        ({"metadata": {"finalizers": []}}, ""),
        ({"status": {"phase": "Pending"}}, "/status"),
    ],
    ids=["label", "finalizer", "finalizer gone", "status"],
)
def test_what_is_not_the_spec_needs_no_right_on_pods(authors: JobAuthors, change: Object, part: str) -> None:
    answer = authors.patch(WRITER, "early", change, part)
    assert answer.is_success, answer.text


def test_a_profile_is_written_by_those_who_may_create_the_pods_of_its_jobs(
    authors: JobAuthors, plane: kube.ControlPlane
) -> None:
    assert authors.create_profile(ProfileKind.NAMESPACE, AUTHOR).is_success
    answer = authors.create_profile(ProfileKind.NAMESPACE, WRITER)
    assert answer.status_code == 403, answer.text
    assert f"{WRITER} may not create pods in namespace {TEAM}" in answer.json()["message"]

    profiles = {"apiGroups": [GROUP], "resources": [PROFILES[ProfileKind.CLUSTER].plural], "verbs": ["create"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    with plane.given(rights_everywhere("profiles", AUTHOR, profiles)):
        answer = authors.create_profile(ProfileKind.CLUSTER, AUTHOR)
        assert answer.status_code == 403, answer.text
        assert f"{AUTHOR} may not create pods in all namespaces" in answer.json()["message"]
        with plane.given(rights_everywhere("profile-pods", AUTHOR, pods)):
            answer = authors.create_profile(ProfileKind.CLUSTER, AUTHOR)
            assert answer.is_success, answer.text


def test_a_job_is_protected_from_evictions_by_those_who_may_create_budgets(authors: JobAuthors) -> None:
    """Check that no author keeps nodes from being drained by the operator's rights instead of their own."""
    text = "runPolicy.disruption: you may not create PodDisruptionBudgets there"
    answer = authors.create(AUTHOR, TEAM, "guarded", PROTECT)
    assert answer.status_code == 403 and text in answer.json()["message"], answer.text
    assert authors.create(AUTHOR, TEAM, "open", {"runPolicy": {"disruption": "Allow"}}).is_success
    answer = authors.patch(AUTHOR, "open", {"spec": PROTECT})
    assert answer.status_code == 403 and text in answer.json()["message"], answer.text
    answer = authors.create_profile(ProfileKind.NAMESPACE, AUTHOR, **PROTECT)
    assert answer.status_code == 403 and text in answer.json()["message"], answer.text
    for answer in (
        authors.create(GUARDIAN, TEAM, "guarded", PROTECT),
        authors.patch(GUARDIAN, "open", {"spec": PROTECT}),
        authors.create_profile(ProfileKind.NAMESPACE, GUARDIAN, **PROTECT),
        authors.patch(AUTHOR, "guarded", {"spec": {"suspend": True}}),
    ):
        assert answer.is_success, answer.text
    answer = authors.patch(AUTHOR, "guarded", {"spec": {"runPolicy": {"checkpointAgeSeconds": 1}}})
    assert answer.status_code == 403 and text in answer.json()["message"], "a smaller age protects more"
    assert authors.patch(AUTHOR, "guarded", {"spec": {"runPolicy": {"disruption": "Allow"}}}).is_success


def test_the_namespace_with_the_key_takes_no_job(authors: JobAuthors) -> None:
    answer = authors.create(AUTHOR, HOME, "gpt")
    assert answer.status_code == 403, answer.text
    assert f"{HOME} holds the key of all jobs" in answer.json()["message"]


def test_a_watched_release_namespace_takes_jobs_and_the_switch_removes_all() -> None:
    watched = rendered(f"watchNamespaces[0]={HOME}").stdout
    assert "check('create')" in watched
    assert "holds the key" not in watched
    for switch in ("admissionPolicy.authors=false", "admissionPolicy.enabled=false"):
        assert "could not find template" in rendered(switch).stderr
