"""The operator as a process, with kopf's watches, probes and lease, on a real API server."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import kube
import pytest
from operator_play import KEY, manifest

DEADLINE_S = 60.0


class Operator:
    """One process and its log."""

    def __init__(self, plane: kube.ControlPlane, folder: pathlib.Path, namespace: str, name: str) -> None:
        key = folder / "key"
        key.write_text(KEY, encoding="ascii")
        self.log = folder / f"{name}.log"
        words = {
            "--kubeconfig": plane.kubeconfig(),
            "--watch-namespaces": namespace,
            "--operator-namespace": namespace,
            "--key-file": key,
            "--port": 0,
            "--trainer-image": "megatronapp/trainer:test",
            "--analyzer-image": "megatronapp/analyzer:test",
        }
        flags = [str(word) for pair in words.items() for word in pair]
        with self.log.open("wb") as out:
            command = [
                "setpriv",
                "--pdeathsig",
                "KILL",
                sys.executable,
                "-m",
                "megatronapp_operator.controller",
                *flags,
            ]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"HOME": str(folder)})

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        found = re.search(r"probes at port (\d+)", self.text())
        assert found, self.text()
        return f"http://127.0.0.1:{found[1]}"

    def leads(self) -> bool:
        return "leading as" in self.text()

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics/", trust_env=False).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])


def wait(what: Callable[[], bool], operator: Operator) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert operator.process.poll() is None and time.monotonic() < deadline, operator.text()
        time.sleep(0.05)


@contextlib.contextmanager
def started(plane: kube.ControlPlane, folder: pathlib.Path, namespace: str, name: str = "one") -> Iterator[Operator]:
    operator = Operator(plane, folder, namespace, name)
    try:
        yield operator
    finally:
        operator.process.kill()
        operator.process.wait()


def pods(plane: kube.ControlPlane, namespace: str) -> list[str]:
    return plane.kubectl("get", "pods", "-n", namespace, "-o", "name").stdout.split()


def apply(plane: kube.ControlPlane, namespace: str, name: str = "job") -> None:
    done = plane.kubectl("create", "-f", "-", stdin=manifest(namespace, name))
    assert done.returncode == 0, done.stderr


def test_a_job_that_is_created_while_the_operator_runs_and_before_gets_its_pods(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    apply(plane, namespace, "early")
    with started(plane, tmp_path, namespace) as operator:
        wait(operator.leads, operator)
        apply(plane, namespace, "late")
        wait(lambda: len(pods(plane, namespace)) == 4, operator)
        assert httpx.get(f"{operator.url}/healthz", trust_env=False).is_success
        wait(lambda: httpx.get(f"{operator.url}/readyz", trust_env=False).is_success, operator)
        assert operator.metric("megatron_operator_is_leader") == 1
        phase = f'megatron_job_phase{{name="late",namespace="{namespace}",phase="Starting"}}'
        wait(lambda: f"{phase} 1.0" in httpx.get(f"{operator.url}/metrics/", trust_env=False).text, operator)
        operator.process.send_signal(signal.SIGTERM)
        assert operator.process.wait(DEADLINE_S) == 0, operator.text()
    assert "Traceback" not in operator.text()


def test_the_second_operator_takes_over_when_the_first_one_ends_in_order(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    with started(plane, tmp_path, namespace) as first:
        wait(first.leads, first)
        with started(plane, tmp_path, namespace, "two") as second:
            wait(lambda: "waiting for the lease" in second.text(), second)
            apply(plane, namespace)
            wait(lambda: len(pods(plane, namespace)) == 2, first)
            assert not second.leads()
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(DEADLINE_S) == 0
            wait(second.leads, second)
            apply(plane, namespace, "next")
            wait(lambda: len(pods(plane, namespace)) == 4, second)


@pytest.mark.parametrize(("flag", "text", "says"), [("key", "zz", "not 64 hex digits"), ("key", None, "No such file")])
def test_an_operator_that_cannot_start_says_why(tmp_path: pathlib.Path, flag: str, text: str | None, says: str) -> None:
    path = tmp_path / flag
    if text is not None:
        path.write_text(text, encoding="ascii")
    words = ["--trainer-image", "a", "--analyzer-image", "b", "--key-file", str(path)]
    command = [sys.executable, "-m", "megatronapp_operator.controller", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
