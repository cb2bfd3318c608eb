"""The ranks of a bench: processes of one host that find each other, watched together."""

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

PATIENCE_S = 300.0


def run_ranks(command: Sequence[str], world: int) -> None:
    """Run a Python script as `world` ranks of this host, one GPU each, to their end.

    Raises SystemExit where a rank fails; the others are killed then.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *command], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        for _ in ranks:
            pid, status = os.wait()
            rank = next(place for place, rank_process in enumerate(ranks) if rank_process.pid == pid)
            ranks[rank].returncode = os.waitstatus_to_exitcode(status)
            if status:
                raise SystemExit(f"rank {rank} failed: {' '.join(command)}")
    finally:
        for rank_process in ranks:
            rank_process.kill()
            rank_process.wait()


def give_up_after(seconds: float = PATIENCE_S) -> None:
    """End a rank that takes longer, and print where its threads are."""
    faulthandler.dump_traceback_later(seconds, exit=True)
