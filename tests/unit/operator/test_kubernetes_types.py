"""Gangs for Kubernetes' own scheduler against the API types of releases whose API server the tests do not build.

The module of the API types has an object of each kind with all of its fields.
"""

import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import rendered

from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.resources import KUBERNETES_POD_GROUPS, Resource
from megatronapp_operator.backends.kubernetes.render import AttemptSettings

pytestmark = pytest.mark.full("downloads the API types of two releases of Kubernetes")
RELEASES = {
    "v0.37.2": ("h1:PnxqnUFy93jr2GcpWDkKOm8wfy25kT9wa572MuQS8oc=", KUBERNETES_POD_GROUPS[0]),
    "v0.36.1": ("h1:XbL/EMj8K2aJpJtePmqUyQMsM0D4QI2pvl7YKJ20FTY=", KUBERNETES_POD_GROUPS[1]),
}
"""Versions of k8s.io/api with the hash of their content, and the kind of pod groups that they have."""
CLAIMS = {
    "resourceClaims": [{"name": "channel", "resourceClaimTemplateName": "nvlink-channel"}],
    "containers": [{"name": "trainer", "resources": {"claims": [{"name": "channel", "request": "channel"}]}}],
}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[pathlib.Path, Resource]:
    """Return the folder with the objects of a release, and its kind of pod groups."""
    digest, resource = RELEASES[request.param]
    command = ["go", "mod", "download", "-json", f"k8s.io/api@{request.param}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
    answer = json.loads(done.stdout)
    assert answer["Sum"] == digest
    return pathlib.Path(answer["Dir"]) / "testdata" / "HEAD", resource


def paths(value: Any, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield the path of each field below `spec`, without indexes, with the type of its value."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield f"{path}.{name}", type(child)
            yield from paths(child, f"{path}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from paths(child, f"{path}[]")


OPEN = (".requests.", ".limits.", ".nodeSelector.", ".matchLabels.")
"""Maps whose keys are the user's."""


def unknown(made: dict[str, Any], whole: pathlib.Path) -> set[tuple[str, type]]:
    known = set(paths(json.loads(whole.read_text(encoding="utf-8"))["spec"]))
    return {field for field in paths(made["spec"]) if not any(part in field[0] for part in OPEN)} - known


def test_the_group_and_its_pods_have_fields_of_the_release(release: tuple[pathlib.Path, Resource]) -> None:
    folder, resource = release
    job = rendered.make_job(
        {
            **rendered.GPUS,
            "scheduling": {"gang": "Kubernetes"},
            "priorityClassName": "high",
            "podTemplate": {"spec": CLAIMS},
        }
    )
    settings = rendered.with_settings(pod_groups=resource)
    objects = render.gang_objects(job, rendered.owner_of(job), AttemptSettings(number=0), settings)
    (group,) = [obj for kind, obj in objects if kind == resource]
    assert unknown(group, folder / f"{group['apiVersion'].replace('/', '.')}.PodGroup.json") == set()
    pod = rendered.make_worker(job, pod_groups=resource)
    assert unknown(pod, folder / "core.v1.Pod.json") == set()
    assert unknown({"spec": pod["spec"] | {"workloadRef": {}}}, folder / "core.v1.Pod.json") == {(".workloadRef", dict)}
