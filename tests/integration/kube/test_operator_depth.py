"""Objects that are nested as deep as an API server stores them: they stop neither the operator nor other jobs."""

import asyncio
import json
import pathlib
from collections.abc import Callable, Iterator

import httpx
import kube
import pytest
from operator_process import DEADLINE_S, started
from operator_simulation import manifest

from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.crd import PLURAL
from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, PODS, PROFILES, Object, Resource
from megatronapp_operator.controller.watches import Watches

NESTED = "@"
CLUSTER, NAMESPACE = ProfileKind.CLUSTER, ProfileKind.NAMESPACE
ANY_LEVELS = pytest.mark.parametrize("levels", [200, 1100, 3000, 9900])
"""Python's json fails at about a thousand, depending on its caller; an API server accepts less than ten thousand."""
PROBLEM = "is nested more than 64 levels deep"


class ObjectsOfTest:
    """Requests to the API server about the objects of a test."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def create(self, resource: Resource, obj: Object, levels: int = 0) -> None:
        """Create an object, with this number of levels in the place of NESTED."""
        text = json.dumps(obj).replace(f'"{NESTED}"', '{"f:a":' * levels + "{}" + "}" * levels)
        path = resource.path(obj["metadata"].get("namespace"))
        answer = self._client.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.is_success, answer.text[:1000]
        assert answer.text.count('"f:a":') >= levels, "the API server has stored it"

    def pods(self) -> set[str]:
        items = self._client.get(PODS.path(self._namespace)).raise_for_status().json()["items"]
        return {pod["metadata"]["name"] for pod in items}

    def warnings(self, name: str) -> str:
        """Return the Events of a job."""
        items = self._client.get(EVENTS.path(self._namespace)).raise_for_status().json()["items"]
        found = [item for item in items if item["regarding"]["name"] == name and item["type"] == "Warning"]
        return str([(item["reason"], item["note"]) for item in found])

    def condition(self, name: str) -> str:
        """Return the condition ProfileApplied of a job."""
        conditions = (self.job(name).get("status") or {}).get("conditions") or ()
        return str([item for item in conditions if item["type"] == "ProfileApplied"])

    def job(self, name: str) -> Object:
        found: Object = self._client.get(JOBS.path(self._namespace, name)).raise_for_status().json()
        return found

    def correct(self, name: str) -> None:
        """Remove what is nested in a job."""
        patch = {"spec": {"podTemplate": {"spec": {"affinity": None}}}}
        path = JOBS.path(self._namespace, name)
        self._client.patch(path, json=patch, headers=kube.MERGE_PATCH).raise_for_status()


@pytest.fixture
def objects(plane: kube.ControlPlane, namespace: str) -> Iterator[ObjectsOfTest]:
    with plane.client() as client:
        yield ObjectsOfTest(client, namespace)


def with_fields(obj: Object) -> Object:
    """Return an object with managed fields that are nested."""
    entry = {
        "manager": "a-client",
        "operation": "Update",
        "apiVersion": obj["apiVersion"],
        "time": "2026-11-29T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": NESTED},
    }
    return obj | {"metadata": obj["metadata"] | {"managedFields": [entry]}}


def deep_job(namespace: str, name: str) -> Object:
    """Return a job with a pod template that is nested."""
    return manifest(namespace, name, nodes=1, podTemplate={"spec": {"affinity": NESTED}})


def deep_profile(kind: ProfileKind, name: str, namespace: str) -> Object:
    metadata = {"name": name} | ({"namespace": namespace} if kind is NAMESPACE else {})
    spec = {"template": {"podTemplate": {"spec": {"affinity": NESTED}}}}
    return {"apiVersion": JOBS.api_version, "kind": kind, "metadata": metadata, "spec": spec}


@pytest.mark.full("operators as processes, and an API server takes seconds for the deepest objects")
@ANY_LEVELS
def test_an_operator_manages_other_jobs_and_reports_those_that_are_too_deep(
    plane: kube.ControlPlane, objects: ObjectsOfTest, namespace: str, tmp_path: pathlib.Path, levels: int
) -> None:
    """The objects exist when the operator starts, or are created later."""
    name = f"deep-{namespace}"
    objects.create(JOBS, with_fields(manifest(namespace, "early", nodes=1)), levels)
    objects.create(JOBS, deep_job(namespace, "deep-early"), levels)
    objects.create(PROFILES[CLUSTER], deep_profile(CLUSTER, name, namespace), levels)
    objects.create(JOBS, manifest(namespace, "below", nodes=1, profile=name))
    with started(plane, tmp_path, namespace) as operator:
        operator.wait(lambda: "early-worker-0" in objects.pods())
        objects.create(PROFILES[NAMESPACE], deep_profile(NAMESPACE, "other", namespace), levels)
        objects.create(JOBS, deep_job(namespace, "deep-late"), levels)
        objects.create(JOBS, with_fields(manifest(namespace, "late", nodes=1)), levels)
        operator.wait(lambda: "late-worker-0" in objects.pods())
        for job in ("deep-early", "deep-late"):
            operator.wait(lambda job=job: f"spec.podTemplate: {PROBLEM}" in objects.warnings(job))  # type: ignore[misc]
        operator.wait(lambda: f"spec.template.podTemplate: {PROBLEM}" in objects.condition("below"))
        assert "ProfileInvalid" in objects.condition("below")
        assert objects.pods() == {"early-worker-0", "late-worker-0"}
        objects.correct("deep-late")
        operator.wait(lambda: "deep-late-worker-0" in objects.pods())
    assert "Traceback" not in operator.text()
    assert plane.kubectl("delete", "clustermegatronprofile", name).returncode == 0


def test_commands_list_jobs_next_to_those_that_are_too_deep(
    objects: ObjectsOfTest, namespace: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    objects.create(JOBS, deep_job(namespace, "deep"), 1100)
    objects.create(JOBS, manifest(namespace, "usual"))
    code, table, problem = run("get")
    assert (code, problem, [row.split()[0] for row in table.splitlines()]) == (0, "", ["NAME", "deep", "usual"])


@pytest.mark.full("how deep objects are", but=("1100",))
@pytest.mark.asyncio
@ANY_LEVELS
async def test_watches_deliver_what_is_not_too_deep_whole(
    plane: kube.ControlPlane, objects: ObjectsOfTest, namespace: str, levels: int
) -> None:
    seen: dict[str, Object] = {}

    def on_event(resource: str, _kind: str | None, obj: Object) -> None:
        assert resource == PLURAL
        seen[obj["metadata"]["name"]] = obj

    async def until_seen(*names: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not set(names) <= seen.keys():
                assert watches.alive, watches.error
                await asyncio.sleep(0.02)

    def create_jobs(prefix: str) -> None:
        objects.create(JOBS, with_fields(manifest(namespace, f"{prefix}-fields")), levels)
        objects.create(JOBS, deep_job(namespace, f"{prefix}-template"), levels)
        objects.create(JOBS, manifest(namespace, f"{prefix}-usual"))

    watches = Watches(str(plane.kubeconfig()), [namespace], on_event)
    create_jobs("early")
    try:
        watches.start(asyncio.get_running_loop(), profiles=())
        await until_seen("early-fields", "early-template", "early-usual")
        await asyncio.to_thread(create_jobs, "late")
        await until_seen("late-fields", "late-template", "late-usual")
    finally:
        await asyncio.to_thread(watches.stop)
    assert watches.error is None and not watches.alive
    for prefix in ("early", "late"):
        assert seen[f"{prefix}-fields"]["spec"] == seen[f"{prefix}-usual"]["spec"]
        assert seen[f"{prefix}-usual"] == objects.job(f"{prefix}-usual")
