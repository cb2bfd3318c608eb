"""Python programs in processes forked from the fork server, which has imported torch and megatron-core.

    python -I -S forked_python.py SOCKET -m MODULE ARGUMENT...

does what `python -m MODULE ARGUMENT...` does and costs seconds less of processor time:

    this file, run --(Unix socket: module, environment, streams)--> server --fork--> keeper --fork--> program
                   <----------------------------------------------- process id, then exit code

The program has this process's arguments, environment, folder, output and PYTHONPATH, receives its SIGTERM and SIGINT,
and is killed when this process ends. Its environment and command line in /proc are those of the server.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGURG)


def main(path: str, module: str, arguments: list[str]) -> None:
    """Run the program to its end and end in the same way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"\n"], [1, 2])
        request = {"module": module, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            pid = int(lines.readline())
            forward_signals(pid, connection)
            code = int(lines.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def forward_signals(pid: int, connection: socket.socket) -> None:
    """Send this process's signals on, those that wait included, until the connection has something to read.

    Their numbers are read from a socket: a handler of Python is run between two instructions, so that a signal that
    arrives just before a blocking call would be sent on only after it.
    """
    numbers, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        ready, _, _ = select.select([numbers, connection], [], [])
        if numbers in ready:
            for arrived in numbers.recv(64):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, arrived)
        if connection in ready:
            return


def fork_program(connection: socket.socket) -> str:
    """Called in a process of the server: fork, and return the module to run, in the process of the program alone."""
    from forked_scripts import die_with, replace_streams  # from PYTHONPATH, which a program's own process ignores

    _, (out, err), _, _ = socket.recv_fds(connection, 1, 2)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(err)
        keep(connection, pid)
    die_with(keeper)
    connection.close()
    os.setsid()
    replace_streams(out, err)
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    module: str = request["module"]
    sys.argv = [module, *request["arguments"]]
    return module


def keep(connection: socket.socket, pid: int) -> None:
    """Send the process id and the exit code of the program; kill it if the process that it replaces ends."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.pidfd_open(pid), "rb") as program:
        connection.sendall(f"{pid}\n".encode())
        select.select([connection.fileno(), program.fileno()], [], [])
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is this process
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    assert sys.argv[2] == "-m"
    main(sys.argv[1], sys.argv[3], sys.argv[4:])
