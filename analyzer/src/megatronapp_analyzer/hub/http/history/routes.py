"""Route of the stored traces."""

from typing import Any

from fastapi import APIRouter

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.history import schemas, views
from megatronapp_common.web.models import Problem

PROBLEMS: dict[int | str, dict[str, Any]] = {401: {"model": Problem}}

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)


@router.get("/history", operation_id="getHistory")
async def history(hub: HubOf) -> schemas.HistoryView:
    """Hours and steps whose spans are stored, how much space they take and have, and what was deleted."""
    return views.history_view(hub)
