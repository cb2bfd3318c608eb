"""Ranks of tests on GPUs: each a new process, one device each.

    run_ranks(world, function, *arguments, environment={...})

calls a function at the top of a test's file on every rank, as the fork server does on processors. A process that has
used CUDA cannot be forked, so these import everything anew: about ten seconds for all ranks together.
"""

import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatronapp_trainer.launch.address import held_port

GRACE_S = 5.0
"""How long the other ranks may run once one has failed."""
SUPPORT = pathlib.Path(__file__).resolve().parent
PATHS = (SUPPORT, SUPPORT.parents[1] / "bench")


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    environment: dict[str, str] | None = None,
    timeout_s: float = 240.0,
) -> list[Any]:
    """Return the results of ``function(*arguments)`` by rank. Raises AssertionError if a rank fails or is late."""
    source = function.__code__.co_filename
    with tempfile.TemporaryDirectory() as name, held_port("127.0.0.1") as port:
        folder = pathlib.Path(name)
        (folder / "call").write_bytes(pickle.dumps((source, function.__qualname__, arguments)))
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
            **(environment or {}),
        }
        ranks = [_start(folder, rank, shared) for rank in range(world)]
        try:
            failed = _await_all(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        logs = [(folder / f"log{rank}").read_text(errors="replace")[-4000:] for rank in range(world)]
        assert not failed, "\n".join(f"rank {rank} failed or was late:\n{logs[rank]}" for rank in failed)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def _start(folder: pathlib.Path, rank: int, shared: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)], env=environment, stdout=log, stderr=log
        )


def _await_all(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Wait for all ranks; returns those that failed, or that had not ended at the deadline."""
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    return [rank for rank, process in enumerate(ranks) if process.poll() != 0]


def main() -> None:
    """Run the call that lies in a folder, as one rank."""
    folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
    source, function, arguments = pickle.loads((folder / "call").read_bytes())
    spec = importlib.util.spec_from_file_location("device_rank", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_rank"] = module
    spec.loader.exec_module(module)
    (folder / f"result{rank}").write_bytes(pickle.dumps(getattr(module, function)(*arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a CUDA context that is torn down by the interpreter may hang behind a graph


if __name__ == "__main__":
    main()
