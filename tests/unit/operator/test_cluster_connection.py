"""Search of the subcommands for their cluster."""

import argparse
import pathlib
import subprocess
import sys

import pytest

from megatronapp_operator.cli import cluster
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.errors import OperatorError


def named(kubeconfig: str | None) -> argparse.Namespace:
    return argparse.Namespace(kubeconfig=kubeconfig, context=None, namespace=None)


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_kubeconfig_that_is_not_there_is_called_so_and_nothing_else(
    by_flag: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    absent = str(tmp_path / "absent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", "" if by_flag else absent)
    refused = pytest.raises(OperatorError, match=f"^no cluster: {absent} does not exist; name one by --kubeconfig")
    with refused, opened(named(absent if by_flag else None)):
        pytest.fail("there is a cluster")
    assert caplog.text == ""


def test_commands_import_neither_the_client_of_the_operator_nor_before_its_use_the_official_one() -> None:
    folder = pathlib.Path(cluster.__file__).parent
    names = ", ".join(f"{cluster.__name__}.{path.stem}" for path in sorted(folder.glob("[a-z]*.py")))
    program = f"import sys, {names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert {"aiohttp", "kubernetes_asyncio", "kubernetes", "kopf"}.isdisjoint(done.stdout.split())
