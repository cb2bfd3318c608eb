"""A forwarded port, with a program in place of kubectl that says as much as it does of thousands of connections."""

import argparse
import pathlib
import sys
import time
from typing import cast

import pytest

from megatronapp_operator.cli.cluster.connection import Cluster
from megatronapp_operator.cli.cluster.doors import Forward

TALKS = """#!{python}
import pathlib, sys, time
print("Forwarding from 127.0.0.1:4321 -> 8080", flush=True)
for _ in range(8000):  # 240 KiB, and a pipe holds 64
    print("Handling connection for 4321", flush=True)
    print("an error occurred forwarding", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[0]).with_name("said").touch()
time.sleep(600)
"""
HANGS_S = 60


class Reached:
    """All that a forward asks of a cluster."""

    arguments = argparse.Namespace(kubeconfig=None)
    context = None


def test_a_port_is_forwarded_on_after_thousands_of_connections(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(TALKS.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    service = {"metadata": {"namespace": "megatronapp", "name": "megatronapp"}, "spec": {}}
    forward = Forward(cast(Cluster, Reached()), service)
    forward.start()
    try:
        assert forward.port == 4321
        deadline = time.monotonic() + HANGS_S
        while not (tmp_path / "said").exists():
            assert time.monotonic() < deadline, "kubectl waits for a reader of what it says"
            time.sleep(0.02)
    finally:
        forward.stop()
