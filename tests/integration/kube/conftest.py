"""One control plane for all tests of this folder, with our CRD in it; each test has its own namespace."""

import itertools
import pathlib
from collections.abc import Iterator

import door
import kube
import pytest

_NUMBERS = itertools.count()
CRD = kube.ROOT / "crds" / "megatronjob.yaml"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube.ControlPlane]:
    with kube.control_plane(tmp_path_factory.mktemp("control-plane"), users=("nobody",)) as plane:
        apply(plane, CRD)
        with plane.client() as client:
            door.wait_for(lambda: client.get("/apis/megatronapp.io/v1alpha1/megatronjobs").is_success)
        yield plane


@pytest.fixture(scope="session")
def reviewing(plane: kube.ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[door.Door]:
    """A door that asks the cluster about its callers."""
    with door.door(plane, tmp_path_factory.mktemp("reviewing")) as running:
        yield running


@pytest.fixture
def namespace(plane: kube.ControlPlane) -> str:
    name = f"test-{next(_NUMBERS)}"
    done = plane.kubectl("create", "namespace", name)
    assert done.returncode == 0, done.stderr
    return name


def apply(plane: kube.ControlPlane, path: pathlib.Path) -> None:
    done = plane.kubectl("apply", "--server-side", "-f", str(path))
    assert done.returncode == 0, done.stderr
