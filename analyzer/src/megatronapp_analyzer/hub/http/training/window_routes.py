"""Windows of detailed spans, which users order while a job runs."""

from typing import Any

from fastapi import APIRouter, status

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.state.windows import MAX_LEAD, MAX_WINDOWS, Window, WindowRequest, first_step
from megatronapp_analyzer.scope.routes import CONTROLLER
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEM: dict[str, Any] = {"model": Problem}
PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 422: PROBLEM}
BODY: dict[int | str, dict[str, Any]] = {400: PROBLEM, 403: PROBLEM, 408: PROBLEM, 409: PROBLEM, 413: PROBLEM}

router = APIRouter(prefix="/api/v1/trace/windows", responses=PROBLEMS)


@router.get("", operation_id="listWindows")
async def list_windows(hub: HubOf) -> list[Window]:
    """Windows that were ordered and are not over."""
    return hub.windows.current(hub.ingest.newest_step())


@router.post(
    "", operation_id="orderWindow", status_code=status.HTTP_201_CREATED, responses=BODY, dependencies=CONTROLLER
)
async def order_window(hub: HubOf, request: WindowRequest) -> Window:
    """Record parts of passes of some steps, on some ranks or all."""
    newest = hub.ingest.newest_step()
    earliest = _earliest_step(hub)
    _check(hub, request, newest)
    _check_in_time(hub, earliest)
    from_step = earliest
    if request.from_step is not None and request.from_step > earliest:
        from_step = request.from_step
    window = hub.windows.add(request, from_step=from_step, newest_step=newest)
    if window is None:
        raise HttpError(
            409, "windows-wait", f"{MAX_WINDOWS} windows are not over yet", "Wait until one of them has ended."
        )
    return window


@router.delete(
    "/{window_id}",
    operation_id="cancelWindow",
    status_code=status.HTTP_204_NO_CONTENT,
    responses={403: PROBLEM, 404: PROBLEM},
    dependencies=CONTROLLER,
)
async def cancel_window(hub: HubOf, window_id: str) -> None:
    """Cancel a window: it ends as soon as all ranks can know of it; what they have recorded stays."""
    current, earliest = hub.windows.current(hub.ingest.newest_step()), _earliest_step(hub)
    if window_id not in [window.id for window in current] or not hub.windows.cancel(window_id, earliest=earliest):
        listed = ", ".join(window.id for window in current)
        raise HttpError(
            404,
            "no-such-window",
            f"there is no window {window_id[:80]!r}",
            f"Not over yet: {listed}." if listed else "All windows are over.",
        )


def _earliest_step(hub: Hub) -> int:
    """Return the first step with which a window can begin, also before a resumed attempt has finished a step."""
    newest, progress = hub.ingest.newest_step(), hub.ranks.progress
    if newest is None and progress is not None and progress.iteration:
        newest = progress.iteration - 1
    return first_step(newest, hub.ingest.usual_step_s())


def _check(hub: Hub, request: WindowRequest, newest: int | None) -> None:
    """Raises HttpError for a window in which nothing would be recorded."""
    if not hub.identity.traced:
        raise HttpError(409, "tracing-off", "tracing is off in this job", "Start it with spec.trace.enabled: true.")
    live = hub.ranks.live()
    for rank in request.ranks or ():
        if rank not in live:
            raise HttpError(
                409, "rank-gone", f"rank {rank} is not running", f"Running now: {', '.join(map(str, sorted(live)))}."
            )
    attempt = hub.ingest.newest
    if request.granularity == "full" and attempt is not None and attempt.layout is not None and attempt.layout.roles:
        raise HttpError(
            409,
            "no-layers",
            "ranks of MegaFBD run no modules whose parts could be timed",
            "Order a window of granularity base: all tensor-parallel collectives.",
        )
    if request.from_step is not None:
        _check_reached(hub, request.from_step, request.steps, newest)


def _check_reached(hub: Hub, from_step: int, steps: int, newest: int | None) -> None:
    """Raises HttpError for a window that is over, or that the job reaches never or not soon."""
    if newest is not None and from_step + steps - 1 <= newest:
        raise HttpError(
            409,
            "steps-over",
            f"the window would end with step {from_step + steps - 1}, and step {newest} is finished",
            "Leave fromStep out: the window then begins as soon as all ranks can know of it.",
        )
    progress = hub.ranks.progress
    total = None if progress is None else progress.total_iterations
    if total is not None and from_step >= total:
        raise HttpError(
            409,
            "step-never-reached",
            f"the window would begin with step {from_step}, and the last step of this job is {total - 1}",
            f"Let it begin at step {total - 1} or earlier.",
        )
    known = max(newest or 0, (progress.iteration or 0) if progress is not None else 0)
    if from_step > known + MAX_LEAD:
        raise HttpError(
            409,
            "step-too-far",
            f"the window would begin with step {from_step}, more than {MAX_LEAD} steps after step {known}",
            f"Let it begin at step {known + MAX_LEAD} or earlier.",
        )


def _check_in_time(hub: Hub, earliest: int) -> None:
    """Raises HttpError if the job ends before all ranks can know of a window."""
    progress = hub.ranks.progress
    total = None if progress is None else progress.total_iterations
    if total is not None and earliest >= total:
        raise HttpError(
            409,
            "step-never-reached",
            f"all ranks can know of a window from step {earliest} on, and the last step of this job is {total - 1}",
            "Order windows some steps or seconds before a job ends.",
        )
