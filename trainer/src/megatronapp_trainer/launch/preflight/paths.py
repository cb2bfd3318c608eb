"""Check of the paths of MegaDPP or MegaFBD: a process for each rank connects as the rank will, and sends a message."""

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.ranks import process

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Torch warns, with a trace of calls, of the end of a store."""
log = logging.getLogger(__name__)


class PathTrial(NamedTuple):
    """A program that tries the paths of one rank."""

    runtime: str
    """Part of MegatronApp that takes the paths."""
    module: str


_TRIALS = {
    "--forward-backward-disaggregating": PathTrial("MegaFBD", "megatronapp_trainer.fbd.path_trial"),
    "--use-dpp": PathTrial("MegaDPP", "megatronapp_trainer.pipeline.transport.path_trial"),
}
"""Trials by the flag that needs them; with both flags, ranks take the paths of MegaFBD."""


def trial_of(arguments: Sequence[str]) -> PathTrial | None:
    """Return the trial that the flags of a job need; None if its ranks take no paths of the native transport."""
    return next((trial for flag, trial in _TRIALS.items() if flag in arguments), None)


async def find_broken_paths(
    trial: PathTrial,
    environments: Mapping[int, Mapping[str, str]],
    arguments: Sequence[str],
    *,
    folder: pathlib.Path,
    timeout_s: float,
) -> tuple[int, str] | None:
    """Try the paths of the ranks of this worker, and log each; return exit code and reason of the one that failed.

    A rank whose peer is lost names no cause: the reason is that of another rank, if there is one.

    Args:
        trial: of the paths.
        environments: variables by rank.
        arguments: flags of the ranks.
        folder: for their output.
        timeout_s: limit of all of it.
    """
    command = [sys.executable, "-m", trial.module, str(timeout_s), *arguments]
    outputs = {rank: folder / f"preflight-rank-{rank}.log" for rank in environments}
    pids = {
        rank: process.spawn(command, environment={**QUIET, **environment}, log=outputs[rank])
        for rank, environment in environments.items()
    }
    ends = {rank: asyncio.create_task(_end(pid)) for rank, pid in pids.items()}
    try:
        async with asyncio.timeout(timeout_s):
            codes = dict(zip(ends, await asyncio.gather(*ends.values()), strict=True))
    except TimeoutError:
        return ExitCode.RENDEZVOUS, f"the paths of {trial.runtime} were not tried within {timeout_s:g} s"
    finally:
        await _stop(ends, pids)
    failed = sorted((code == ExitCode.PEER_LOST, rank) for rank, code in codes.items() if code != 0)
    for rank in codes:
        for line in _marked("path: ", outputs[rank]):
            log.info("path of %s from %s", trial.runtime, line)
    if not failed:
        return None
    _, rank = failed[0]
    errors = _marked("error: ", outputs[rank])
    reason = errors[-1] if errors else f"its trial ended with {codes[rank]}, see {outputs[rank]}"
    return codes[rank], f"rank {rank} has no path of {trial.runtime}: {reason}"


async def _end(pid: int) -> int:
    """Wait for a child and reap it; returns its exit code, negative for a signal."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _stop(ends: Mapping[int, "asyncio.Task[int]"], pids: Mapping[int, int]) -> None:
    """Kill and reap what still runs."""
    for rank, end in ends.items():
        if not end.done() or end.cancelled():
            process.send(pids[rank], signal.SIGKILL)
    for rank, end in ends.items():
        end.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await end
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pids[rank], 0)


def _marked(mark: str, output: pathlib.Path) -> list[str]:
    lines = output.read_text(errors="replace").splitlines()
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]
