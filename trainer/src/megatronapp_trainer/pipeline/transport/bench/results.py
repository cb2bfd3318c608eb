"""Start of ranks that measure their transfers, and tables of the results."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from megatronapp_common.names import DEFAULT_SHM_DIR, Env
from megatronapp_trainer.errors import TransferError, UsageError
from megatronapp_trainer.pipeline.transport.bench.pair import WINDOW, PairOptions
from megatronapp_trainer.pipeline.transport.bench.rank import RankOptions

LATENCY_BYTES = 4096


def measure(*, ranks: int, sizes: tuple[int, ...], rounds: int, gloo: bool) -> dict[str, Any]:
    """Return the latency and the bandwidths of each pair of ranks.

    Raises:
        UsageError: no room in shared memory, or gloo without torch.
        TransferError: a rank failed.
    """
    parent = os.environ.get(Env.SHM_DIR) or DEFAULT_SHM_DIR
    _check_space(parent, 2 * WINDOW * max(sizes))
    if gloo:
        _check_torch()
    with tempfile.TemporaryDirectory(prefix="megatronapp-bench-", dir=parent) as directory:
        pair = PairOptions(
            directory=directory,
            job=secrets.token_hex(8),
            sizes=sizes,
            latency_bytes=LATENCY_BYTES,
            rounds=rounds,
            gloo=gloo,
        )
        pairs = _run_ranks(ranks, pair)
    return {"directory": parent, "latency_bytes": LATENCY_BYTES, "pairs": pairs}


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of latencies and one of bandwidths."""
    paths = list(result["pairs"][0]["latency_us"])
    yield f"{'pair':8}" + "".join(f"{f'{path}, us':>16}" for path in paths)
    for pair in result["pairs"]:
        yield f"{_pair(pair):8}" + "".join(f"{pair['latency_us'][path]:16.1f}" for path in paths)
    yield ""
    yield f"{'pair':8}{'MiB':>6}{'GB/s':>12}{'forth':>8}{'back':>8}{'both':>8}"
    for pair in result["pairs"]:
        for size, directions in pair["bandwidth_gb_s"].items():
            for path in directions["both"]:
                rates = "".join(f"{directions[name][path]:8.2f}" for name in ("forth", "back", "both"))
                yield f"{_pair(pair):8}{int(size) >> 20:6}{path:>12}{rates}"


def _pair(pair: dict[str, Any]) -> str:
    first, second = pair["ranks"]
    return f"{first}-{second}"


def _run_ranks(ranks: int, pair: PairOptions) -> list[dict[str, Any]]:
    """Return what the first rank prints. A rank that fails ends all others."""
    with contextlib.ExitStack() as stack:
        logs, processes = [], []
        for rank in range(ranks):
            log = pathlib.Path(pair.directory, f"errors-{rank}")
            logs.append(log)
            errors = stack.enter_context(log.open("w"))
            options = json.dumps(dataclasses.asdict(RankOptions(rank, ranks, pair)))
            process = subprocess.Popen(
                [sys.executable, "-m", "megatronapp_trainer.pipeline.transport.bench.rank", options],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        printed, _ = processes[0].communicate()
        if any(process.wait() for process in processes):
            failed = [log for log, process in zip(logs, processes, strict=True) if process.poll()]
            raise TransferError(f"a rank of the measurement failed: {_first_error(failed)}")
        pairs: list[dict[str, Any]] = json.loads(printed)
        return pairs


def _first_error(logs: list[pathlib.Path]) -> str:
    """Return the last line of the log that ended first: ranks that fail later may do so for want of that one."""
    written = [log for log in logs if log.stat().st_size]
    if not written:
        return "no rank says why"
    return min(written, key=lambda log: log.stat().st_mtime_ns).read_text(encoding="utf-8").splitlines()[-1]


def _check_space(directory: str, needed: int) -> None:
    try:
        system = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}; set {Env.SHM_DIR} to a tmpfs") from error
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < needed:
        raise UsageError(
            f"{directory} has {free >> 20} MiB free, and the messages of a pair take {needed >> 20} MiB; give smaller "
            f"--sizes, or set {Env.SHM_DIR} to a larger tmpfs"
        )


def _check_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UsageError("--gloo needs torch, which is not installed; leave it out")
