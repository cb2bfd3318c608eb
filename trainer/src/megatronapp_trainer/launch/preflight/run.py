"""The preflight: all checks between the gathering of the gang and the start of its ranks."""

import asyncio
import pathlib
from collections.abc import Mapping, Sequence

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.preflight.machine import find_faults
from megatronapp_trainer.launch.preflight.paths import find_broken_paths, trial_of
from megatronapp_trainer.launch.preflight.reachability import find_unreached
from megatronapp_trainer.launch.ranks.failure_cause import judge
from megatronapp_trainer.launch.ranks.outcome import STOPPED, LauncherOutcome, failed
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_connection import GangConnection
from megatronapp_trainer.launch.rendezvous.messages import EndNotice

REASON = "PreflightFailed"


async def check_node(
    requirements: PreflightRequirements | None, *, whose: str, place: WorkerAddress, shm: pathlib.Path
) -> LauncherOutcome | None:
    """Return why no rank can run on this node, or None; `whose` names worker and node in the message."""
    if requirements is None:
        return None
    faults = await asyncio.to_thread(lambda: list(find_faults(requirements, shm=shm, interface=place.interface)))
    if not faults:
        return None
    return LauncherOutcome(code=ExitCode.OWN_FAILURE, reason=REASON, message=f"{whose}: {'; '.join(faults)}")


async def run_preflight(
    requirements: PreflightRequirements,
    briefing: Briefing,
    *,
    uid: str,
    index: int,
    place: WorkerAddress,
    shm: pathlib.Path,
) -> LauncherOutcome | None:
    """Return why the ranks of this worker must not start, naming its node and unreachable ones, or None."""
    own = f"worker {index} on node {briefing.table.worker(index).node}"
    fault = await check_node(requirements, whose=own, place=place, shm=shm)
    if fault is not None:
        return fault
    unreached = await find_unreached(briefing, uid=uid, own=index, timeout_s=requirements.timeout_s)
    if unreached:
        message = f"{own} does not reach {'; '.join(unreached)}"
        return LauncherOutcome(code=ExitCode.RENDEZVOUS, reason=REASON, message=message)
    return None


async def try_paths(
    timeout_s: float,
    briefing: Briefing,
    *,
    index: int,
    environments: Mapping[int, Mapping[str, str]],
    arguments: Sequence[str],
    folder: pathlib.Path,
) -> LauncherOutcome | None:
    """Return why the ranks of a MegaDPP or MegaFBD job would not reach each other, or None; None for any other job.

    An error in the flags, or too little shared memory, is that of the job; any other error is one of the network.
    """
    trial = trial_of(arguments)
    if trial is None:
        return None
    found = await find_broken_paths(trial, environments, arguments, folder=folder, timeout_s=timeout_s)
    if found is None:
        return None
    code, reason = found
    own = f"worker {index} on node {briefing.table.worker(index).node}"
    given = ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.RENDEZVOUS
    return LauncherOutcome(code=given, reason=REASON, message=f"{own}: {reason}")


async def until_notice(gang: GangConnection, check: "asyncio.Task[LauncherOutcome | None]") -> LauncherOutcome | None:
    """Return the outcome of `check`, or of a notice by another worker that arrives first and forbids the start.

    A worker that failed would not answer any more, and its silence would be taken for a fault of the network.
    """
    received: list[EndNotice] = []
    try:
        while not check.done():
            next_notice = asyncio.create_task(gang.notices.get())
            await asyncio.wait({check, next_notice}, return_when=asyncio.FIRST_COMPLETED)
            if not next_notice.done():
                next_notice.cancel()
            elif isinstance(found := next_notice.result(), EndNotice):
                received.append(found)
            else:
                return STOPPED
            judgement = judge(received, stop_requested=False)
            if judgement.reason is not None:
                return failed(judgement.reason, lambda _rank: "")
        return check.result()
    finally:
        check.cancel()
        for notice in received:
            gang.notices.put_nowait(notice)
