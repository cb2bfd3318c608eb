"""Faults for demonstration: given to the agents, which write them into the control documents of their workers."""

from typing import Any

from fastapi import APIRouter, status

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.state.faults import Fault, FaultRequest
from megatronapp_analyzer.scope.routes import CONTROLLER
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEMS: dict[int | str, dict[str, Any]] = {401: {"model": Problem}, 422: {"model": Problem}}

PROBLEM: dict[str, Any] = {"model": Problem}
BODY: dict[int | str, dict[str, Any]] = {400: PROBLEM, 403: PROBLEM, 408: PROBLEM, 409: PROBLEM, 413: PROBLEM}

STEPS_AHEAD = 5
"""Steps from the newest finished one to the first that a new fault surely reaches, as a proposal."""

router = APIRouter(prefix="/api/v1/faults", responses=PROBLEMS)


@router.get("", operation_id="listFaults")
async def list_faults(hub: HubOf) -> list[Fault]:
    """Faults that were given and not ended."""
    return hub.faults.current()


@router.post("", operation_id="addFault", status_code=status.HTTP_201_CREATED, responses=BODY, dependencies=CONTROLLER)
async def add_fault(hub: HubOf, request: FaultRequest) -> Fault:
    """Make one rank slow for some steps."""
    _check_acts(hub, request)
    fault = hub.faults.add(request, newest_step=hub.ingest.newest_step())
    if fault is None:
        raise HttpError(
            409,
            "page-full",
            "the ranks' control document is full of faults",
            "Wait until some have ended, or end some on the page.",
        )
    return fault


def _check_acts(hub: Hub, request: FaultRequest) -> None:
    """Raises HttpError for a fault that would never do anything."""
    if not hub.identity.traced:
        raise HttpError(
            409,
            "tracing-off",
            "tracing is off in this job, and faults act in the tracer",
            "Start the job with spec.trace.enabled: true.",
        )
    for rank in {request.rank, request.peer} - {None}:
        if rank not in hub.ranks.live():
            raise HttpError(409, "rank-gone", f"rank {rank} is not running", _ranks_hint(hub.ranks.live()))
    newest = hub.ingest.newest_step()
    if newest is not None and request.last_step <= newest:
        raise HttpError(
            409,
            "steps-over",
            f"the fault would end with step {request.last_step}, but step {newest} is finished already",
            f"Let it begin at step {newest + STEPS_AHEAD} or later.",
        )


def _ranks_hint(live: set[int]) -> str:
    return f"Running now: {', '.join(map(str, sorted(live)))}." if live else "No rank runs now; wait until they do."


@router.delete(
    "/{fault_id}",
    operation_id="endFault",
    status_code=status.HTTP_204_NO_CONTENT,
    responses={403: PROBLEM, 404: PROBLEM, 409: PROBLEM},
    dependencies=CONTROLLER,
)
async def end_fault(hub: HubOf, fault_id: str) -> None:
    """End a fault now."""
    if hub.faults.is_of_manifest(fault_id):
        raise HttpError(
            409, "manifest-fault", f"{fault_id} is part of the manifest", "It ends by itself; start the job without it."
        )
    if not hub.faults.remove(fault_id):
        raise HttpError(
            404,
            "no-such-fault",
            f"there is no fault {fault_id!r}",
            "It may have ended already; take one that is listed.",
        )
