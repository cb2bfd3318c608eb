"""Rendered objects, judged by a real API server: schemas, pod security, pod groups of other projects."""

import re
from collections.abc import Iterator

import httpx
import kube
import pytest
import rendered

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.resources import PODS
from megatronapp_operator.backends.kubernetes.render import AttemptSettings, Rendered
from megatronapp_operator.controller.capabilities import CONTAINER_RESTARTS

LEVELS = ("privileged", "restricted")
POD_GROUPS = ("volcano", "coscheduling", "kai")
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
RESTRICTED = sorted(set(rendered.VARIETY) - rendered.UNRESTRICTED)


@pytest.fixture(scope="module")
def server(plane: kube.ControlPlane) -> Iterator[httpx.Client]:
    """The API server with the pod groups of other projects, and a namespace for each level of pod security."""
    for project in POD_GROUPS:
        plane.define(kube.ROOT / "tests" / "fixtures" / "kube" / f"{project}-podgroups.yaml")
    for level in LEVELS:
        labels = {"pod-security.kubernetes.io/enforce": level}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": level, "labels": labels}}
        assert plane.kubectl("create", "-f", "-", stdin=namespace).returncode == 0
    with plane.client() as client:
        yield client


def try_out(server: httpx.Client, rendered_object: Rendered) -> httpx.Response:
    """Have the server judge an object as if it were created."""
    resource, obj = rendered_object
    return server.post(resource.path(obj["metadata"]["namespace"]), params=STRICT, json=obj)


def try_apply(server: httpx.Client, rendered_object: Rendered) -> httpx.Response:
    """The same for an object that the operator applies."""
    resource, obj = rendered_object
    path = resource.path(obj["metadata"]["namespace"], obj["metadata"]["name"])
    query = {**STRICT, "fieldManager": "tests", "force": "true"}
    return server.patch(path, params=query, json=obj, headers={"Content-Type": "application/apply-patch+yaml"})


def gang(job: MegatronJob) -> tuple[Rendered, ...]:
    owner = rendered.owner_of(job)
    life = AttemptSettings(number=12, excluded_nodes=("gpu-3", "gpu-4"))
    objects = render.gang_objects(job, owner, life, rendered.SETTINGS)
    hub = render.hub_objects(job, owner, rendered.SETTINGS) if job.spec.analyzer.enabled else ()
    return (*objects, *hub)


def pods(job: MegatronJob) -> Iterator[Rendered]:
    owner = rendered.owner_of(job)
    for group in job.world.worker_groups:
        yield PODS, rendered.make_worker(job, group.first, attempt=12, excluded=("gpu-3", "gpu-4"))
    if job.spec.analyzer.enabled:
        yield PODS, render.hub_pod(job, owner, rendered.SETTINGS, starts=2)
    if (init := render.init_pod(job, owner)) is not None:
        yield PODS, init


@pytest.mark.parametrize("kind", rendered.VARIETY)
def test_every_object_is_accepted(server: httpx.Client, kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind], namespace="privileged")
    secret = render.secret(rendered.owner_of(job), "ab" * 32, rendered.SETTINGS)
    answers = [try_apply(server, gang_object) for gang_object in gang(job)] + [
        try_out(server, gang_object) for gang_object in (secret, *pods(job))
    ]
    assert [answer.text for answer in answers if not answer.is_success] == []
    assert [answer.headers["warning"] for answer in answers if "warning" in answer.headers] == []


@pytest.mark.parametrize("kind", RESTRICTED)
def test_pods_without_special_rights_pass_the_restricted_standard(server: httpx.Client, kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind], namespace="restricted")
    answers = [try_out(server, pod) for pod in pods(job)]
    assert [answer.text for answer in answers if not answer.is_success] == []


def violations(server: httpx.Client, patch: rendered.Object) -> list[str]:
    """Return the violations of the restricted standard in the first worker of a job, one text for each of its
    checks."""
    job = rendered.make_job(patch, namespace="restricted")
    answer = try_out(server, next(pods(job)))
    assert answer.status_code == httpx.codes.FORBIDDEN, answer.text
    found = re.search(r'violates PodSecurity "restricted:latest": (.*)', answer.json()["message"])
    assert found is not None, answer.text
    return re.split(r"\), ", found[1].rstrip(")"))


def test_pinning_memory_adds_root_and_a_single_capability(server: httpx.Client) -> None:
    assert violations(server, rendered.VARIETY["rdma-analyzed"]) == [
        'unrestricted capabilities (container "trainer" must not include "IPC_LOCK" in '
        "securityContext.capabilities.add",
        'runAsNonRoot != true (container "trainer" must not set securityContext.runAsNonRoot=false',
        'runAsUser=0 (container "trainer" must not set runAsUser=0',
    ]


def test_the_network_of_the_node_adds_itself_and_its_ports(server: httpx.Client) -> None:
    assert violations(server, rendered.VARIETY["host-network"]) == [
        "host namespaces (hostNetwork=true",
        'hostPort (container "trainer" uses hostPorts 19400, 19401',
    ]


def test_containers_of_ours_cost_a_pod_no_guarantee(server: httpx.Client) -> None:
    """The server itself says which class of service a pod has."""
    sure = {"cpu": "4", "memory": "8Gi"}
    patch = {**rendered.ANALYZED, "resources": {"requests": sure, "limits": sure}}
    for kind in ("plain", "initializers", "sriov"):
        given = rendered.joined(patch, rendered.VARIETY[kind])
        job = rendered.make_job(given, namespace="privileged")
        answer = try_out(server, next(pods(job)))
        assert answer.json()["status"]["qosClass"] == "Guaranteed", kind


def test_a_hub_of_a_job_with_special_rights_has_none(server: httpx.Client) -> None:
    job = rendered.make_job(rendered.VARIETY["rdma-analyzed"], namespace="restricted")
    hub = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=1)
    answer = try_out(server, (PODS, hub))
    assert answer.is_success, answer.text


def test_a_restart_policy_of_a_container_is_stored_where_the_release_has_it(server: httpx.Client) -> None:
    job = rendered.make_job(rendered.ANALYZED, namespace="restricted")
    pod = rendered.make_worker(job, container_restarts=True)
    answer = try_out(server, (PODS, pod))
    if int(server.get("/version").json()["minor"]) < CONTAINER_RESTARTS:
        assert "restartPolicy: Forbidden" in answer.text
        return
    assert answer.is_success, answer.text
    assert [container.get("restartPolicy") for container in answer.json()["spec"]["containers"]] == [None, "OnFailure"]


def test_the_server_would_have_refused_what_is_wrong(server: httpx.Client) -> None:
    """The checks above can fail: a misspelt field, a pod group with a field that its project does not have."""
    job = rendered.make_job(rendered.VARIETY["volcano"], namespace="privileged")
    pod, group = next(pods(job)), next(gang_object for gang_object in gang(job) if gang_object[1]["kind"] == "PodGroup")
    pod[1]["spec"]["hostNam"] = "x"
    group[1]["spec"]["scheduleTimeoutSeconds"] = 3
    answers = [try_out(server, pod), try_out(server, group)]
    assert [answer.status_code for answer in answers] == [400, 400]
    messages = [answer.json()["message"] for answer in answers]
    assert 'unknown field "spec.hostNam"' in messages[0]
    assert 'unknown field "spec.scheduleTimeoutSeconds"' in messages[1]


@pytest.mark.parametrize("project", POD_GROUPS)
def test_pod_groups_are_judged_by_their_projects_schema(server: httpx.Client, project: str) -> None:
    job = rendered.make_job(rendered.VARIETY[project], namespace="privileged")
    groups = [gang_object for gang_object in gang(job) if gang_object[1]["kind"] == "PodGroup"]
    assert [obj["metadata"]["name"] for _, obj in groups] == ["gpt-a12"]
    groups[0][1]["spec"]["minMember"] = "two"
    assert "must be of type integer" in try_out(server, groups[0]).text
