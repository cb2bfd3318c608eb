"""The port that `megatronapp` has forwarded: its page has a name only where all addresses of the name are kubectl's.

kubectl needs a kubelet, which is not here: a program of its name takes ports and reports them as it does.
"""

import argparse
import importlib.metadata
import pathlib
import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from megatronapp_common import cli
from megatronapp_operator.cli.cluster import gateway_client
from megatronapp_operator.cli.cluster.connection import Cluster
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint, PortForward
from megatronapp_operator.controller import settings
from megatronapp_operator.errors import OperatorError

KUBECTL = """#!{python}
import pathlib, signal, socket, sys
addresses = next(word for word in sys.argv if word.startswith("--address=")).partition("=")[2].split(",")
local, _, remote = sys.argv[-1].partition(":")
port, seize = int(local or 0), pathlib.Path(__file__).with_name("seize")
held = []
try:
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if address == "::1" and seize.exists():
            seize.write_text(seize.read_text()[1:]) or seize.unlink()
            raise OSError("address already in use")
        held.append(socket.create_server((address, port), family=family))
        port = held[-1].getsockname()[1]
        print(f"Forwarding from {{'[::1]' if ':' in address else address}}:{{port}} -> {{remote}}", flush=True)
except OSError as error:
    print(f"Unable to listen on port {{port}}: {{error}}", file=sys.stderr)
    sys.exit(1)
signal.pause()
"""
TALKS = """#!{python}
import pathlib, sys, time
print("Forwarding from 127.0.0.1:4321 -> 8080", flush=True)
print("Forwarding from [::1]:4321 -> 8080", flush=True)
for _ in range(8000):  # 240 KiB, and a pipe holds 64
    print("Handling connection for 4321", flush=True)
    print("an error occurred forwarding", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[0]).with_name("said").touch()
time.sleep(600)
"""
HANGS_S = 60
SERVICE = {"metadata": {"namespace": "home", "name": "megatronapp"}, "spec": {"ports": [{"port": 8080}]}}


@pytest.fixture
def kubectl(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


@pytest.fixture
def forward(kubectl: pathlib.Path) -> Iterator[PortForward]:
    class Somewhere:
        arguments, context = argparse.Namespace(kubeconfig=None), None

    made = PortForward(cast(Cluster, Somewhere()), cast(dict[str, Any], SERVICE))
    yield made
    made.stop()


def gateway_of(forward: PortForward) -> GatewayEndpoint:
    return GatewayEndpoint(f"http://127.0.0.1:{forward.port}", forward)


def test_a_port_that_is_ours_at_all_addresses_is_opened_under_a_fresh_name(forward: PortForward) -> None:
    forward.start()
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, forward.port)).close()
    pages = {gateway_of(forward).page for _ in range(4)}
    assert len(pages) == 4
    assert all(re.fullmatch(rf"http://gateway-[0-9a-f]{{16}}\.localhost:{forward.port}", page) for page in pages)


def test_another_port_is_chosen_if_the_other_address_is_in_use(forward: PortForward, kubectl: pathlib.Path) -> None:
    kubectl.with_name("seize").write_text("x" * (gateway_client.TRIES - 1))
    forward.start()
    assert forward.named
    socket.create_connection(("::1", forward.port)).close()


def test_a_port_that_is_not_ours_at_all_addresses_has_no_name(forward: PortForward, kubectl: pathlib.Path) -> None:
    kubectl.with_name("seize").write_text("x" * 99)
    forward.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("::1", forward.port))
    assert not forward.named
    assert gateway_of(forward).page == f"http://127.0.0.1:{forward.port}"


def test_a_forward_that_begins_again_is_never_at_fewer_addresses(forward: PortForward) -> None:
    forward.start()
    port = forward.port
    forward.stop()
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        assert "Unable to listen" in (forward._forward() or "")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    assert forward._forward() is None
    assert forward.port == port


def test_a_port_is_forwarded_on_after_thousands_of_connections(forward: PortForward, kubectl: pathlib.Path) -> None:
    kubectl.write_text(TALKS.format(python=sys.executable), encoding="utf-8")
    forward.start()
    assert (forward.port, forward.named) == (4321, True)
    deadline = time.monotonic() + HANGS_S
    while not kubectl.with_name("said").exists():
        assert time.monotonic() < deadline, "kubectl waits for a reader of what it says"
        time.sleep(0.02)


@pytest.mark.parametrize("line", ["Forwarding from 127.0.0.1:4321 -> 8080", "Forwarding from [::1]:99 -> 8080"])
def test_a_kubectl_that_forwards_from_elsewhere_is_not_believed(
    forward: PortForward, kubectl: pathlib.Path, line: str
) -> None:
    lines = ["Forwarding from 127.0.0.1:4321 -> 8080", line]
    kubectl.write_text(f"#!{sys.executable}\nfor line in {lines}:\n    print(line)\n", encoding="utf-8")
    with pytest.raises(OperatorError, match="did not report the local port"):
        forward.start()
    assert not forward.named


def test_errors_of_kubectl_are_reported_once(forward: PortForward, kubectl: pathlib.Path) -> None:
    calls = kubectl.with_name("asked")
    kubectl.write_text(f"#!/bin/sh\necho x >> {calls}\necho error: no such pod >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(OperatorError, match="cannot be forwarded: error: no such pod"):
        forward.start()
    assert calls.read_text() == "x\n"


def test_a_port_forwarded_by_another_process_stays_an_address() -> None:
    assert GatewayEndpoint("http://127.0.0.1:8080").page == "http://127.0.0.1:8080"


@pytest.mark.parametrize("argv", [("ui", "--door"), ("ui", "demo", "--door=a/b"), ("inject", "--door", "a/b")])
def test_the_former_flag_is_answered(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser(importlib.metadata.entry_points(group="megatronapp.commands"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(argv)
    assert end.value.code == 2
    assert "error: --door is named --gateway now\n" in capsys.readouterr().err


def test_the_operators_former_flag_is_answered_with_the_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.build_parser().parse_args(["--door-labels", "a=b"])
    assert "--door-labels is named --gateway-labels now" in capsys.readouterr().err
    assert "door" not in settings.build_parser().format_help()
