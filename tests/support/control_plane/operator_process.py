"""Operator as a separate process, next to a real API server."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import kube
from operator_simulation import KEY
from shared_tls import SHARED_TLS

from megatronapp_operator.controller.main import LOST

DEADLINE_S = 240.0


class OperatorProcess:
    """One process and its log."""

    def __init__(
        self,
        plane: kube.ControlPlane,
        folder: pathlib.Path,
        namespace: str,
        name: str,
        lease: str = "operator",
        *,
        flags: Sequence[str] = (),
        sources: Sequence[pathlib.Path] = (),
    ) -> None:
        """`sources` are folders with packages that are taken in place of ours."""
        key = folder / "key"
        key.write_text(KEY, encoding="ascii")
        self.log = folder / f"{name}.log"
        flag_values = {
            "--kubeconfig": plane.kubeconfig(),
            "--watch-namespaces": namespace,
            "--operator-namespace": namespace,
            "--lease-name": lease,
            "--key-file": key,
            "--port": 0,
            "--trainer-image": "megatronapp/trainer:test",
            "--analyzer-image": "megatronapp/analyzer:test",
        }
        command_line = [*(str(argument) for pair in flag_values.items() for argument in pair), *flags]
        environment = {"HOME": str(folder)} | ({"PYTHONPATH": ":".join(map(str, sources))} if sources else {})
        self._environment = os.environ | environment
        program = (sys.executable, "-m", "megatronapp_operator.controller")
        self._command = ["setpriv", "--pdeathsig", "KILL", *program, *command_line]
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("wb") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=out, env=self._environment)

    def text(self) -> str:
        """Return the text of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        """Address of its probes and metrics."""
        found = re.search(r"probes at port (\d+)", self.text())
        assert found, self.text()
        return f"http://127.0.0.1:{found[1]}"

    def leads(self) -> bool:
        """Return whether it has taken the lease."""
        return "leading as" in self.text()

    def metrics(self) -> str:
        """The page of its metrics."""
        return (
            httpx.get(f"{self.url}/metrics", trust_env=False, verify=SHARED_TLS, timeout=DEADLINE_S)
            .raise_for_status()
            .text
        )

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until the condition holds. An operator that has lost its lease starts again, as its pod would."""
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            if self.process.poll() == LOST:  # on a busy machine it renews too late
                self.process = self._start()
                self.wait(lambda: "probes at port" in self.text())
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it as the kernel does."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(
    plane: kube.ControlPlane,
    folder: pathlib.Path,
    namespace: str,
    name: str = "one",
    lease: str = "operator",
    **more: Any,
) -> Iterator[OperatorProcess]:
    """Start an operator and stop it at the end."""
    operator = OperatorProcess(plane, folder, namespace, name, lease, **more)
    try:
        yield operator
    finally:
        operator.kill()
