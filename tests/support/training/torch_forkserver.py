"""Fork server that starts ranks of torch from a process that has already imported torch and megatron-core.

Importing the two costs seconds of CPU and 0.7 GB per process; a fork costs neither. The server only imports: it never
computes, opens a process group or asks CUDA, because children forked after an OpenMP region hang.

    pytest --(Unix socket: Request)--> server --fork--> handler --fork--> rank 0 .. world-1
           <-------------------------- pickled results of the ranks ----

A second socket is for programs that are forked from the server (`forked_python`).

Every process dies with its parent, and a handler kills ranks that outlive their deadline. The processes of a run of
pytest-xdist share a server: the first that needs it starts it, and it ends with the process that distributes the tests.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import importlib.util
import inspect
import os
import pathlib
import pickle
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

START_TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
_LENGTH = struct.Struct("<Q")
_OUTPUT_CHARACTERS = 4000
_IMPORTED_LATE = (
    "httpx",
    "hypothesis.strategies",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatronapp_analyzer.agent.service",
    "megatronapp_analyzer.hub.http.app",
    "megatronapp_analyzer.hub.judge.links",
    "megatronapp_analyzer.hub.neighbours",
    "megatronapp_analyzer.hub.service",
    "megatronapp_trainer.checkpoint.manager",
    "megatronapp_trainer.data.iterators",
    "megatronapp_trainer.data.mock_data",
    "megatronapp_trainer.fbd.setup",
    "megatronapp_trainer.inference.build",
    "megatronapp_trainer.launch.config.address",
    "megatronapp_trainer.models.attention",
    "megatronapp_trainer.models.bert",
    "megatronapp_trainer.models.experts.spec",
    "megatronapp_trainer.models.gpt",
    "megatronapp_trainer.models.norm",
    "megatronapp_trainer.pipeline.dynamic",
    "megatronapp_trainer.pipeline.megatron_schedules",
    "megatronapp_trainer.pipeline.megatron_transport",
    "megatronapp_trainer.pipeline.reduction_order",
    "megatronapp_trainer.pipeline.split_backward",
    "megatronapp_trainer.pipeline.transport.network",
    "megatronapp_trainer.pretrain",
    "megatronapp_trainer.serve.app",
    "megatronapp_trainer.serve.rank_main",
    "megatronapp_trainer.training.loop",
    "megatronapp_trainer.training.build",
    "pytest",
    "torch._dynamo",
    "torch.onnx",
    "torch.utils.serialization.config",
)
"""Imports of ranks and files of tests at run time, which would cost each rank seconds. No module of the tracer is among
them: tests check that it is not imported where it is off."""


_DEVICES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""With the first, torch asks NVML whether there are devices, and CUDA stays unused until a rank uses it."""


class RanksFailedError(Exception):
    """Some rank raised, died or was late. The text holds each one's traceback and output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Request to run a function on every rank."""

    file: str
    function: str
    arguments: tuple[Any, ...]
    world: int
    timeout_s: float
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result or error of one rank."""

    ok: bool
    value: Any
    text: str = ""


class ForkServer:
    """The client: starts the server, at the first use or before it, and sends requests.

    `devices`: ranks use the NVIDIA devices of this machine, which the server itself must not touch: a process that
    was forked after CUDA had started cannot use it. `owner`: process with which a server ends that several clients
    with the same directory share; without it, the server is this client's.
    """

    def __init__(self, directory: pathlib.Path, *, devices: bool = False, owner: int | None = None) -> None:
        self._directory = directory
        self._path = directory / "torch.sock"
        self._programs = directory / "programs.sock"
        self._devices = devices
        self._owner = owner
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 600,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ``world`` ranks; their results by rank.

        The function is found again by file and name, so it must be at the top of a file. Ranks find RANK,
        WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Raises RanksFailedError.
        """
        self.start()
        source = inspect.getsourcefile(function)
        assert source is not None
        request = Request(
            file=source,
            function=function.__qualname__,
            arguments=arguments,
            world=world,
            timeout_s=timeout_s,
            environment=environment or {},
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            connection.settimeout(timeout_s + 30)
            _send(connection, request)
            outcomes: list[Outcome] = _receive(connection)
        failed = [f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(outcomes) if not outcome.ok]
        if failed:
            raise RanksFailedError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def python(self) -> list[str]:
        """Return the command to put before `-m MODULE ARGUMENT...` in place of the interpreter (`forked_python`)."""
        self.start()
        program = pathlib.Path(__file__).parents[1] / "forked_python.py"
        return [sys.executable, "-I", "-S", str(program), str(self._programs)]

    def stop(self) -> None:
        """End the server and all it started, unless others use it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def start(self) -> None:
        """Start the server, or wait until the client that starts it has done so."""
        if self._is_ready:
            return
        if self._owner is None:
            self._process = self._start()
        else:
            ready = self._directory / "ready"
            with (self._directory / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not ready.exists():
                    with self._start():  # ends at once: the server is a child of init
                        ready.touch()
        self._is_ready = True

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment |= _DEVICES if self._devices else {"CUDA_VISIBLE_DEVICES": ""}
        options = [*(["devices"] if self._devices else []), *([] if self._owner is None else [f"owner={self._owner}"])]
        process = subprocess.Popen(
            [sys.executable, __file__, str(self._path), str(self._programs), *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(START_TIMEOUT_S) or process.stdout.readline() != b"ready\n":
                raise RanksFailedError("the fork server did not start")
        return process


def _send(connection: socket.socket, value: object) -> None:
    data = pickle.dumps(_plain(value))
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _plain(value: object) -> object:
    """Requests and outcomes as dicts: the server knows these classes under another module name than pytest does."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return vars(value) if isinstance(value, Request | Outcome) else value


def _receive(connection: socket.socket) -> Any:
    with connection.makefile("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        value = pickle.loads(file.read(length))
    if isinstance(value, list):
        return [Outcome(**part) for part in value]
    return Request(**value)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(paths: tuple[str, str], *, devices: bool, owner: int | None) -> str:
    """Import, then fork a handler for each request; return the module to run in the process of a program alone."""
    gc.disable()  # an import makes many objects and no garbage
    from forked_python import fork_program

    from megatronapp_trainer.device import cpu
    from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

    if not devices:
        cpu.install()
    with silence_megatron_imports():
        for name in _IMPORTED_LATE:
            importlib.import_module(name)
    os.fsync = lambda fd: None  # no test cuts the power, and a disk takes ten milliseconds for each file
    if importlib.import_module("torch").cuda.is_initialized():
        raise RuntimeError("an import has started CUDA; ranks that are forked now could not use it")
    gc.collect()
    gc.freeze()
    gc.enable()
    _use_huge_pages()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as ranks, socket.socket(socket.AF_UNIX) as programs:
        for listener, path in zip((ranks, programs), paths, strict=True):
            listener.bind(path)
            listener.listen()
        print("ready", flush=True)
        connection, listener = _accept_in_child(ranks, programs, owner=owner)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if listener is programs:
        return fork_program(connection)
    _handle(connection)
    os._exit(0)


def _use_huge_pages() -> None:
    """Have the kernel put what is in memory into huge pages: a fork and its end, which take time for each page, then
    take 9 ms of processor time in place of 24. A kernel that refuses (before Linux 6.1) leaves the memory as it is.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *path = line.split(maxsplit=5)
        if access.startswith("rw") and path in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)


def _accept_in_child(*listeners: socket.socket, owner: int | None) -> tuple[socket.socket, socket.socket]:
    """Return each connection with its listener, in a forked process; never in this one, which ends with its owner."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        if owner is not None:
            end = opened.enter_context(os.fdopen(os.pidfd_open(owner), "rb"))
            selector.register(end, selectors.EVENT_READ, "end")
        while True:
            for key, _ in selector.select():
                if key.data == "end":
                    os._exit(0)
                listener = next(listener for listener in listeners if listener is key.fileobj)
                connection, _ = listener.accept()
                parent = os.getpid()
                if os.fork() == 0:
                    _die_with_parent(parent)
                    return connection, listener
                connection.close()


def _handle(connection: socket.socket) -> None:
    """Run one request and answer it. The port at which its ranks meet is held until they have ended."""
    from megatronapp_trainer.launch.config.address import reserved_port

    request: Request = _receive(connection)
    with tempfile.TemporaryDirectory() as directory, reserved_port("127.0.0.1") as port:
        pids, pipes = [], []
        for rank in range(request.world):
            environment = _rank_environment(request, rank, port)
            pid, pipe = _fork_rank(request, environment, pathlib.Path(directory) / f"rank{rank}.log")
            pids.append(pid)
            pipes.append(pipe)
        answers = _collect(pipes, time.monotonic() + request.timeout_s)
        outcomes = []
        for rank, pid in enumerate(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            output = (pathlib.Path(directory) / f"rank{rank}.log").read_text(errors="replace")
            outcomes.append(_outcome(answers[rank], status, output[-_OUTPUT_CHARACTERS:]))
    _send(connection, outcomes)


def _fork_rank(request: Request, environment: dict[str, str], log: pathlib.Path) -> tuple[int, int]:
    """Return the process id of the rank, and the pipe through which its pickled outcome is sent."""
    reading, writing = os.pipe()
    handler = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    _die_with_parent(handler)
    os.close(reading)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    outcome = _call(request)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _rank_environment(request: Request, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(request.world),
        "LOCAL_WORLD_SIZE": str(request.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        **request.environment,
    }


def _call(request: Request) -> bytes:
    """Call the function and return its pickled outcome, also of any error."""
    try:
        spec = importlib.util.spec_from_file_location("forked_rank", request.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["forked_rank"] = module
        spec.loader.exec_module(module)
        return pickle.dumps((True, getattr(module, request.function)(*request.arguments)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _collect(pipes: list[int], deadline: float) -> list[bytes | None]:
    """Return what was sent through each pipe until it was closed; None for those still open at the deadline.

    Once a rank has failed, the others get five seconds: they may wait for it without limit.
    """
    received: list[bytes] = [b""] * len(pipes)
    done: list[bytes | None] = [None] * len(pipes)
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 20)
                received[key.data] += data
                if not data:
                    selector.unregister(key.fd)
                    done[key.data] = received[key.data]
                    if not received[key.data] or not pickle.loads(received[key.data])[0]:
                        deadline = min(deadline, time.monotonic() + 5)
    return done


def _outcome(answer: bytes | None, status: int, output: str) -> Outcome:
    if not answer:
        why = "was late and killed" if answer is None else f"died with wait status {status}"
        return Outcome(ok=False, value=None, text=f"{why}; its output:\n{output}")
    ok, value = pickle.loads(answer)
    return Outcome(ok=True, value=value) if ok else Outcome(ok=False, value=None, text=f"{value}\n{output}")


def _main(ranks: str, programs: str, *options: str) -> str:
    owners = [int(option.removeprefix("owner=")) for option in options if option.startswith("owner=")]
    if not owners:
        _die_with_parent(os.getppid())
    elif os.fork():
        os._exit(0)
    return serve((ranks, programs), devices="devices" in options, owner=owners[0] if owners else None)


if __name__ == "__main__":
    runpy.run_module(_main(*sys.argv[1:]), run_name="__main__", alter_sys=True)
