"""Launchers as a backend starts them, with ranks that are a few lines of Python in place of a training run."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from megatronapp_common.attempt_order import AttemptOrder
from megatronapp_common.save_request import SaveRequest
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret, read_secret
from megatronapp_trainer.launch.config import address

DEADLINE_S = 240.0

RANK = """
import json, os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
actions, attempt = json.loads(os.environ["ACTIONS"]), os.environ["MEGATRONAPP_ATTEMPT"]
action = actions.get(f"{rank}@{attempt}", actions.get(rank, "wait"))
here = pathlib.Path(os.environ["MEGATRONAPP_RUN_DIR"])
def mark(text):
    draft = here / f"draft-{rank}"
    draft.write_text(text)
    draft.rename(here / f"state-{rank}")
def until_told():
    while not (here.parent / "go").exists():
        time.sleep(0.01)
if action == "abandon":
    # a grandchild whose parent is gone ends: whoever adopts it must reap it
    subprocess.run(["sh", "-c", "(until [ -e $0/go ]; do sleep 0.01; done; : > $0/worker-0/abandoned) &", here.parent])
    action = "polite"
def leave(*_):
    mark("checkpointed")
    sys.exit(75)
if action in ("polite", "saver"):
    signal.signal(signal.SIGTERM, leave)
saves = []
def save(*_):
    saves.append(rank)
    (here / f"draft-saves-{rank}").write_text(str(len(saves)))
    (here / f"draft-saves-{rank}").rename(here / f"saves-{rank}")
if action == "saver":
    signal.signal(signal.SIGURG, save)
if action == "victim":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(69))
def end_last(*_):
    # once the launcher of worker 1 knows that its ranks have lost a peer; by the signal, as without a handler
    while (here.parent / "worker-1" / "launcher.log").read_text().count("ended with exit code 69") < 2:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
if action == "last":
    signal.signal(signal.SIGTERM, end_last)
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if action == "orphan":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("orphan", child.pid)
ring = pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"], os.environ["MEGATRONAPP_SHM_PREFIX"] + f".rank{rank}.ring")
ring.write_bytes(b"x")
print("arguments", sys.argv[1:])
print("environment", json.dumps(dict(os.environ)), flush=True)
mark(str(os.getpid()))
(here / f"ran-{rank}-in-{attempt}").write_text(ring.name)
until_told()
if action.startswith("exit"):
    print("error: this is why", flush=True)
    sys.exit(int(action.removeprefix("exit")))
if action == "chatter":
    print("".join(f"line {number}\\n" for number in range(100_000)), end="", flush=True)
    mark("has said it all")
if action == "kill":
    print("last words", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if action == "watch":
    import ctypes
    from megatronapp_trainer.parallel.peer_loss import PeerLossListener
    held, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    with PeerLossListener(lambda: print("told of a loss", flush=True)):
        mark("watches")
        libc.pthread_mutex_lock(held)
        libc.pthread_mutex_lock(held)  # for ever, as in a collective: no handler of Python's runs
while action in ("wait", "polite", "victim", "last", "saver", "stubborn"):
    time.sleep(0.1)  # a signal that arrives just before a sleep is handled after it
"""


def wait_until(condition: Callable[[], object], limit_s: float = DEADLINE_S) -> None:
    """Wait until the condition holds; fail after a time that only a broken program needs."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.01)


@dataclasses.dataclass
class LauncherWorker:
    """A launcher and its folder."""

    process: subprocess.Popen[str]
    run_dir: pathlib.Path

    def pid(self, rank: int) -> int:
        """Process of a rank, once it runs."""
        path = self.run_dir / f"state-{rank}"
        wait_until(path.exists)
        return int(path.read_text())

    def end(self, limit_s: float = DEADLINE_S) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(limit_s)

    def record(self) -> dict[str, Any]:
        """The outcome that it left."""
        document: dict[str, Any] = json.loads((self.run_dir / "termination.json").read_text())
        return document

    def output(self) -> str:
        """Output of the launcher."""
        return (self.run_dir / "launcher.log").read_text()


class Gang:
    """Launchers of one gang, started as a backend would."""

    def __init__(self, tmp: pathlib.Path, proc_per_node: str = "2,2", program: str | None = None) -> None:
        self.tmp = tmp
        self.uid = f"gang-{secrets.token_hex(4)}"
        """Unique, because a process backend in another test kills all processes that have the uid of its job."""
        self.shm = tmp / "shm"
        self.shm.mkdir()
        (tmp / "secret").write_text(new_secret())
        (tmp / "rank.py").write_text(RANK)
        self.proc_per_node = proc_per_node
        self.program = program or str(tmp / "rank.py")
        self.launcher = ["-m", "megatronapp_trainer.launch"]
        self.launcher_flags: list[str] = []
        self.arguments = ["--num-layers", "4"]
        self._ports = contextlib.ExitStack()
        self.coordinator = f"127.0.0.2:{self.reserve('127.0.0.2')}"
        self.workers: list[LauncherWorker] = []

    def reserve(self, host: str) -> int:
        """Return a port for a launcher of the gang, held until `close`."""
        return self._ports.enter_context(address.reserved_port(host))

    def environment(self, index: int, **changes: str) -> dict[str, str]:
        """Return the environment that a backend gives to a launcher."""
        run_dir = self.tmp / f"worker-{index}"
        run_dir.mkdir(exist_ok=True)
        own = {
            "JOB": "demo",
            "JOB_UID": self.uid,
            "ATTEMPT": "0",
            "WORKER_INDEX": str(index),
            "NUM_WORKERS": str(len(self.proc_per_node.split(","))),
            "PROC_PER_NODE": self.proc_per_node,
            "COORDINATOR": self.coordinator,
            "SECRET_FILE": str(self.tmp / "secret"),
            "ADDRESS": f"127.0.0.{2 + index}",
            "NODE_NAME": f"node-{index}",
            "SHM_DIR": str(self.shm),
            "SHM_PREFIX": f"demo-w{index}",
            "RUN_DIR": str(run_dir),
            "TERMINATION_LOG": str(run_dir / "termination.json"),
            **changes,
        }
        return {**os.environ, **{f"MEGATRONAPP_{name}": value for name, value in own.items()}}

    def command(self, grace_s: float) -> list[str]:
        """Command line of a launcher."""
        flags = ["--grace-s", str(grace_s), *self.launcher_flags, "--program", self.program]
        return [sys.executable, *self.launcher, *flags, "--", *self.arguments]

    def start(
        self,
        actions: Mapping[Any, str],
        *,
        grace_s: float = 0.3,
        only: int | None = None,
        prefix: Sequence[str] = (),
        each: Sequence[dict[str, str]] = (),
        base: Mapping[str, str] | None = None,
        **changes: str,
    ) -> None:
        """Start all launchers, or only one; `each`: further changes by worker; `base`: variables of other names."""
        for index in range(len(self.proc_per_node.split(","))) if only is None else [only]:
            own = changes | (each[index] if index < len(each) else {})
            environment = {**self.environment(index, **own), **(base or {}), "ACTIONS": json.dumps(actions)}
            run_dir = self.tmp / f"worker-{index}"
            with (run_dir / "launcher.log").open("w") as log:
                process = subprocess.Popen(
                    [*prefix, *self.command(grace_s)],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    text=True,
                    process_group=0,
                )
            self.workers.append(LauncherWorker(process, run_dir))

    def order_file(self, index: int) -> pathlib.Path:
        """File that orders further attempts of a worker."""
        return self.tmp / f"order-{index}"

    def order(self, attempt: int, *, grace_s: float = 5.0, only: int | None = None, **more: Any) -> None:
        """Order another attempt in place, as the kubelet writes it, for all workers or only one; `more`: its fields."""
        for index in range(len(self.workers)) if only is None else [only]:
            draft = self.tmp / f"order-{index}.new"
            draft.write_text(AttemptOrder(attempt=attempt, grace_s=grace_s, **more).text)
            draft.rename(self.order_file(index))

    def request_checkpoint(self, index: int, request: SaveRequest) -> None:
        """Request a checkpoint from the ranks of a worker, as the kubelet writes it."""
        draft = self.tmp / f"save-{index}.new"
        draft.write_text(request.text)
        draft.rename(self.tmp / f"save-{index}")

    def status(self, where: str) -> dict[str, Any]:
        """Answer of the launcher of worker 0 at host:port."""
        token = derive_token(read_secret(self.tmp / "secret"), TokenRole.VIEWER)
        request = urllib.request.Request(
            f"http://{where}/api/v1/launcher", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            document: dict[str, Any] = json.load(answer)
        return document

    def ran(self, rank: int, attempt: int, *, worker: int) -> str:
        """Wait until a rank runs in an attempt; return the name of its ring."""
        path = self.tmp / f"worker-{worker}" / f"ran-{rank}-in-{attempt}"
        wait_until(lambda: path.exists() and path.read_text())
        return path.read_text()

    def go(self) -> None:
        """Let the ranks do what they are to do."""
        (self.tmp / "go").touch()

    def close(self) -> None:
        """Kill what is left."""
        for worker in self.workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
        self._ports.close()

    def running(self, ranks: dict[int, list[int]]) -> list[int]:
        """Wait for all ranks; their pids."""
        return [self.workers[index].pid(rank) for index, found in ranks.items() for rank in found]


def alive(pid: int) -> bool:
    """Return whether this process runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
