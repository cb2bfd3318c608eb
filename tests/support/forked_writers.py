"""Writer processes of checkpoints, forked from their rank that has imported torch; a new process takes seconds.

They are forked before the rank computes or has threads, and wait for what `subprocess.Popen` would give them. Each is a
process that has the rank as its parent and runs the real program.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import types
from collections.abc import Iterator, Sequence
from typing import NoReturn
from unittest import mock

from forked_scripts import die_with

_MODULE = "megatronapp_trainer.checkpoint.saving.writer_main"


class ForkedWriter:
    """A process that waits to be a writer, with the methods of `subprocess.Popen` that its rank uses."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        rank = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            serve(its, rank)
        its.close()
        self.returncode: int | None = None

    def start(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        """Let it run the command of a writer, which names these descriptors."""
        _, *module, connection, requests, memory, parent = command
        assert module == ["-m", _MODULE]
        assert [int(connection), int(requests), int(memory)] == list(descriptors)
        socket.send_fds(self._socket, [json.dumps(parent).encode()], descriptors)
        self._socket.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with os.fdopen(os.pidfd_open(self.pid), "rb") as process:
                if not select.select([process], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(connection: socket.socket, rank: int) -> NoReturn:
    """Be the writer of a rank, in its own process."""
    from megatronapp_trainer.checkpoint.saving import writer_main

    code = 1
    try:
        die_with(rank)
        data, descriptors, _, _ = socket.recv_fds(connection, 100, 3)
        connection.close()
        if data:
            code = writer_main.main([*map(str, descriptors), json.loads(data)])
    finally:
        os._exit(code)


@contextlib.contextmanager
def forked_writer() -> Iterator[None]:
    """Let the next writer of this rank be forked. To be entered before the rank has process groups."""
    from megatronapp_trainer.checkpoint.saving import writer_process

    writers = [ForkedWriter()]

    def start(command: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> ForkedWriter:
        writer = writers.pop()
        writer.start(command, pass_fds)
        return writer

    replaced = types.SimpleNamespace(**vars(subprocess) | {"Popen": start})
    with mock.patch.object(writer_process, "subprocess", replaced):
        yield
