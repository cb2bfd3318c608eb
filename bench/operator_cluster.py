"""The cluster of bench_operator.py: a real API server, nodes and pods of kwok, and the processes that are measured."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import kube
import psutil
from operator_client import Client
from ports import reserved_ports

NAMESPACE = "bench"
KEY = "ab" * 32
STAGES = pathlib.Path(__file__).resolve().parent / "kwok"
CRD = kube.ROOT / "crds" / "megatronjob.yaml"
POD_ADDRESSES = "127.64.0.1/12"
"""Loopback: who asks a pod for its progress is refused at once, and waits for nothing."""
NODES = 100
CAPACITY = {"cpu": "100k", "memory": "1Pi", "pods": "10k", "nvidia.com/gpu": "100k"}
"""Capacity of each node; the bench never fills it."""
MIB = 1 << 20
STOP_S = 20.0
READY_S = 120.0
POLL_S = 0.02


class Program:
    """A process that is measured, or that the measured ones need."""

    def __init__(self, folder: pathlib.Path, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            self._from = out.tell()
            command_line = ["setpriv", "--pdeathsig", "KILL", *command]
            environment = os.environ | {"HOME": str(folder)}
            self.process = subprocess.Popen(
                command_line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )
        self.usage = psutil.Process(self.process.pid)

    @property
    def text(self) -> str:
        """Log of this process."""
        return self.log.read_bytes()[self._from :].decode(errors="replace")

    @property
    def cpu_s(self) -> float:
        """CPU seconds since its start."""
        return cpu_s(self.usage)

    @property
    def rss_mib(self) -> float:
        """Current resident memory in MiB."""
        return float(self.usage.memory_info().rss) / MIB

    @property
    def peak_mib(self) -> float:
        """The most resident memory since its start."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
        assert found, text
        return int(found[1]) * 1024 / MIB

    async def wait_for_line(self, text: str) -> float:
        """Wait until it logs these words; returns when they were seen (monotonic). Raises RuntimeError."""
        deadline = time.monotonic() + READY_S
        while text not in self.text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not say {text!r}:\n{self.text[-3000:]}")
            await asyncio.sleep(POLL_S)
        return time.monotonic()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the process by a signal."""
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process since its start."""
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclasses.dataclass(slots=True, kw_only=True)
class Cluster:
    """A control plane with nodes, and the programs that were started with it."""

    plane: kube.ControlPlane
    client: Client
    folder: pathlib.Path
    programs: list[Program] = dataclasses.field(default_factory=list)

    def start(self, name: str, *command: str) -> Program:
        """Start a process, which ends with the cluster."""
        program = Program(self.folder, name, command)
        self.programs.append(program)
        return program

    def operator(self) -> Program:
        """Our operator, with its defaults."""
        key = self.folder / "key"
        key.write_text(KEY, encoding="ascii")
        flag_values = {
            "--kubeconfig": str(self.plane.kubeconfig()),
            "--operator-namespace": NAMESPACE,
            "--key-file": str(key),
            "--port": "0",
            "--trainer-image": "megatronapp/trainer:bench",
            "--analyzer-image": "megatronapp/analyzer:bench",
        }
        flags = [argument for pair in flag_values.items() for argument in pair]
        return self.start("operator", sys.executable, "-m", "megatronapp_operator.controller", *flags)

    def job_controller(self, qps: int, *more: str) -> Program:
        """Start Kubernetes' controller of Jobs, and `more` of its controllers; burst by rate is as in its defaults."""
        return self._component(
            "kube-controller-manager",
            f"--controllers={','.join(('job-controller', *more))}",
            "--use-service-account-credentials=false",
            f"--kube-api-qps={qps}",
            f"--kube-api-burst={qps * 3 // 2}",
        )

    def scheduler(self) -> Program:
        """Kubernetes' scheduler with its defaults."""
        return self._component("kube-scheduler")

    def _component(self, name: str, *flags: str) -> Program:
        binary = kube.programs("cluster") / name
        config = f"--kubeconfig={self.plane.kubeconfig()}"
        return self.start(name, str(binary), config, "--leader-elect=false", "--secure-port=0", *flags)

    def others(self, measured: Sequence[Program]) -> dict[str, float]:
        """CPU seconds so far of everything on this machine that the measurement needs, but for measured processes."""
        bench, ours = psutil.Process(), {program.process.pid for program in measured}
        found = {"bench": cpu_s(bench)}
        for child in bench.children():
            if child.pid not in ours:
                with contextlib.suppress(psutil.Error):
                    found[child.name()] = cpu_s(child)
        return found


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """Start a cluster and wait for its nodes; end it after the context."""
    with tempfile.TemporaryDirectory(prefix="bench-operator-") as name:
        folder = pathlib.Path(name)
        with kube.control_plane(folder) as plane:
            async with Client.connect(plane) as client:
                made = Cluster(plane=plane, client=client, folder=folder)
                with _ended(made):
                    await _prepare(made)
                    yield made


@contextlib.contextmanager
def _ended(made: Cluster) -> Iterator[None]:
    try:
        yield
    finally:
        for program in reversed(made.programs):
            if program.process.poll() is None:
                program.stop()


async def _prepare(made: Cluster) -> None:
    _kubectl(made.plane, "create", "namespace", NAMESPACE)
    made.plane.define(CRD)
    with reserved_ports(1) as (port,):
        await _start_nodes(made, port)


async def _start_nodes(made: Cluster, port: int) -> None:
    kwok = made.start(
        "kwok",
        str(kube.programs("kwok") / "kwok"),
        f"--kubeconfig={made.plane.kubeconfig()}",
        f"--config={STAGES / 'nodes.yaml'},{STAGES / 'pods.yaml'}",
        f"--cidr={POD_ADDRESSES}",
        "--manage-all-nodes=true",
        "--node-lease-duration-seconds=0",
        f"--server-address=127.0.0.1:{port}",
        "--v=WARN",
    )
    names = node_names()
    await asyncio.gather(*(_make_node(made.client, node) for node in names))
    deadline = time.monotonic() + READY_S
    while await made.client.ready_nodes() < len(names):
        if kwok.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"kwok does not make {len(names)} nodes ready:\n{kwok.text[-3000:]}")
        await asyncio.sleep(POLL_S)


def _kubectl(plane: kube.ControlPlane, *arguments: str) -> None:
    done = plane.kubectl(*arguments)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")


def node_names() -> list[str]:
    """Return the names of all nodes."""
    return [f"node-{number}" for number in range(NODES)]


async def _make_node(client: Client, name: str) -> None:
    """The API server marks a new node as not ready; on a real cluster a controller takes that back."""
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    status = {"allocatable": CAPACITY, "capacity": CAPACITY}
    metadata = {"name": name, "labels": labels}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
    await client.send("POST", "/api/v1/nodes", node)
    await client.send("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
