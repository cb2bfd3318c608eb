"""Scripts in processes forked from one that has imported their modules, which costs a new process a second.

    pytest --(Unix socket: script, environment, streams)--> server --fork--> keeper --fork--> script
           <-------------------------------------------------- process id, then exit code

Each script leads a session and has its own environment, standard streams and current folder, as a process of
`subprocess.Popen` has. Only /proc shows the command line and environment of the server. Every process dies with its
parent.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

START_TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1


class ForkedScript:
    """A running script, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the script has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ScriptServer:
    """Client of the server, which it starts."""

    def __init__(self, folder: pathlib.Path, modules: Sequence[str]) -> None:
        self._path = folder / "scripts.sock"
        command = [sys.executable, __file__, str(self._path), *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(START_TIMEOUT_S), "the server of scripts did not start"
        assert self._process.stdout.readline() == b"ready\n"

    def start(
        self,
        script: pathlib.Path,
        *arguments: str,
        environment: Mapping[str, str],
        folder: pathlib.Path,
        out: int,
        err: int,
    ) -> ForkedScript:
        """Start a script in this folder; `out` and `err` are descriptors of its standard output and error."""
        request = {"script": str(script), "arguments": arguments, "environment": dict(environment)}
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._path))
        socket.send_fds(connection, [b"\n"], [out, err])
        connection.sendall(json.dumps(request | {"folder": str(folder)}).encode() + b"\n")
        return ForkedScript(connection)

    def stop(self) -> None:
        """End the server and the scripts that run."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(path: str, modules: Sequence[str]) -> None:
    """Import the modules, then fork for each request. Return in the process of a script when that has ended."""
    gc.disable()  # an import makes many objects and no garbage
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            parent = os.getpid()
            if os.fork() == 0:
                die_with(parent)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                break
            connection.close()
    keep(connection)


def keep(connection: socket.socket) -> None:
    """Fork the script, send its process id and its exit code, and exit. Return in the process of the script."""
    _, (out, err), _, _ = socket.recv_fds(connection, 1, 2)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with(parent)
        connection.close()
        os.setsid()
        replace_streams(out, err)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(request["script"], run_name="__main__")
        return
    with contextlib.suppress(BrokenPipeError):  # the test has ended
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def replace_streams(out: int, err: int) -> None:
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with(os.getppid())
    serve(sys.argv[1], sys.argv[2:])
