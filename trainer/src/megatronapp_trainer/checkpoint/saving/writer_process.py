"""The process that writes a rank's part of checkpoints, as the rank sees it."""

import contextlib
import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from megatronapp_trainer.checkpoint.saving.requests import Reply, Request, store

_KILLED_WITHIN_S = 5.0
_MODULE = "megatronapp_trainer.checkpoint.saving.writer_main"


class WriterProcess:
    """Starts the process, and again if it is lost. It has at most one request at a time."""

    def __init__(self, memory: int) -> None:
        """Start it; `memory`: descriptor of the memory with the copies."""
        self._memory = memory
        self._requests = os.memfd_create("checkpoint-request")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_waiting = False
        """True while a request has no reply."""
        self._lost: str | None = None
        """Why the present request has no reply, if the process was lost before it was sent."""
        self._start()

    @property
    def pid(self) -> int | None:
        """Return the number of the process, None if it could not be started."""
        return None if self._process is None else self._process.pid

    def send(self, request: Request) -> None:
        """Send a request; never waits for the process."""
        self._lost = None
        try:
            if self._is_waiting or self._process is None or self._process.poll() is not None:
                self._start()
            length = store(self._requests, request)
            assert self._connection is not None
            self._connection.send_bytes(b"%d" % length)
            self._is_waiting = True
        except OSError as error:
            self._lost = f"the process that writes checkpoints cannot be reached: {error}"

    def reply(self, timeout_s: float = 0.0) -> Reply | None:
        """Return the reply if it is there within a time; a lost process is an error in it."""
        if self._lost is not None:
            return Reply(error=self._lost)
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout_s):
                return None
            reply: Reply = self._connection.recv()
        except (EOFError, OSError):
            reply = Reply(error=self._describe_loss())
        self._is_waiting = False
        return reply

    def interrupt(self) -> None:
        """End the process if it still works on a request; the next request starts another one."""
        if self._is_waiting:
            self._stop()

    def close(self) -> None:
        """End the process, also in the middle of a request."""
        self._stop()
        os.close(self._requests)

    def _start(self) -> None:
        self._stop()
        mine, its = Pipe()
        descriptors = (its.fileno(), self._requests, self._memory)
        command = [sys.executable, "-m", _MODULE, *map(str, descriptors), str(os.getpid())]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with its:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        self._connection = mine

    def _stop(self) -> None:
        self._is_waiting = False
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs: it ends once that answers
                self._process.wait(_KILLED_WITHIN_S)
            self._process = None
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _describe_loss(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_WITHIN_S)
        return f"the process that writes checkpoints was lost (exit code {self._process.returncode})"
