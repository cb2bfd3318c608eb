"""A real Kueue on a real API server."""

import pathlib
import shutil
from collections.abc import Iterator

import kube
import kueue
import pytest


@pytest.fixture(scope="session")
def queued_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube.ControlPlane]:
    """A control plane with our definitions, and Kueue."""
    if shutil.which("go") is None:
        pytest.skip("Kueue is built with Go, which is not on the PATH")
    with kube.control_plane(tmp_path_factory.mktemp("control-plane")) as plane:
        plane.define(*sorted((kube.ROOT / "crds").glob("*.yaml")))
        with kueue.kueue(plane, tmp_path_factory.mktemp("kueue")):
            yield plane


@pytest.fixture
def collectors(queued_plane: kube.ControlPlane, tmp_path: pathlib.Path) -> Iterator[None]:
    """Start the cluster's collectors of objects whose owner is deleted, and of pods that no kubelet ends."""
    with kueue.collectors(queued_plane, tmp_path):
        yield


@pytest.fixture
def namespace(queued_plane: kube.ControlPlane) -> str:
    return queued_plane.new_namespace("queued")
