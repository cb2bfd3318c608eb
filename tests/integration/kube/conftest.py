"""One control plane for all tests of this folder, with our CRD in it; each test has its own namespace."""

import pathlib
from collections.abc import Callable, Iterator

import gateway
import kube
import pytest

from megatronapp_common import cli

DEFINITIONS = sorted((kube.ROOT / "crds").glob("*.yaml"))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube.ControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    authority = gateway.make_authority(folder)  # for users who show certificates
    with kube.control_plane(folder, users=("nobody",), flags=(f"--client-ca-file={authority}",)) as plane:
        plane.define(*DEFINITIONS)
        yield plane


@pytest.fixture(scope="session")
def reviewing(plane: kube.ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.Gateway]:
    """A gateway that asks the cluster about its callers; tests may control as often as they like."""
    with gateway.gateway(plane, tmp_path_factory.mktemp("reviewing"), flags=("--controls=100000",)) as running:
        yield running


@pytest.fixture(scope="session")
def by_tokens(plane: kube.ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.Gateway]:
    """Start a gateway without the right to ask, at which no user controls a job more than three times at once."""
    folder = tmp_path_factory.mktemp("tokens")
    with gateway.gateway(plane, folder, reviews=False, page=False, flags=("--controls=3",)) as running:
        yield running


@pytest.fixture
def namespace(plane: kube.ControlPlane) -> str:
    return plane.new_namespace("test")


RIGHTS = (
    gateway.on_jobs("get", "list", "create", "update", "patch", "delete"),
    {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
)
"""Rules of a user who works in a namespace."""


@pytest.fixture
def token(plane: kube.ControlPlane, namespace: str) -> str:
    return gateway.account(plane, namespace, "user", grants=RIGHTS)


@pytest.fixture
def config(plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path, token: str) -> pathlib.Path:
    """Return the kubeconfig of a user with all rights in one namespace, which is its context's."""
    return gateway.kubeconfig(plane, tmp_path, token, namespace=namespace)


@pytest.fixture
def run(config: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """One `megatronapp` on the cluster: exit code, output, errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main([*arguments, "--kubeconfig", str(config)])
        return code, *capsys.readouterr()

    return call
