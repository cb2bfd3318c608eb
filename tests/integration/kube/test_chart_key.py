"""Installation key of the chart in installs, upgrades, rollbacks and uninstalls of helm on the real API server."""

import base64
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

import kube
import pytest
import yaml

CHART = kube.ROOT / "charts" / "megatronapp"
NAME = "megatronapp"
OFF = ("--set", "crds.enabled=false,admissionPolicy.enabled=false,rbac.create=false")
"""Flags that leave out what belongs to the whole cluster, which is not for these tests alone."""
Helm = Callable[..., str]


@pytest.fixture
def helm(plane: kube.ControlPlane, namespace: str) -> Helm:
    program = kube.programs("helm") / "helm"
    environment = {"HOME": str(plane.folder), "PATH": "/usr/bin:/bin"}
    place = ("--kubeconfig", str(plane.kubeconfig()), "-n", namespace)

    def run(*arguments: str) -> str:
        command = [str(program), *arguments, *place]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def read_key(plane: kube.ControlPlane, namespace: str) -> str:
    done = plane.kubectl("get", "secret", f"{NAME}-key", "-n", namespace, "-o", "jsonpath={.data.key}")
    assert done.returncode == 0, done.stderr
    return base64.b64decode(done.stdout).decode()


def rotate_key(plane: kube.ControlPlane, namespace: str) -> str:
    """Write a new key in front of the old one, as the chart's README says."""
    rotated = f"{'ab' * 32}\n{read_key(plane, namespace)}\n"
    patch = json.dumps({"stringData": {"key": rotated}})
    done = plane.kubectl("patch", "secret", f"{NAME}-key", "-n", namespace, "-p", patch)
    assert done.returncode == 0, done.stderr
    return rotated


def test_the_key_is_made_once_and_survives_upgrade_rollback_and_uninstall(
    plane: kube.ControlPlane, namespace: str, helm: Helm
) -> None:
    helm("install", NAME, str(CHART), *OFF)
    first = read_key(plane, namespace)
    assert re.fullmatch("[0-9a-f]{64}", first)
    helm("upgrade", NAME, str(CHART), *OFF, "--set", "operator.replicaCount=2")
    assert read_key(plane, namespace) == first
    rotated = rotate_key(plane, namespace)
    helm("rollback", NAME, "1")
    assert read_key(plane, namespace) == rotated
    helm("uninstall", NAME)
    assert read_key(plane, namespace) == rotated
    helm("install", NAME, str(CHART), *OFF)
    assert read_key(plane, namespace) == rotated


def test_an_upgrade_from_a_chart_with_the_key_in_its_release_leaves_the_key(
    plane: kube.ControlPlane, namespace: str, helm: Helm, tmp_path: pathlib.Path
) -> None:
    """Helm deletes what an upgrade leaves out, unless the object says that it is to stay."""
    older = tmp_path / "chart"
    shutil.copytree(CHART, older)
    template = older / "templates" / "key.yaml"
    hook = re.compile(r"^ *helm\.sh/hook.*\n", re.MULTILINE)
    template.write_text(hook.sub("", template.read_text(encoding="utf-8")), encoding="utf-8")
    helm("install", NAME, str(older), *OFF)
    assert "kind: Secret" in helm("get", "manifest", NAME)
    rotated = rotate_key(plane, namespace)
    helm("upgrade", NAME, str(CHART), *OFF)
    assert "kind: Secret" not in helm("get", "manifest", NAME)
    assert read_key(plane, namespace) == rotated


def test_rendering_without_a_cluster_makes_a_new_key_each_time_that_no_hook_replaces(helm: Helm) -> None:
    flags = ("--kube-version", "1.35.4", "--show-only", "templates/key.yaml")
    first, second = (yaml.safe_load(helm("template", NAME, str(CHART), *flags)) for _ in range(2))
    assert first["data"]["key"] != second["data"]["key"]
    assert "before-hook-creation" not in first["metadata"]["annotations"]["helm.sh/hook-delete-policy"]


def test_a_secret_without_a_key_is_refused_by_name(plane: kube.ControlPlane, namespace: str, helm: Helm) -> None:
    made = plane.kubectl("create", "secret", "generic", f"{NAME}-key", "-n", namespace, "--from-literal=other=1")
    assert made.returncode == 0, made.stderr
    with pytest.raises(AssertionError, match=f"Secret {NAME}-key has no value under 'key'"):
        helm("install", NAME, str(CHART), *OFF)
