"""A small real job for kill tests: started by the CLI, observed from outside (/proc, logs, hub, `get -o json`)."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import yaml
from shared_tls import SHARED_TLS

from megatronapp_common.names import Env
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

MEGATRONAPP = [sys.executable, "-m", "megatronapp_common.cli"]
SHM = pathlib.Path("/dev/shm")
PROC = pathlib.Path("/proc")
ROLES = {
    "megatronapp_trainer.pretrain": "rank",
    "megatronapp_trainer.launch": "launcher",
    "megatronapp_analyzer.agent": "agent",
    "megatronapp_analyzer.hub": "hub",
}
GUARDIAN = "megatronapp_operator.backends.process.guardian"
WORKERS = 2
RANKS = 4
POLL_S = 0.1
RESUMED = re.compile(r"resumes after step (\d+) of ")
LOSS = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) ")


class Unmet(AssertionError):
    """Something that must be true is not."""


def require(condition: object, what: str) -> None:
    """Raise Unmet with these words unless the condition holds."""
    if not condition:
        raise Unmet(what)


def until(condition: Callable[[], Any], what: str, limit_s: float) -> None:
    """Wait for the condition. Raises Unmet if it does not hold in time."""
    end = time.monotonic() + limit_s
    while not condition():
        require(time.monotonic() < end, f"not within {limit_s:.0f} s: {what}")
        time.sleep(POLL_S)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a job; rank, worker and attempt are None where it belongs to none."""

    pid: int
    role: str
    attempt: int | None = None
    worker: int | None = None
    rank: int | None = None

    def send(self, number: signal.Signals) -> None:
        """Signal it; one that has ended meanwhile raises ProcessLookupError."""
        os.kill(self.pid, number)


def manifest(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """PP2 x DP2 of a tiny model on random tokens, with checkpoints, that does not end by itself."""
    model = {"type": "gpt", "numLayers": 2, "hiddenSize": 32, "numAttentionHeads": 4, "seqLength": 16, "vocabSize": 64}
    training = {"microBatchSize": 1, "globalBatchSize": 16, "trainIters": 1_000_000, "lr": 1e-3, "logInterval": 1}
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": WORKERS,
            "procPerNode": RANKS // WORKERS,
            "parallelism": {"pipeline": 2, "data": 2},
            "model": model,
            "training": {**training, "lrDecayStyle": "constant", "evalIters": 0},
            "data": {"mock": True},
            "checkpoint": {"save": str(folder / name / "checkpoints"), "saveInterval": 100},
            "args": ["--keep-last", "2"],
            "trace": {"enabled": True},
            "analyzer": {"enabled": True},
            "runPolicy": {
                "maxRestarts": 1000,
                "backoff": {"initialSeconds": 0},
                "terminationGracePeriodSeconds": 20,
            },
        },
    }


class Cli:
    """Command line with a separate state folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self._environment = os.environ | {"XDG_STATE_HOME": str(self.state)}
        self._environment.pop("MEGATRONAPP_SHM_DIR", None)

    def __call__(self, *arguments: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a subcommand of the CLI."""
        return subprocess.run(
            [*MEGATRONAPP, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def output(self, *arguments: str, limit_s: float = 300) -> str:
        """Output of a subcommand that must succeed."""
        done = self(*arguments, limit_s=limit_s)
        require(
            done.returncode == 0, f"megatronapp {' '.join(arguments)}: code {done.returncode}: {done.stderr.strip()}"
        )
        return done.stdout


class ChaosJob:
    """A detached job and what can be seen of it."""

    def __init__(self, cli: Cli, name: str) -> None:
        self.cli = cli
        self.name = name
        self.root = cli.state / "megatronapp" / "jobs" / name
        path = cli.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(manifest(cli.folder, name), sort_keys=False))
        cli.output("run", str(path), "--detach")
        backend = json.loads((self.root / "backend.json").read_text())
        self.uid: str = backend["uid"]
        self.backend = Process(pid=backend["pid"], role="backend")
        self.restarts = 0
        """Restarts of the gang that we are to blame for."""
        self.deleted = False

    def processes(self) -> list[Process]:
        """All of it that lives: what carries the job's uid in its environment, its guardian, and its backend."""
        found = [self.backend] if alive(self.backend.pid) else []
        for pid, command, environment in _all_processes():
            if environment.get(Env.JOB_UID) == self.uid:
                found.append(_process(pid, command, environment))
            elif GUARDIAN in command and self.uid in command:
                found.append(Process(pid=pid, role="guardian"))
        return found

    def of(self, role: str) -> list[Process]:
        """Return its living processes of this role, in a stable order."""
        found = [process for process in self.processes() if process.role == role]
        return sorted(found, key=lambda process: (process.worker or 0, process.rank or 0, process.pid))

    def shared_memory(self) -> list[str]:
        """Return its files in shared memory."""
        return sorted(path.name for path in SHM.iterdir() if self.uid in path.name)

    def losses(self) -> dict[int, dict[int, str]]:
        """Loss by attempt and iteration, as the log lines say it."""
        found: dict[int, dict[int, str]] = {}
        for path in self.root.glob("attempt-*/worker-*/rank-*.log"):
            lines = dict((int(step), loss) for step, loss in LOSS.findall(path.read_text(errors="replace")))
            if lines:
                found.setdefault(int(path.parts[-3].removeprefix("attempt-")), {}).update(lines)
        return found

    def iteration(self, attempt: int | None = None) -> int:
        """The newest iteration in the logs of an attempt (default: the one that must run now); 0 before the first."""
        number = self.restarts if attempt is None else attempt
        logs = self.root.glob(f"attempt-{number}/worker-*/rank-*.log")
        resumed = [int(step) for path in logs for step in RESUMED.findall(path.read_text(errors="replace"))]
        return max([*resumed, *self.losses().get(number, {})], default=0)

    def shown(self) -> dict[str, Any]:
        """The status that `megatronapp get -o json` shows."""
        status: dict[str, Any] = json.loads(self.cli.output("get", self.name, "-o", "json"))["status"]
        return status

    def query_hub(self, path: str) -> Any:
        """An answer of the hub, or None while it does not answer."""
        url = json.loads((self.root / "hub.json").read_text())["url"]
        token = derive_token(read_secret(self.root / "secret"), TokenRole.VIEWER)
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(
                f"{url}{path}",
                headers={"Authorization": f"Bearer {token}"},
                timeout=5,
                trust_env=False,
                verify=SHARED_TLS,
            )
            if answer.is_success:
                return answer.json()
        return None

    def hung(self) -> list[int] | None:
        """Ranks that the hub names as hung."""
        summary = self.query_hub("/api/v1/summary")
        return None if summary is None else sorted(summary["hungRanks"])

    def wipe(self) -> None:
        """Kill all remaining processes; for the end of a case that failed."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return whether this process runs (a zombie does not)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _all_processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Pid, command line and environment of every process that we may read."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(entry.name), command, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _process(pid: int, command: list[str], environment: dict[str, str]) -> Process:
    role = next((ROLES[argument] for argument in command if argument in ROLES), "other")

    def number(name: str) -> int | None:
        return int(environment[name]) if environment.get(name, "").isdigit() else None

    return Process(
        pid=pid,
        role=role,
        attempt=number(Env.ATTEMPT),
        worker=number(Env.WORKER_INDEX),
        rank=number("RANK") if role == "rank" else None,
    )
