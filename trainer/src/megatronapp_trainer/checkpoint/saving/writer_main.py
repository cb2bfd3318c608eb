"""Process that writes a rank's part of checkpoints: `python -m ... CONNECTION REQUESTS MEMORY`, three descriptors.

It has no GPU, no process group and no port. It ends with its rank: the system kills it, and the end of the connection
ends it. Signals that ask a job to stop are for the rank, which decides how long it waits for this process.
"""

import ctypes
import os
import pickle
import shutil
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from megatronapp_trainer.checkpoint.saving.files import GlobalPlan, require_shared, write_rank_file
from megatronapp_trainer.checkpoint.saving.host_copy import mapped, tensor_at
from megatronapp_trainer.checkpoint.saving.requests import (
    BeginRequest,
    DiscardRequest,
    PublishRequest,
    Reply,
    Request,
    WriteRequest,
    fetch,
)
from megatronapp_trainer.errors import SupersededError

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve requests until the rank closes the connection; returns the exit code."""
    connection, requests, memory = (int(argument) for argument in arguments[:3])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(arguments[3]):
        return 1
    rank = Connection(connection)
    while True:
        try:
            length = int(rank.recv_bytes())
        except (EOFError, OSError):
            return 0
        reply = answer(fetch(requests, length), memory)
        try:
            rank.send(reply)
        except OSError:
            return 0


def answer(request: Request, memory: int) -> Reply:
    """Do what is requested; `memory`: descriptor of the shared memory. Errors become replies."""
    began_s = time.monotonic()
    try:
        value = _do(request, memory)
    except SupersededError as error:
        return Reply(error=str(error), is_superseded=True)
    except Exception as error:  # whatever it is, the rank reports it and tries again
        return Reply(error=f"{type(error).__name__}: {error}")
    return Reply(value=value, seconds=time.monotonic() - began_s)


def _do(request: Request, memory: int) -> Any:  # noqa: ANN401 - the reply's
    match request:
        case BeginRequest():
            return request.publication.begin()
        case DiscardRequest():
            return shutil.rmtree(request.folder, ignore_errors=True)
        case WriteRequest():
            items, places = pickle.loads(request.layout)
            content = mapped(memory, request.memory_bytes) if request.memory_bytes else None
            require_shared(request.folder)
            return write_rank_file(
                request.folder,
                request.rank,
                items,
                lambda number: tensor_at(content, places[number]),  # type: ignore[arg-type]  # a tensor needs memory
                request.objects,
            )
        case PublishRequest():
            plan: GlobalPlan = pickle.loads(request.plan)
            return request.publication.finish(request.common, plan, request.files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
