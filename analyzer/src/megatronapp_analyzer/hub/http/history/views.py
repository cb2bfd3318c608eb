"""The answer about stored traces, and steps that are in memory or on the disk."""

import dataclasses
from collections.abc import Set

from megatronapp_analyzer.hub.archive.history import BusyError, ReadLimits, StepsRead
from megatronapp_analyzer.hub.http.history import schemas
from megatronapp_analyzer.hub.ingest.store import StepKey
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.service import Hub
from megatronapp_common.web.problems import HttpError

MAX_STEP = 2**32 - 1
TRACE_LIMITS = ReadLimits(bytes=64 << 20)
"""Limits of the steps of a trace that are read from the disk: a million spans, more than viewers open."""
RETRY_S = 5
OMITTED_HEADER = "Megatronapp-Omitted"
"""Header that says what is missing in an answer, and why."""


def history_view(hub: HubReader) -> schemas.HistoryView:
    """Return what is stored of the traces of the job. Reads nothing from the disk."""
    spooled, in_memory = hub.spooled, hub.ingest.store.newest(hub.ingest.store.full_steps)
    catalog, archiver = spooled.catalog, spooled.archiver
    numbers = [step.view.step for step in in_memory]
    memory = schemas.MemorySteps(
        steps=len(in_memory), first_step=min(numbers, default=None), last_step=max(numbers, default=None)
    )
    if catalog is None:
        nothing = schemas.DroppedTraces(files=0, records=0, bytes=0, until=None)
        return schemas.HistoryView(
            hours=[], bytes=0, limit_bytes=0, waiting_segments=0, dropped=nothing, damaged_files=0, memory=memory
        )
    return schemas.HistoryView(
        hours=[schemas.HistoryHour(**dataclasses.asdict(hour)) for hour in catalog.hours()],
        bytes=catalog.bytes,
        limit_bytes=catalog.limit_bytes,
        waiting_segments=0 if archiver is None else archiver.waiting,
        dropped=schemas.DroppedTraces(**dataclasses.asdict(catalog.dropped)),
        damaged_files=catalog.damaged + (archiver.damaged if archiver else 0),
        memory=memory,
    )


async def find_step(hub: Hub, step: int | None, attempt: int | None) -> StepsRead:
    """Return a step from memory, or from the disk; the newest in memory if None. Raises HttpError."""
    found = hub.ingest.store.find(step, attempt)
    if found is not None:
        return StepsRead([found], None)
    try:
        read = None if step is None or step > MAX_STEP else await hub.history.find(step, attempt)
    except BusyError as error:
        raise busy(error) from error
    if read is None:
        text = "no whole step is stored" if step is None else f"step {step} is neither in memory nor stored"
        raise HttpError(404, "step-not-held", text, "GET /api/v1/history says which steps are; older ones are sums.")
    return read


async def select_steps(hub: Hub, first: int, last: int | None) -> StepsRead:
    """Return the steps of a range, the disk's before those in memory. Raises HttpError.

    From the disk only those of the newest attempt are read; `omitted` says where earlier ones have some, too.
    """
    in_memory = hub.ingest.store.select(first, last, newest=0)
    until = min((step.view.step for step in in_memory), default=(MAX_STEP if last is None else last) + 1) - 1
    state = hub.ingest.newest
    if state is None:
        return StepsRead(in_memory, None)
    known = {step.key for step in in_memory}
    left_out = _left_out(hub, state.attempt, (first, last), known)
    if until < first:
        return StepsRead(in_memory, left_out)
    try:
        read = await hub.history.select(state.attempt, first, until, TRACE_LIMITS)
    except BusyError as error:
        raise busy(error) from error
    older = [step for step in read.steps if step.key not in known]
    chosen = [*older, *([] if read.omitted and older else in_memory)]
    if not chosen and left_out is not None:
        text = f"attempt {state.attempt} has no stored step of that range; {left_out}"
        raise HttpError(404, "step-not-held", text, "Take a step of an earlier attempt by GET /api/v1/timeline?step=.")
    return StepsRead(chosen, "; ".join(filter(None, (read.omitted, left_out))) or None)


def _left_out(hub: Hub, attempt: int, steps: tuple[int, int | None], known: Set[StepKey]) -> str | None:
    """Return what a range lacks of attempts before `attempt` whose spans are on the disk alone; None if nothing."""
    if hub.spooled.catalog is None:
        return None
    earlier = (step for step in hub.ingest.store.digests(*steps) if step.attempt < attempt)
    has_some = any((step.attempt, step.step) not in known for step in earlier)
    return f"steps of attempts before {attempt} are not included" if has_some else None


def busy(error: BusyError) -> HttpError:
    """Return the answer to a request for which there is no place."""
    return HttpError(503, "busy", str(error), f"Try again in {RETRY_S} s.", retry_s=RETRY_S)
