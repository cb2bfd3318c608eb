"""Bench to run jobs on: real backend, real processes, substitutes for launcher, agent and hub."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forked_scripts import ForkedScript, ScriptServer

from megatronapp_operator.backends.process import job_processes

DEADLINE_S = 240.0
WORKERS = 2

MANIFEST = """
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: NAME}
spec:
  nodes: 2
  procPerNode: 1
  parallelism: {pipeline: 2}
  model: {type: gpt, numLayers: 2, hiddenSize: 8, numAttentionHeads: 1, seqLength: 8, vocabSize: 32}
  training: {microBatchSize: 1, globalBatchSize: 1, trainIters: 5, lr: 0.001}
  data: {mock: true}
  trace: {enabled: ANALYZER}
  analyzer: {enabled: ANALYZER, port: PORT, retainSeconds: RETAIN}
  runPolicy: {maxRestarts: 2, backoff: {initialSeconds: 0}, terminationGracePeriodSeconds: GRACE}
  env: [{name: CONTROL, value: "FOLDER"}]
"""

LAUNCHER = """
    import json, os, pathlib, signal, subprocess, sys, time
    from megatronapp_common.shared_documents import DocumentWriter
    control, run = pathlib.Path(os.environ["CONTROL"]), pathlib.Path(os.environ["MEGATRONAPP_RUN_DIR"])
    attempt, worker = os.environ["MEGATRONAPP_ATTEMPT"], os.environ["MEGATRONAPP_WORKER_INDEX"]
    files = pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"]) / os.environ["MEGATRONAPP_SHM_PREFIX"]

    def end(code, reason):
        record = {"code": code, "reason": reason, "message": "words", "rank": int(worker), "signal": None}
        (run / "termination.json").write_text(json.dumps(record))
        os._exit(code)

    if (control / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif (control / "unsaved").exists():
        signal.signal(signal.SIGTERM, lambda *_: end(69 if worker == "0" else 67, "RankFailed"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: end(75, "Preempted"))
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)  # one that leaves the group
    pathlib.Path(f"{files}.rank{worker}.ring").write_bytes(bytes(64))
    page = DocumentWriter(pathlib.Path(f"{files}.progress"))
    page.write({"attempt": int(attempt), "iteration": 3, "totalIterations": 5, "loss": 1.5, "state": "training"})
    print("launcher says hello", flush=True)
    (run / f"rank-{worker}.log").write_text(f"line of rank {worker}, attempt {attempt}\\n")
    table = {"attempt": int(attempt), "digest": "d", "masterAddr": "127.0.0.2", "masterPort": 1, "workers": []}
    (run / "new").write_text(json.dumps(table))
    (run / "new").rename(run / "rank-table.json")
    while True:
        for name in ("end", f"end-{worker}", f"end-{worker}-{attempt}"):
            if (control / name).exists():
                code = int((control / name).read_text())
                end(code, "Told")
        time.sleep(0.02)
"""

SLEEPER = "import time; time.sleep(600)"

HUB = """
    import http.server, json, sys
    port = int(sys.argv[sys.argv.index("--port") + 1])

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, document):
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            actions = [{"id": 7, "at": "2026-01-01T00:00:00.000Z", "who": "jane", "what": "cancelled run ab"}]
            answer = {"attempt": 0, "progress": None, "slowRanks": [], "hungRanks": [], "ranks": 2}
            self.answer(200, answer | {"actions": actions})

        def do_POST(self):
            fault = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            if not self.headers["Authorization"].startswith("Bearer "):
                self.answer(401, {"code": "no", "message": "no token", "hint": "give one"})
            elif self.path == "/api/v1/codes":
                self.answer(201, {"code": "x" * 32})
            elif fault["rank"] > 1:
                self.answer(409, {"code": "rank-gone", "message": "that rank is gone", "hint": "take another"})
            else:
                self.answer(201, fault | {"id": "f1"})

        def log_message(self, *words):
            pass

    class Server(http.server.ThreadingHTTPServer):
        allow_reuse_port = True  # as the backend holds the port

    Server(("127.0.0.1", port), Handler).serve_forever()
"""

DRIVER = """
    import sys
    from megatronapp_operator.backends.process.settings import ProcessCommands
    from megatronapp_operator.backends.process import backend
    from megatronapp_operator.cli import run, ui
    backend.TICK_S = 0.1
    backend.FINAL_STATUS_RETRY_S = 3600.0  # a test ends that wait
    commands = ProcessCommands(
        launcher=(sys.executable, {launcher!r}),
        agent=(sys.executable, "-S", "-c", {sleeper!r}),
        hub=(sys.executable, {hub!r}),
    )
    run.build_commands = lambda job: commands
    ui.hub_command = lambda: commands.hub
    from megatronapp_common.cli import main
    sys.exit(main())
"""


class Terminal:
    """Our side of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""
        os.set_blocking(fd, False)

    def read(self) -> str:
        """Return all output so far."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._fd, 65536).decode()
        return self._text

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


@dataclasses.dataclass
class ProcessBackendHarness:
    """Everything of one test lies below `folder`."""

    folder: pathlib.Path
    environment: dict[str, str]
    scripts: ScriptServer
    backends: list[ForkedScript] = dataclasses.field(default_factory=list)
    terminals: list["Terminal"] = dataclasses.field(default_factory=list)

    @property
    def control(self) -> pathlib.Path:
        return self.folder / "control"

    def job(self, name: str = "job") -> pathlib.Path:
        return self.folder / "state" / "megatronapp" / "jobs" / name

    def manifest(
        self, name: str = "job", *, analyzer: bool = False, grace_s: int = 60, retain_s: int = 0, port: int = 0
    ) -> str:
        path = self.folder / f"{name}.yaml"
        variables = {
            "NAME": name,
            "ANALYZER": str(analyzer).lower(),
            "GRACE": str(grace_s),
            "FOLDER": str(self.control),
        }
        variables |= {"RETAIN": str(retain_s), "PORT": str(port)}
        text = MANIFEST
        for variable, value in variables.items():
            text = text.replace(variable, value)
        path.write_text(text)
        return str(path)

    @property
    def driver(self) -> pathlib.Path:
        return self.folder / "driver.py"

    def start(self, *arguments: str, out: int, err: int) -> ForkedScript:
        """Start `megatronapp` in a separate session."""
        environment = self.environment
        return self.scripts.start(
            self.driver, *arguments, environment=environment, folder=self.folder, out=out, err=err
        )

    def run(self, *arguments: str) -> ForkedScript:
        """Start `megatronapp run` in the foreground, as in a terminal."""
        with (self.folder / "backend.out").open("ab") as out:
            backend = self.start("run", *arguments, out=out.fileno(), err=out.fileno())
        self.backends.append(backend)
        return backend

    def run_on_terminal(self, *arguments: str) -> tuple["Terminal", ForkedScript]:
        """The same with a pseudo-terminal as standard output."""
        ours, theirs = pty.openpty()
        backend = self.start("run", *arguments, out=theirs, err=theirs)
        os.close(theirs)
        self.backends.append(backend)
        self.terminals.append(Terminal(ours))
        return self.terminals[-1], backend

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            command = self.start(*arguments, out=out.fileno(), err=err.fileno())
            try:
                code = command.wait(DEADLINE_S)
            finally:
                command.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def command(self, *arguments: str) -> list[str]:
        """Return the command for a new interpreter, which takes a second to start."""
        return [sys.executable, str(self.driver), *arguments]

    def status(self, name: str = "job") -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.job(name) / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {"phase": "absent", "attempt": -1}
        return document

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                output = (self.folder / "backend.out").read_text() if (self.folder / "backend.out").exists() else ""
                raise AssertionError(f"not within {DEADLINE_S} s: {what}; status {self.status()}; output {output}")
            time.sleep(0.02)

    def until_phase(self, phase: str, *, attempt: int = 0, name: str = "job") -> None:
        """Wait for a phase; for Running also until each launcher has written all that it writes at its start."""

        def reached() -> bool:
            status = self.status(name)
            return (status["phase"], status["attempt"]) == (phase, attempt)

        self.until(reached, f"phase {phase} of attempt {attempt}")
        if phase == "Running":
            runs = [self.job(name) / f"attempt-{attempt}" / f"worker-{worker}" for worker in range(WORKERS)]
            self.until(
                lambda: all((run / "rank-table.json").exists() for run in runs), f"launchers of attempt {attempt}"
            )

    def end(self, code: int = 0, which: str = "") -> None:
        """Let the launchers end with this code: all of them, '-WORKER' or '-WORKER-ATTEMPT'."""
        draft = self.control / "draft"
        draft.write_text(str(code))
        draft.rename(self.control / f"end{which}")

    def uid(self, name: str = "job") -> str:
        uid: str = json.loads((self.job(name) / "backend.json").read_text())["uid"]
        return uid

    def processes(self, uid: str, worker: int | None = None, argument: str = "") -> list[int]:
        found = job_processes.find(job_processes.ProcessSelector(uid=uid, worker=worker))
        return [pid for pid in found if argument in command_line(pid)]

    def shared_memory(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "shm").iterdir())

    def until_processes(self, uid: str, count: int, argument: str = "") -> None:
        """Wait for this number of processes of a job with a word in their command; a new one has that of its parent."""
        self.until(lambda: len(self.processes(uid, argument=argument)) == count, f"{count} processes {argument}")

    def guardians(self, uid: str) -> list[int]:
        pids = (int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in pids if f"process.guardian\0{uid}\0" in command_line(pid)]

    def until_nothing_of(self, uid: str) -> None:
        self.until(lambda: not self.processes(uid) and not self.guardians(uid), "no process of that job is left")

    def until_nothing_is_left(self, uid: str) -> None:
        self.until(lambda: not self.processes(uid), "no process of the job is left")
        self.until(lambda: not self.shared_memory(), "no shared memory is left")
        self.until(lambda: not self.guardians(uid), "the guardian has ended")


def command_line(pid: int) -> str:
    try:
        return (pathlib.Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def end_detached(pid: int, folder: pathlib.Path) -> None:
    """Kill a backend that runs in this folder or was started with its driver, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError), os.fdopen(os.pidfd_open(pid), "rb") as process:
        if pathlib.Path(f"/proc/{pid}/cwd").readlink() == folder or str(folder) in command_line(pid):
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
            assert select.select([process], [], [], DEADLINE_S)[0], f"the backend {pid} goes on after SIGKILL"


@pytest.fixture(scope="package")
def scripts() -> Iterator[ScriptServer]:
    with tempfile.TemporaryDirectory() as folder:  # the name of a Unix socket has at most 107 bytes
        server = ScriptServer(pathlib.Path(folder), ["loaded_commands"])
        yield server
        server.stop()


@pytest.fixture
def process_backend(tmp_path: pathlib.Path, scripts: ScriptServer) -> Iterator[ProcessBackendHarness]:
    for name in ("control", "shm", "state"):
        (tmp_path / name).mkdir()
    substitutes = {"launcher.py": LAUNCHER, "hub.py": HUB}
    for name, text in substitutes.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    paths = {name.removesuffix(".py"): str(tmp_path / name) for name in substitutes}
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER).format(**paths, sleeper=SLEEPER))
    environment = os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MEGATRONAPP_SHM_DIR": str(tmp_path / "shm"),
    }
    made = ProcessBackendHarness(tmp_path, environment, scripts)
    yield made
    for terminal in made.terminals:
        terminal.close()
    for backend in made.backends:
        backend.kill()
        backend.wait(DEADLINE_S)
    for left in made.folder.glob("state/megatronapp/jobs/*/backend.json"):
        backend_record = json.loads(left.read_text())
        end_detached(backend_record["pid"], made.folder)
        assert job_processes.sweep(job_processes.ProcessSelector(uid=backend_record["uid"]))
        made.until_nothing_of(backend_record["uid"])
