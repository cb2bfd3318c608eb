"""The preflight: all checks between the gathering of the gang and the start of its ranks."""

import asyncio
import pathlib

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.preflight.machine import find_faults
from megatronapp_trainer.launch.preflight.reachability import find_unreached
from megatronapp_trainer.launch.ranks.failure_cause import judge
from megatronapp_trainer.launch.ranks.outcome import STOPPED, LauncherOutcome, failed
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.messages import EndNotice
from megatronapp_trainer.launch.rendezvous.session import GangConnection

REASON = "PreflightFailed"


async def run_preflight(
    wanted: PreflightRequirements, briefing: Briefing, *, uid: str, index: int, place: WorkerAddress, shm: pathlib.Path
) -> LauncherOutcome | None:
    """Return why the ranks of this worker must not start, naming its node and unreachable ones, or None."""
    own = f"worker {index} on node {briefing.table.worker(index).node}"
    faults = await asyncio.to_thread(lambda: list(find_faults(wanted, shm=shm, interface=place.interface)))
    if faults:
        return LauncherOutcome(code=ExitCode.OWN_FAILURE, reason=REASON, message=f"{own}: {'; '.join(faults)}")
    unreached = await find_unreached(briefing, uid=uid, own=index, timeout_s=wanted.timeout_s)
    if unreached:
        message = f"{own} does not reach {'; '.join(unreached)}"
        return LauncherOutcome(code=ExitCode.RENDEZVOUS, reason=REASON, message=message)
    return None


async def until_notice(gang: GangConnection, check: "asyncio.Task[LauncherOutcome | None]") -> LauncherOutcome | None:
    """Return the outcome of `check`, or of a notice by another worker that arrives first and forbids the start.

    A worker that failed would not answer any more, and its silence would be taken for a fault of the network.
    """
    heard: list[EndNotice] = []
    try:
        while not check.done():
            news = asyncio.create_task(gang.notices.get())
            await asyncio.wait({check, news}, return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                news.cancel()
            elif isinstance(found := news.result(), EndNotice):
                heard.append(found)
            else:
                return STOPPED
            judgement = judge(heard, asked_to_stop=False)
            if judgement.reason is not None:
                return failed(judgement.reason, lambda _rank: "")
        return check.result()
    finally:
        check.cancel()
        for notice in heard:
            gang.notices.put_nowait(notice)
